// Elements and words: receives tags, attributes and numbers, hands on nodes and text for people.

const SVG = "http://www.w3.org/2000/svg";

function make(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return node;
}

export const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);

/** Replace what a node holds. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((each) => each !== null && each !== undefined && each !== false));
  return node;
}

/** Set text only where it changed: a second's update must not disturb a reader's place. */
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export const NONE = "–";

/** Three significant digits, without an exponent. */
export function digits(x, places = 3) {
  if (x === 0) return "0";
  const whole = Math.floor(Math.log10(Math.abs(x))) + 1;
  if (whole >= places) return Math.round(x).toLocaleString("en");
  return x.toFixed(Math.min(6, Math.max(0, places - whole)));
}

function scaled(x, units, base = 1000) {
  let at = 0;
  while (Math.abs(x) >= base && at < units.length - 1) { x /= base; at += 1; }
  return [digits(x), units[at]];
}

const absent = (x) => x === null || x === undefined || Number.isNaN(x);

export const flops = (x) => absent(x) ? [NONE, ""] : scaled(x, ["FLOP/s", "kFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"]);
export const bytes = (x) => absent(x) ? [NONE, ""] : scaled(x, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
export const rate = (x) => absent(x) ? [NONE, ""] : scaled(x, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
export const count = (x) => absent(x) ? NONE : Number.isInteger(x) ? x.toLocaleString("en") : digits(x);
export const percent = (x) => absent(x) ? [NONE, ""] : [digits(100 * x), "%"];

export function seconds(x) {
  if (absent(x)) return [NONE, ""];
  const [value, unit] = scaled(x * 1e9, ["ns", "µs", "ms"]);
  return Math.abs(x) >= 1 ? [digits(x), "s"] : [value, unit];
}

export const words = ([value, unit]) => (unit ? `${value} ${unit}` : value);

/** A table from column heads and rows of cells (text or nodes); numeric columns to the right. */
export function table(caption, heads, rows, numeric = []) {
  const side = (at) => (numeric.includes(at) ? "num" : undefined);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: side(at) }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", { class: row.mark }, (row.cells ?? row).map((cell, at) =>
        at === 0 ? h("th", { scope: "row", class: side(at) }, cell) : h("td", { class: side(at) }, cell)))))));
}

/** A labelled choice. */
export function select(label, options, value, onchange, attributes = {}) {
  const control = h("select", { ...attributes, onchange: () => onchange(control.value) },
    options.map(([name, shown]) => h("option", { value: name, selected: String(name) === String(value) }, shown)));
  return h("label", { class: "field" }, h("span", {}, label), control);
}

export const panel = (title, ...children) => h("div", { class: "panel" }, title ? h("h3", {}, title) : null, children);
export const note = (...children) => h("p", { class: "note" }, ...children);

/** Draw a chart as wide as its place, so that its text keeps its size; again when the place changes. */
export function fitted(place, draw) {
  let wide = 0;
  new ResizeObserver(() => {
    const now = Math.round(Math.min(1400, place.clientWidth));
    if (now && Math.abs(now - wide) > 4) { wide = now; draw(); }
  }).observe(place);
  return () => wide || Math.min(1400, place.clientWidth) || 900;
}

/** Ticks at powers of ten from `low` to `high`. */
export function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power += 1) found.push(10 ** power);
  return found;
}

/** A log scale from [low, high] to [from, to]. */
export function logScale(low, high, from, to) {
  const width = Math.log(high / low);
  return (x) => from + ((to - from) * Math.log(x / low)) / width;
}
