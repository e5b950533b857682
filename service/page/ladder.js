// Ladder: receives measured, predicted and published times of the nine steps, hands on a chart and a table.

import * as api from "./api.js";
import { CHIPS_OF } from "./roofs.js";
import { NONE, decades, digits, fill, fitted, flops, h, logScale, note, panel, percent, s, seconds, select, table, words } from "./dom.js";

const KINDS = [["measured", "measured"], ["predicted", "predicted (model)"], ["published", "published by others"]];
const CHIPS = [["b200", "B200 (sm_100a)"], ["h200", "H200 (sm_90a)"]];
export const shape = ({ m, n, k }) => (m === n && n === k ? `${m}³` : `${m}×${n}×${k}`);

let asked = null;
/** The ladder's document, asked for once a visit and key. */
export function ladder() {
  asked ??= api.get("/ladder").catch((error) => { asked = null; throw error; });
  return asked;
}
api.onKey(() => { asked = null; });

/** Each step of a chip with what is known of it; kinds of figures stay apart. */
export function steps(document_, chip) {
  const model = document_.predicted?.chips?.[chip];
  // what was measured on this very device comes before the packaged file of its kind
  const files = [document_.predicted?.here, ...document_.measured].filter(Boolean);
  const file = files.find((each) => each.machine.name === chip || each.machine.device?.toLowerCase().includes(chip));
  const rows = (model?.steps ?? []).map((step) => ({ ...step, measured: null, sustained: null, predicted: null, published: null }));
  for (const row of rows) {
    const work = 2 * row.m * row.n * row.k;
    const model_ = model.steps.find((each) => each.step === row.step);
    if (model_.seconds !== null) row.predicted = { seconds: model_.seconds, flops: work / model_.seconds, busy: model_.busy };
    const other = model.published?.find((each) => each.step === row.step);
    if (other) row.published = { ...other, flops: work / other.seconds };
    for (const found of file?.rows.filter((each) => each.step === row.step) ?? []) {
      const at = found.seconds.median;
      const told = { seconds: at, flops: (2 * found.problem.m * found.problem.n * found.problem.k) / at, ratio: found.ratio, timing: found.timing, clock: found.sm_clock_mhz };
      if (found.timing === "sustained") row.sustained = told;
      else row.measured = told;
    }
  }
  return { rows, file, model };
}

function chart(rows, chip, width) {
  const narrow = width < 640;
  const shown = KINDS.filter(([kind]) => rows.some((row) => row[kind]));
  const tall = 15 * Math.max(1, shown.length) + 14;
  const left = narrow ? 134 : 160;
  const right = narrow ? 84 : 150;
  const height = rows.length * tall + 34;
  const values = rows.flatMap((row) => shown.map(([kind]) => row[kind]?.flops).filter(Boolean));
  const low = 10 ** Math.floor(Math.log10(Math.min(...values, 1e12)));
  const high = 10 ** Math.ceil(Math.log10(Math.max(...values, 1e12)));
  const x = logScale(low, high, left, width - right);
  const node = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Rates of the ladder's steps on ${chip}, logarithmic; the table below has the figures` });
  const every = Math.ceil(84 / ((width - left - right) / Math.log10(high / low)));
  for (const tick of decades(low, high).filter((_, at) => at % every === 0)) {
    node.append(s("line", { class: "grid-line", x1: x(tick), x2: x(tick), y1: 0, y2: height - 28 }),
      s("text", { x: x(tick), y: height - 10, "text-anchor": "middle" }, words(flops(tick))));
  }
  rows.forEach((row, at) => {
    const top = at * tall + 6;
    node.append(s("text", { class: "strong", x: 0, y: top + 12 }, `${row.step} ${row.title}`), s("text", { x: 0, y: top + 27 }, shape(row)));
    if (shown.length && shown.every(([kind]) => !row[kind])) node.append(s("text", { x: left, y: top + 12 }, "no figure"));
    shown.forEach(([kind], turn) => {
      const y = top + 15 * turn;
      const figure = row[kind];
      if (figure) {
        node.append(s("rect", { class: `fill-${kind}`, x: left, y, width: Math.max(1, x(figure.flops) - left), height: 12, rx: 2 }),
          s("text", { x: x(figure.flops) + 6, y: y + 10 }, narrow ? words(flops(figure.flops)) : `${words(flops(figure.flops))} · ${words(seconds(figure.seconds))}`));
      }
    });
  });
  return [node, h("ul", { class: "legend" }, shown.map(([kind, name]) => h("li", {}, h("i", { class: `dot key-${kind}` }), name)))];
}

