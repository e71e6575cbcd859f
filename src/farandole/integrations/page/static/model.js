// What the page knows of the job: the picture that it got first, and what has changed since.

const EVENTS = 1000;
const POINTS = 1440;

export class Model {
  constructor() {
    this.job = "";
    this.contact = "connecting";
    this.status = null;
    this.events = [];
    this.generations = [];
    this.checkpoints = [];
    this.curves = { at: [], columns: {} };
    this.totals = {};
  }

  /** Takes a message of the feed. */
  apply(kind, data) {
    if (kind === "picture") Object.assign(this, data);
    else if (kind === "contact") this.contact = data.contact;
    else if (kind === "status") this.#onStatus(data);
    else if (kind === "event") this.#onEvent(data);
  }

  #onStatus({ status, at, point }) {
    this.status = status;
    if (!point) return;
    const { curves } = this;
    curves.at.push(at);
    for (const name of Object.keys(point)) {
      curves.columns[name] ??= new Array(curves.at.length - 1).fill(null);
    }
    for (const [name, column] of Object.entries(curves.columns)) column.push(point[name] ?? null);
    if (curves.at.length > POINTS) {
      const isKept = (_, index) => index % 2 === 0;
      curves.at = curves.at.filter(isKept);
      for (const name of Object.keys(curves.columns)) curves.columns[name] = curves.columns[name].filter(isKept);
    }
  }

  #onEvent({ event, generation, checkpoint, totals }) {
    this.events.push(event);
    if (this.events.length > EVENTS) this.events.shift();
    this.totals = totals;
    if (checkpoint) this.checkpoints.push(checkpoint);
    if (generation) {
      const index = this.generations.findIndex((each) => each.number === generation.number);
      if (index < 0) this.generations.push(generation);
      else this.generations[index] = generation;
    }
  }

  /** The workers; `rank` is null for those that are no members. */
  workers() {
    return (this.status?.workers ?? []).map(
      ([name, rank, host, slot, pid, state, step, restarts, stepMs, waitingMs, bytes, cores, share]) => (
        { name, rank, host, slot, pid, state, step, restarts, stepMs, waitingMs, bytes, cores, share }));
  }

  /** The hosts. */
  hosts() {
    return (this.status?.hosts ?? []).map(([name, slots, workers, isConnected, isDrained, outForS]) => (
      { name, slots, workers, isConnected, isDrained, outForS }));
  }
}

/** The workers of which the others wait: their own part of a step is much longer than that of most. */
export function stragglers(workers) {
  const measured = workers.filter((each) => each.rank !== null && each.stepMs > 0);
  if (measured.length < 2) return new Set();
  const own = (each) => each.stepMs - each.waitingMs;
  const sorted = measured.map(own).sort((a, b) => a - b);
  const middle = sorted[Math.floor((sorted.length - 1) / 2)];
  const isSlow = (each) => own(each) > 1.5 * middle && own(each) > 0.5 * each.stepMs;
  return new Set(measured.filter(isSlow).map((each) => each.name));
}
