// Now: receives a document a second, hands on figures, bars and tables.

import { NONE, bytes, count, digits, fill, flops, h, note, panel, percent, s, seconds, table, text, words } from "./dom.js";

const HISTORY = 120;
const STAGES = ["decode", "admit", "batch", "link", "worker", "copy_in", "kernel", "copy_out", "reply"];

/** A figure with its name, unit, a line below, and its last two minutes. */
function figure(name, what) {
  const value = h("span", { class: "value" }, NONE);
  const unit = h("span", { class: "unit" });
  const below = h("p", { class: "below" });
  const line = s("polyline", { class: "line" });
  const area = s("polygon", { class: "area" });
  const spark = s("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  const past = [];
  return {
    node: h("div", { class: "figure", "data-what": what }, h("h3", {}, name), h("p", { class: "big" }, value, " ", unit), below, spark),
    set([shown, measure], number, under) {
      text(value, shown);
      text(unit, measure);
      text(below, under);
      past.push(number ?? 0);
      if (past.length > HISTORY) past.shift();
      const top = Math.max(...past) || 1;
      const points = past.map((y, at) => `${HISTORY - past.length + at},${(26 - (24 * y) / top).toFixed(1)}`);
      line.setAttribute("points", points.join(" "));
      area.setAttribute("points", `${HISTORY - past.length},28 ${points.join(" ")} ${HISTORY - 1},28`);
    },
  };
}

/** Parts of a whole as one bar, each part named below it. */
function stacked(parts, whole, say) {
  const bar = h("div", { class: "stack", "aria-hidden": "true" });
  const legend = h("ul", { class: "legend" });
  parts.forEach(([name, size, kind]) => {
    if (size > 0) {
      const piece = h("i", { class: `k-${kind}` });
      piece.style.width = `${Math.max(0.4, (100 * size) / (whole || 1))}%`;
      bar.append(piece);
    }
    legend.append(h("li", {}, h("i", { class: `dot k-${kind}` }), `${name} `, h("b", {}, say(size))));
  });
  return [bar, legend];
}

function batchBars(all) {
  const sizes = all.slice(0, Math.max(5, all.findLastIndex(([, n]) => n > 0) + 1));
  const top = Math.max(1, ...sizes.map(([, n]) => n));
  return h("ol", { class: "columns" }, sizes.map(([bound, n], at) => {
    const bar = h("i", { class: "k-mma" });
    bar.style.height = `${(100 * n) / top}%`;
    const before = at ? sizes[at - 1][0] + 1 : 1;
    const name = bound === null ? `>${sizes[at - 1][0]}` : before >= bound ? `${bound}` : `${before}–${bound}`;
    return h("li", {}, h("span", { class: "tall" }, bar), h("b", {}, count(n)), h("small", {}, name));
  }));
}

const spread = (t) => (t && t.mean !== null ? `median ${words(seconds(t.p50))} · p99 ${words(seconds(t.p99))}` : "nothing in the last seconds");

/** All GPUs as one figure: the mean of those that can be read, and what is to be said of it. */
export function tensorCores(tensor) {
  const read = tensor.filter((each) => each.active !== null);
  if (!read.length) return { shown: ["not readable here", ""], active: undefined, under: tensor[0]?.detail ?? "no worker is there" };
  const active = read.reduce((sum, each) => sum + each.active, 0) / read.length;
  const clock = read[0].sm_clock_mhz;
  const from = `read from the hardware (${read[0].source})`;
  const under = tensor.length === 1 ? from + (clock ? ` at ${digits(clock)} MHz` : "")
    : `mean of ${read.length} GPUs, ${from}` + (read.length < tensor.length ? `; ${tensor.length - read.length} not readable` : "");
  return { shown: percent(active), active, under };
}

/** A row of the table of workers: state, device, what was read of it, and the estimate beside it. */
function workerRow(w, d) {
  const read = d.tensor.find((each) => each.worker === w.index);
  const ratio = d.flops_ratio?.[w.index];
  return [String(w.index), h("span", { class: `state ${w.state}` }, w.state + (w.detail ? `: ${w.detail}` : "")), w.device?.name ?? NONE,
    read && read.active !== null ? words(percent(read.active)) : h("span", { title: read?.detail }, "not readable"),
    read?.sm_clock_mhz ? `${digits(read.sm_clock_mhz)} MHz` : NONE,
    ratio === undefined ? NONE : words(percent(ratio)), w.pid ? String(w.pid) : NONE];
}

export function view(root) {
  const figures = {
    flops: figure("Arithmetic done", "flops"),
    tensor: figure("Tensor cores busy", "tensor"),
    requests: figure("Products a second", "requests"),
    wait: figure("Wait in the queue", "wait"),
    kernel: figure("Computing a batch", "kernel"),
    batch: figure("Requests in a batch", "batch"),
  };
  const memory = h("div");
  const stages = h("div");
  const sizes = h("div");
  const workers = h("div");
  const barred = h("div");
  const refused = h("div");
  root.append(
    h("p", { class: "lead" }, "What the service and its kernels do at this moment; rates over the last five seconds."),
    h("div", { class: "figures" }, Object.values(figures).map((each) => each.node)),
    h("div", { class: "grid three" },
      panel("Where a request's time goes", stages),
      panel("Batches", sizes),
      panel("Memory", memory),
      h("div", { class: "panel wide" }, h("h3", {}, "Workers"), workers),
      h("div", { class: "panel wide two-thirds" }, h("h3", {}, "Quarantined variants"), barred),
      panel("Refused", refused)));
  let shown = {};
  const once = (name, value, draw) => {
    const seen = JSON.stringify(value);
    if (!(name in shown) || shown[name] !== seen) draw();
    shown[name] = seen;
  };
  return {
    update(d) {
      figures.flops.set(flops(d.flops_per_second), d.flops_per_second, d.flops_per_second === null ? "two samples are needed" : `kernels ran ${words(percent(d.kernel_busy))} of the time, by the service's clock`);
      const busy = tensorCores(d.tensor);
      figures.tensor.set(busy.shown, busy.active, busy.under);
      figures.tensor.node.classList.toggle("absent", busy.active === undefined);
      figures.requests.set([count(d.gemms_per_second), d.gemms_per_second === null ? "" : "/s"], d.gemms_per_second, d.requests_per_second === null ? "" : `${count(d.requests_per_second)} requests a second of every kind`);
      figures.wait.set(seconds(d.wait?.mean), d.wait?.mean, `${count(d.queue.depth)} waiting · ${spread(d.wait)}`);
      figures.kernel.set(seconds(d.kernel?.mean), d.kernel?.mean, spread(d.kernel));
      figures.batch.set([count(d.batch?.mean), ""], d.batch?.mean, d.batch?.count ? `${count(d.batch.count)} batches in ${digits(d.window_seconds)} s` : "no batch in the last seconds");
      once("stages", d.stages, () => {
        const parts = STAGES.filter((name) => d.stages?.[name] > 0).map((name) => [name.replace("_", " "), d.stages[name], `s-${name}`]);
        const whole = parts.reduce((sum, [, x]) => sum + x, 0);
        fill(stages, parts.length ? stacked(parts, whole, (x) => words(seconds(x))) : note("Nothing was computed in the last seconds."));
      });
      once("sizes", d.batch?.sizes, () => fill(sizes, d.batch?.count ? batchBars(d.batch.sizes) : note("No batch in the last seconds.")));
      once("memory", [d.arena, d.store], () => fill(memory,
        h("h4", {}, `Arena, ${words(bytes(d.arena_bytes))}`),
        stacked(Object.entries(d.arena).map(([name, size]) => [name, size, name === "free" ? "free" : `a-${name}`]), d.arena_bytes, (x) => words(bytes(x))),
        Object.entries(d.store).map(([tier, size]) => {
          const limit = d.store_bytes[tier];
          return [h("h4", {}, `Store, ${tier}${limit ? ` (limit ${words(bytes(limit))})` : ""}`),
            stacked([["held", size, "a-tensor"], ...(limit ? [["room", Math.max(0, limit - size), "free"]] : [])], limit || size, (x) => words(bytes(x)))];
        })));
      once("workers", [d.workers, d.tensor, d.flops_ratio], () => fill(workers, table("Workers",
        ["worker", "state", "device", "tensor cores busy (read)", "SM clock", "of the datasheet's FLOPs (estimate)", "pid"], d.workers.map((w) => workerRow(w, d)), [3, 4, 5, 6])));
      once("barred", d.quarantined, () => {
        const rows = Object.entries(d.quarantined);
        fill(barred, rows.length ? table("Quarantined variants", ["variant", "because"], rows) : note("None: every variant that this device has may run."));
      });
      once("refused", d.rejected, () => {
        const rows = Object.entries(d.rejected ?? {});
        fill(refused, rows.length ? table("Refused in the last seconds", ["reason", "requests"], rows.map(([name, n]) => [name.replace("_", " "), count(n)]), [1]) : note("Nothing was refused in the last seconds."));
      });
    },
  };
}
