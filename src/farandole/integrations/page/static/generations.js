// The timeline of the generations, and the recoveries with their phases.

import { clock, count, element, ms, plural, svg } from "./text.js";

const PHASES = [
  ["silent", "a host was silent"],
  ["ready", "all members at rest, and START sent"],
  ["connected", "data connections opened"],
  ["synced", "states compared and copied"],
  ["first_step", "first step applied"],
];
const WIDTH = 1000;
const HEIGHT = 90;
const SHOWN = 60;

export class Generations {
  #shown = new Map(); // by number: the element, and its text

  constructor(picture, list) {
    this.list = list;
    this.title = svg("title", { id: "timeline-picture" }, "no generation yet");
    this.bars = svg("g");
    picture.append(svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-labelledby": "timeline-picture" }, this.title, this.bars));
  }

  /** Shows the generations, the newest first. */
  show(generations) {
    this.#drawTimeline(generations);
    const newest = generations.slice(-SHOWN);
    for (const each of newest) this.#put(each);
    const numbers = new Set(newest.map((each) => each.number));
    for (const [number, shown] of this.#shown) {
      if (numbers.has(number)) continue;
      shown.element.remove();
      this.#shown.delete(number);
    }
  }

  #put(generation) {
    const key = JSON.stringify(generation);
    const before = this.#shown.get(generation.number);
    if (before?.key === key) return;
    const made = details(generation);
    made.open = before?.element.open ?? false;
    if (before) before.element.replaceWith(made);
    else {
      if (!this.#shown.size) this.list.replaceChildren();
      this.list.prepend(made);
    }
    this.#shown.set(generation.number, { key, element: made });
  }

  #drawTimeline(generations) {
    if (!generations.length) return;
    const [from, to] = [generations[0].at, Math.max(Date.now() / 1000, generations[0].at + 1)];
    const most = Math.max(...generations.map((each) => each.workers.length));
    const x = (at) => ((Math.min(at, to) - from) / (to - from)) * WIDTH;
    const bars = [];
    generations.forEach((each, index) => {
      const end = generations[index + 1]?.at ?? to;
      const height = (each.workers.length / most) * (HEIGHT - 14);
      bars.push(svg("rect", { class: "run", x: x(each.at), y: HEIGHT - height, width: Math.max(0.5, x(end) - x(each.at)), height }));
      if (index) bars.push(svg("rect", { class: each.is_planned && !each.lost.length ? "planned" : "fault", x: x(each.at) - 1.5, y: 0, width: 3, height: HEIGHT }));
    });
    this.bars.replaceChildren(...bars);
    const sizes = generations.slice(-8).map((each) => each.workers.length).join(", ");
    this.title.textContent = `${plural(generations.length, "generation")}; workers in the last of them: ${sizes}`;
  }
}

function details(generation) {
  const { number, workers, total_ms: total, phases_ms: phases, lost, joined, is_planned: isPlanned, reason } = generation;
  const isFault = !isPlanned || lost.length > 0;
  const why = [
    lost.length ? `without ${lost.join(", ")}` : "",
    joined.length ? `with ${joined.join(", ")}` : "",
    reason,
  ].filter(Boolean).join("; ");
  const took = total ? `${ms(total)} ${isFault ? "recovery" : "change"}` : "";
  const summary = element("summary", { class: isFault ? "fault" : "" },
    element("b", {}, `Generation ${number}`), element("span", {}, clock(generation.at)),
    element("span", {}, plural(workers.length, "worker")), element("span", {}, took), element("span", { class: "why" }, why));
  const inside = element("div", { class: "inside" });
  if (Object.keys(phases).length) inside.append(...phasesOf(generation));
  else inside.append(element("p", { class: "quiet" }, number === 1 || !reason ? "The first generation: nothing was recovered." : "No step has been applied yet."));
  inside.append(element("p", { class: "quiet" }, `Workers by rank: ${workers.join(", ")}`));
  return element("details", { "data-number": number }, summary, inside);
}

function phasesOf(generation) {
  const { phases_ms: phases, total_ms: total } = generation;
  const bar = element("div", { class: "phases", "aria-hidden": "true" });
  const rows = element("tbody");
  PHASES.forEach(([name, meaning], index) => {
    const value = phases[name] ?? 0;
    if (name === "silent" && !value) return;
    const part = element("i", { class: `phase${index}` });
    part.style.flexGrow = value;
    bar.append(part);
    const colour = element("i", { class: `phase${index}` });
    colour.style.cssText = "display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.4rem";
    rows.append(element("tr", {}, element("th", { scope: "row" }, colour, name.replace("_", " ")),
      element("td", { class: "number", "data-phase": name }, ms(value)), element("td", { class: "quiet text" }, meaning)));
  });
  rows.append(element("tr", {}, element("th", { scope: "row" }, "total"), element("td", { class: "number", "data-phase": "total" }, ms(total)),
    element("td", { class: "quiet text" }, [
      generation.noticed.length ? `noticed by ${generation.noticed.join(" and ")}` : "",
      generation.slowest ? `slowest ${generation.slowest}` : "",
      generation.steps_redone ? `${plural(generation.steps_redone, "step")} (${count(generation.samples_redone)} samples) redone` : "no step redone",
    ].filter(Boolean).join("; "))));
  return [bar, element("table", {}, element("thead", { class: "unseen" }, element("tr", {}, ...["Phase", "Duration", "Meaning"].map((text) => element("th", { scope: "col" }, text)))), rows)];
}
