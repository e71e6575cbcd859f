// A curve over time, with the newest number in words and some of the numbers as a table.

import { clock, element, number, svg } from "./text.js";

const WIDTH = 400;
const HEIGHT = 90;
const ROWS = 10;

export class Chart {
  /** Adds a figure to `place`. `format` makes text of a number. */
  constructor(place, title, format = number) {
    this.format = format;
    this.now = element("b");
    this.range = element("span");
    this.marks = svg("g");
    this.curve = svg("path", { class: "curve" });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title} over time` },
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT - 1, y2: HEIGHT - 1 }),
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: 1, y2: 1 }), this.marks, this.curve);
    this.picture.style.height = "90px";
    this.rows = element("tbody");
    this.details = element("details", { class: "numbers" }, element("summary", {}, `${title} as a table`),
      element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Time"),
        element("th", { scope: "col" }, title))), this.rows));
    this.figure = element("figure", { class: "chart" },
      element("figcaption", {}, element("span", {}, title, " ", this.now), this.range), this.picture, this.details);
    place.append(this.figure);
    this.details.addEventListener("toggle", () => this.#table());
  }

  /** Shows the values at their times; null is a gap. `marks` are times of generations that began. */
  show(at, values, marks = []) {
    this.at = at;
    this.values = values;
    const known = values.filter((value) => value !== null);
    if (!known.length) return;
    let [low, high] = [Math.min(...known), Math.max(...known)];
    const [from, to] = [at[0], Math.max(at[at.length - 1], at[0] + 1)];
    const x = (time) => ((time - from) / (to - from)) * WIDTH;
    // A mean over other workers may round a constant otherwise, in its last digits.
    const isFlat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
    this.range.textContent = isFlat ? "" : `${this.format(low)} to ${this.format(high)}`;
    if (isFlat) [low, high] = [low - 1, high + 1];
    const y = (value) => 4 + (1 - (value - low) / (high - low)) * (HEIGHT - 8);
    let path = "";
    let isDrawn = false;
    values.forEach((value, index) => {
      if (value === null) { isDrawn = false; return; }
      path += `${isDrawn ? "L" : "M"}${x(at[index]).toFixed(1)} ${y(value).toFixed(1)}`;
      isDrawn = true;
    });
    this.curve.setAttribute("d", path);
    this.now.textContent = this.format(known[known.length - 1]);
    this.marks.replaceChildren(...marks.filter((time) => time > from && time < to).slice(-60)
      .map((time) => svg("line", { class: "mark-line", x1: x(time), x2: x(time), y1: 0, y2: HEIGHT })));
    if (this.details.open) this.#table();
  }

  #table() {
    const every = Math.max(1, Math.ceil(this.at.length / ROWS));
    const rows = [];
    for (let index = this.at.length - 1; index >= 0; index -= every) {
      rows.push(element("tr", {}, element("td", {}, clock(this.at[index])), element("td", {}, this.values[index] === null ? "–" : this.format(this.values[index]))));
    }
    this.rows.replaceChildren(...rows);
  }
}