function drawing({ rows, file, model }, chip, body) {
  const time = (x) => (x ? words(seconds(x.seconds)) : NONE);
  const ratio = (x) => (x?.ratio ? digits(x.ratio) : NONE);
  const published = rows.some((row) => row.published);
  const off = (ours, told) => (ours && told ? `${ours > told ? "+" : "−"}${digits(Math.abs(100 * (ours / told - 1)))} %` : NONE);
  const compared = rows.some((row) => row.measured) ? "measured" : published ? "published" : null;
  const columns = [
    ["step", (row) => `${row.step} ${row.title}`],
    ["the one idea", (row) => row.idea],
    ["size", shape],
    ["measured", (row) => time(row.measured)],
    ["TFLOP/s", (row) => (row.measured ? digits(row.measured.flops / 1e12) : NONE)],
    ["× cuBLAS", (row) => ratio(row.measured)],
    ["sustained × cuBLAS", (row) => ratio(row.sustained)],
    ["predicted (model)", (row) => time(row.predicted)],
    ["tensor cores busy (model)", (row) => (row.predicted ? words(percent(row.predicted.busy)) : NONE)],
    ["CTAs an SM", (row) => (row.residents ? String(row.residents) : NONE)],
    ["predicted at one CTA an SM", (row) => (published && row.alone_seconds ? words(seconds(row.alone_seconds)) : NONE)],
    ["published", (row) => time(row.published)],
    [`model off ${compared}`, (row) => (compared === "measured" ? off(row.predicted?.seconds, row.measured?.seconds) : off(row.alone_seconds, row.published?.seconds))],
  ].filter(([, told], at) => at < 3 || rows.some((row) => told(row) !== NONE));
  const any = rows.some((row) => row.measured || row.predicted || row.published);
  const board = h("div");
  const width = fitted(board, () => fill(board, chart(rows, chip, width())));
  fill(body,
    h("div", { class: "panel wide" }, any ? board : note("No figure of this chip is here.")),
    h("div", { class: "panel wide" }, table(`The ladder on ${chip}`, columns.map(([head]) => head), rows.map((row) => columns.map(([, told]) => told(row))), columns.map((_, at) => at).slice(3))),
    panel("Measured", file
      ? note(`On ${file.machine.name === "here" ? "this service's own device, " : ""}${file.machine.device ?? file.machine.name}, ${file.date.slice(0, 10)}, by ${file.command}; commit ${file.commit.slice(0, 12)}. Medians; × cuBLAS is the ratio in the same run, above 1 is faster. Steps 1 and 2 at their own small sizes.`)
      : note(chip === "b200" ? "Never: the project has no B200. What stands here is predicted by a model, or published by others." : "No results file of this chip is packaged with this service; python -m kernels ladder measures where one is.")),
    model?.published?.length ? panel("Published", note(model.published_source), note("They run one CTA an SM; ours put as many there as fit, which hides latency at Steps 4 to 7. The column for one CTA an SM is the one to compare.")) : null,
    h("div", { class: "panel wide" }, h("h3", {}, "Predicted"), note("By the discrete-event model of the engines that also plays the choreography; none of its parameters is fitted to a step. It doesn't know the power cap. Steps 1 and 2, which compute one tile, are not modelled."),
      model ? table("Parameters of the model", ["parameter", "value", "source"], model.parameters.map((p) => [p.name, p.value, p.source])) : null));
}

export function view(root) {
  const body = h("div", { class: "grid two" });
  let chip = "b200";
  let chosen = false;
  const choice = select("chip", CHIPS, chip, (value) => { chip = value; chosen = true; draw(); });
  async function draw() {
    try {
      const document_ = await ladder();
      if (document_.predicted.unavailable) {
        fill(body, h("div", { class: "panel wide bad", role: "alert" }, h("p", {}, `The worker can't say: ${document_.predicted.unavailable}.`)));
        return;
      }
      drawing(steps(document_, chip), chip, body);
    } catch (error) {
      fill(body, h("div", { class: "panel wide bad", role: "alert" }, h("p", {}, error.message)));
    }
  }
  root.append(
    h("p", { class: "lead" }, "Nine steps from one tile to the product, one idea each. Measured, predicted and published figures have a colour each and are never mixed."),
    h("div", { class: "controls" }, choice), body);
  return {
    enter: draw,
    update({ workers }) {
      // the device at hand first, where it has a ladder
      const own = CHIPS_OF[workers.find((each) => each.device)?.device.arch];
      if (chosen || !own || own === chip) return;
      chip = choice.querySelector("select").value = own;
      chosen = true;
      if (!root.hidden) draw();
    },
  };
}
