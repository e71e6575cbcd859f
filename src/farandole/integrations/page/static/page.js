// The page: follows the feed, and shows the model.

import { Chart } from "./chart.js";
import { Control, token } from "./control.js";
import { follow } from "./feed.js";
import { Generations } from "./generations.js";
import { Model, stragglers } from "./model.js";
import { Ring, hueOf } from "./ring.js";
import { ago, bytes, clock, count, element, ms, number, plural, say } from "./text.js";

const EVENTS = 1000;
const CHECKPOINTS = 8;

const by = (id) => document.getElementById(id);
const model = new Model();
token();
const control = new Control();
const ring = new Ring(by("ring"));
const generations = new Generations(by("timeline"), by("generations"));
const charts = new Map();
const rows = new Map();
const shownEvents = new Set();
let isDue = false;

by("only-warnings").addEventListener("change", (event) => by("events").classList.toggle("warnings", event.target.checked));

by("save-trace").addEventListener("click", () => control.save("/trace.json", `farandole-${model.job || "job"}.json`));

follow(token, onMessage, onContact);
setInterval(render, 1000); // ages, and workers that fade

function onMessage(kind, data) {
  model.apply(kind, data);
  if (kind === "picture") {
    by("events").replaceChildren();
    shownEvents.clear();
    model.events.forEach(addEvent);
  } else if (kind === "event") {
    addEvent(data.event);
    if (data.event.level === "warning" || data.event.name === "Recovered") say("announcement", data.event.line);
  }
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; render(); });
}

function onContact(problem) {
  const text = problem === "token" ? "this page needs its token; see below" : problem;
  if (problem === "token") by("token").focus();
  model.problem = text;
  showContact();
}

function showContact() {
  const texts = { lost: "the coordinator does not answer; another one takes over", ended: "the job has ended" };
  say("contact", model.contact === "ended" ? texts.ended : model.problem || texts[model.contact] || "");
}

function addEvent(event) {
  if (shownEvents.has(event.id)) return;
  shownEvents.add(event.id);
  const list = by("events");
  list.prepend(element("li", { class: event.level, "data-id": event.id, "data-name": event.name },
    element("time", { datetime: new Date(event.at * 1000).toISOString() }, clock(event.at)),
    element("span", { class: "line" }, event.line)));
  while (list.childElementCount > EVENTS) list.lastElementChild.remove();
}

function render() {
  showContact();
  const { status } = model;
  if (!status) return;
  const workers = model.workers();
  const hosts = model.hosts();
  showFacts(status, workers);
  showEpoch(status);
  ring.show(workers, hosts.map((each) => each.name));
  showHosts(hosts);
  showWorkers(workers);
  showCurves();
  generations.show(model.generations);
  showCheckpoints();
  control.show(status, hosts);
}

function showFacts(status, workers) {
  const members = workers.filter((each) => each.rank !== null);
  const state = model.contact === "ended" ? "ended" : status.state;
  say("job", model.job);
  document.title = `${members.length}/${status.wanted} ${state} · Farandole`;
  say("state", status.change ? `${state}, change under way` : state);
  by("state").dataset.state = state;
  say("workers-now", String(members.length));
  const others = workers.length - members.length;
  say("workers-wanted", `of ${status.wanted}${others ? `; ${plural(others, "newcomer")}` : ""}`);
  say("generation", String(status.generation || "–"));
  say("regroups", plural(status.regroups, "regroup"));
  say("step", status.step === null ? "–" : count(status.step));
  const rate = last(model.curves.columns.rate);
  say("rate", rate === null ? "" : `${number(rate)} per second`);
  const slowest = members.reduce((most, each) => (each.stepMs > (most?.stepMs ?? 0) ? each : most), null);
  say("step-ms", slowest ? ms(slowest.stepMs) : "–");
  const slow = stragglers(workers);
  say("step-slowest", slow.size ? `others wait for ${[...slow].join(", ")}` : "");
  const recovered = model.generations.findLast((each) => each.total_ms && (!each.is_planned || each.lost.length));
  say("recovery", recovered ? ms(recovered.total_ms) : "–");
  say("recovery-ago", recovered ? `${ago(recovered.at)}; ${plural(model.totals.lost ?? 0, "worker")} lost` : "no worker was lost");
  const saved = model.checkpoints.findLast((each) => each.is_saved);
  say("checkpoint", saved ? `step ${count(saved.step)}` : "–");
  say("checkpoint-ago", saved ? ago(saved.at) : "");
}

