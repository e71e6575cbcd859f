// The ring of the workers, by rank and host. The table beside it has the same in words.

import { plural, svg } from "./text.js";

const SIZE = 360;
const RADIUS = 130;
const GONE_MS = 5000;
const NEW_MS = 6000;
const HUES = [202, 32, 262, 150, 340, 80, 230, 12];

export const hueOf = (index) => `hsl(${HUES[index % HUES.length]} 45% 52%)`;

export class Ring {
  #nodes = new Map(); // by worker: the group, and since when it is gone or new

  constructor(place) {
    this.title = svg("title", { id: "ring-picture" }, "no workers yet");
    this.arcs = svg("g");
    this.links = svg("circle", { class: "link", cx: SIZE / 2, cy: SIZE / 2, r: RADIUS });
    this.nodes = svg("g");
    this.size = svg("text", { class: "middle", x: SIZE / 2, y: SIZE / 2 + 4 });
    this.what = svg("text", { class: "middle small", x: SIZE / 2, y: SIZE / 2 + 24 });
    this.svg = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-labelledby": "ring-picture" },
      this.title, this.arcs, this.links, this.size, this.what, this.nodes);
    place.append(this.svg);
    this.isFirst = true;
  }

  /** Shows the workers; `hosts` are the names of all hosts in their order. */
  show(workers, hosts) {
    const members = workers.filter((each) => each.rank !== null).sort((a, b) => a.rank - b.rank);
    const others = workers.filter((each) => each.rank === null);
    const radius = Math.max(5, Math.min(17, (2 * Math.PI * RADIUS) / Math.max(1, members.length) / 2.5));
    const now = performance.now();
    members.forEach((each, index) => this.#put(each, at(index, members.length, RADIUS), radius, now));
    others.forEach((each, index) => this.#put(each, at(index, Math.max(3, others.length), 62), Math.min(radius, 12), now));
    const present = new Set(workers.map((each) => each.name));
    for (const [name, node] of this.#nodes) {
      if (present.has(name)) continue;
      node.goneAt ??= now;
      node.group.setAttribute("class", "node");
      node.circle.setAttribute("class", "worker gone");
      if (now > node.goneAt + GONE_MS) {
        node.group.remove();
        this.#nodes.delete(name);
      } else if (now > node.goneAt + GONE_MS / 2) node.group.style.opacity = 0;
    }
    this.#drawArcs(members, hosts);
    this.size.textContent = members.length || "";
    this.what.textContent = members.length === 1 ? "worker" : members.length ? "workers" : "";
    const by = hosts.map((host) => [host, members.filter((each) => each.host === host).length]).filter(([, n]) => n);
    const text = `Ring of ${plural(members.length, "worker")}${by.length ? ": " : ""}${by.map(([host, n]) => `${n} on ${host}`).join(", ")}`
      + (others.length ? `; ${plural(others.length, "other worker")} beside it` : "");
    if (this.title.textContent !== text) this.title.textContent = text;
    this.isFirst = false;
  }

  #put(worker, [x, y], radius, now) {
    let node = this.#nodes.get(worker.name);
    if (!node) {
      const circle = svg("circle", { r: radius });
      const label = svg("text", { dy: "0.35em" });
      const group = svg("g", { class: "node" }, circle, label);
      node = { group, circle, label, newUntil: this.isFirst ? 0 : now + NEW_MS };
      this.#nodes.set(worker.name, node);
      this.nodes.append(group);
    }
    node.goneAt = undefined;
    node.group.style.opacity = 1;
    const kind = worker.rank === null ? "waits" : worker.state === "leaves" || worker.state === "fails" ? "leaves"
      : now < node.newUntil ? "new" : "";
    node.group.setAttribute("class", `node ${kind}`);
    node.circle.setAttribute("class", `worker ${kind}`);
    node.circle.setAttribute("r", radius);
    node.group.style.transform = `translate(${x}px, ${y}px)`;
    node.label.textContent = radius < 9 ? "" : worker.rank ?? worker.name;
  }

  #drawArcs(members, hosts) {
    const key = members.map((each) => each.host).join();
    if (key === this.arcsKey) return;
    this.arcsKey = key;
    this.arcs.replaceChildren();
    let first = 0;
    members.forEach((each, index) => {
      if (index + 1 < members.length && members[index + 1].host === each.host) return;
      const path = svg("path", { class: "arc", d: arc(first, index, members.length, RADIUS + 27) });
      path.style.stroke = hueOf(hosts.indexOf(each.host));
      this.arcs.append(path);
      first = index + 1;
    });
  }
}

function at(index, total, radius) {
  const angle = (2 * Math.PI * index) / total - Math.PI / 2;
  return [SIZE / 2 + radius * Math.cos(angle), SIZE / 2 + radius * Math.sin(angle)];
}

function arc(first, last, total, radius) {
  const [begin, end] = [first - 0.32, last + 0.32];
  if (total === 1) return `M ${at(0.001, 1, radius).join(" ")} A ${radius} ${radius} 0 1 1 ${at(0.999, 1, radius).join(" ")}`;
  const isLong = (end - begin) / total > 0.5 ? 1 : 0;
  return `M ${at(begin, total, radius).join(" ")} A ${radius} ${radius} 0 ${isLong} 1 ${at(end, total, radius).join(" ")}`;
}
