// Numbers and times as text, and elements.

const COUNT = new Intl.NumberFormat("en");

export const count = (number) => COUNT.format(number);

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

export function ms(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 100 ? value.toFixed(0) : value.toPrecision(value >= 10 ? 3 : 2)} ms`;
}

export function bytes(value) {
  return value >= 1 << 30 ? `${(value / (1 << 30)).toFixed(1)} GB` : `${Math.round(value / (1 << 20))} MB`;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return count(value);
  return Math.abs(value) >= 1e4 || (Math.abs(value) < 1e-3 && value !== 0) ? value.toExponential(2) : String(+value.toPrecision(4));
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function ago(at) {
  const seconds = Math.max(0, Date.now() / 1000 - at);
  if (seconds < 100) return `${Math.round(seconds)} s ago`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

/** Makes an element: element("li", { class: "quiet" }, "text", child). */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Makes an element of SVG. */
export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Sets the text of an element where it has changed: nothing is laid out, or read aloud, for nothing. */
export function say(target, text) {
  const place = typeof target === "string" ? document.getElementById(target) : target;
  if (place.textContent !== text) place.textContent = text;
}