function showEpoch({ epoch, trained, samples }) {
  say("epoch", String(epoch + 1));
  const bar = by("epoch-progress");
  if (samples) {
    bar.max = samples;
    bar.value = trained;
  }
  say("trained", count(trained));
  say("trained-of", samples ? `of ${count(samples)} samples, each trained exactly once (${((100 * trained) / samples).toFixed(1)} %)` : trained ? "samples, each trained exactly once" : "no loader of Farandole counts samples here");
  const redone = model.totals.samples_redone ?? 0;
  say("redone", redone ? `· ${plural(redone, "sample")} in ${plural(model.totals.steps_redone, "step")} begun, dropped and repeated since the start` : "");
}

function showHosts(hosts) {
  const key = JSON.stringify(hosts);
  if (key === showHosts.key) return;
  showHosts.key = key;
  by("hosts").replaceChildren(...hosts.map((host, index) => {
    const colour = element("i");
    colour.style.background = hueOf(index);
    const state = host.isDrained ? "drained" : host.outForS ? "excluded" : host.isConnected ? "" : "no agent";
    return element("li", {}, colour, `${host.name}: ${host.workers} of ${plural(host.slots, "slot")}${state ? `, ${state}` : ""}`);
  }));
}

function showWorkers(workers) {
  const slow = stragglers(workers);
  const most = Math.max(1e-9, ...workers.map((each) => each.stepMs));
  const sorted = [...workers].sort((a, b) => (a.rank ?? 1e9) - (b.rank ?? 1e9));
  for (const each of sorted) {
    const row = rows.get(each.name) ?? newRow(each.name);
    const waiting = each.stepMs ? each.waitingMs / most : 0;
    row.own.style.width = `${100 * (each.stepMs / most - waiting)}%`;
    row.waiting.style.width = `${100 * waiting}%`;
    say(row.rank, each.rank === null ? "–" : String(each.rank));
    say(row.state, each.state + (slow.has(each.name) ? ", slow" : ""));
    const share = each.share ? `; ${(100 * each.share).toFixed(1)} % of a step's samples` : "";
    say(row.time, each.stepMs ? `${ms(each.stepMs)}, waits ${ms(each.waitingMs)}${share}` : "–");
    say(row.memory, each.bytes ? bytes(each.bytes) : "–");
    say(row.cores, each.bytes ? each.cores.toFixed(1) : "–");
    row.element.classList.toggle("slow", slow.has(each.name));
  }
  const present = new Set(workers.map((each) => each.name));
  for (const [name, row] of rows) {
    if (present.has(name)) continue;
    row.element.remove();
    rows.delete(name);
  }
  const order = sorted.map((each) => rows.get(each.name).element);
  const body = by("workers");
  if (order.some((each, index) => body.children[index] !== each)) body.replaceChildren(...order);
}

function newRow(name) {
  const row = { own: element("i", { class: "own" }), waiting: element("i", { class: "waiting" }), time: element("span") };
  for (const part of ["rank", "state", "memory", "cores"]) row[part] = element("td", part === "state" ? {} : { class: part === "rank" ? "" : "number" });
  row.element = element("tr", { "data-worker": name }, row.rank, element("th", { scope: "row" }, name), row.state,
    element("td", {}, element("div", { class: "timing" }, element("span", { class: "bar", "aria-hidden": "true" }, row.own, row.waiting), row.time)),
    row.memory, row.cores);
  rows.set(name, row);
  return row;
}

function showCurves() {
  const { at, columns } = model.curves;
  const marks = model.generations.slice(1).map((each) => each.at);
  const chart = (name, place, title, format) => {
    if (!charts.has(name)) {
      if (place === "values" && ![...charts.keys()].some((each) => each.startsWith("value:"))) by("values").replaceChildren();
      charts.set(name, new Chart(by(place), title, format));
    }
    charts.get(name).show(at, columns[name] ?? [], marks);
  };
  if (at.length) {
    chart("rate", "speed", "Steps per second");
    chart("step_ms", "speed", "Step time", ms);
    chart("workers", "speed", "Workers");
  }
  for (const name of Object.keys(columns)) {
    if (name.startsWith("value:")) chart(name, "values", name.slice("value:".length), number);
  }
}

function showCheckpoints() {
  const { checkpoints } = model;
  if (!checkpoints.length || checkpoints.length === showCheckpoints.shown) return;
  showCheckpoints.shown = checkpoints.length;
  const body = element("tbody", {}, ...checkpoints.slice(-CHECKPOINTS).reverse().map((each) => element("tr", {},
    element("td", {}, clock(each.at)), element("td", { class: "number" }, count(each.step)),
    element("td", { class: "text" }, each.is_saved ? `${each.name}, ${each.took_s.toFixed(1)} s` : `failed: ${each.reason}`))));
  by("checkpoints").replaceChildren(element("table", {}, element("thead", {}, element("tr", {},
    ...["Time", "Step", "File"].map((text) => element("th", { scope: "col" }, text)))), body));
}

function last(column) {
  return column?.length ? column[column.length - 1] : null;
}
