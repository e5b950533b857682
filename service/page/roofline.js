// Roofline: receives a device's roofs and the last batches, hands on a chart of FLOP/s over FLOP per byte.

import { CHIPS_OF, intensity } from "./roofs.js";
import { decades, digits, fill, fitted, flops, h, logScale, note, panel, rate, s, select, table, words } from "./dom.js";
import { ladder, shape, steps } from "./ladder.js";

const BOX = { left: 92, right: 16, top: 18, bottom: 52 };

/** What a device could do at most for a batch. */
const roofOf = (d, p) => Math.min((p.flops / p.bytes) * d.bandwidth, d.peak_flops[p.dtype] ?? Infinity);

export function view(root) {
  let where = "here";
  let dtype = "fp16";
  let newest = null;
  let known = null;
  let drawn = "";
  const board = h("div");
  const width = fitted(board, () => { drawn = ""; draw(); });
  const points = h("div");
  const about = h("div");

  function device() {
    if (where === "here") return newest?.workers.find((each) => each.device)?.device ?? null;
    return known?.predicted?.chips?.[where]?.device ?? null;
  }

  function draw() {
    const d = device();
    if (!d) {
      fill(board, note("No device's description is here yet."));
      return;
    }
    const peaks = Object.entries(d.peak_flops);
    if (!d.peak_flops[dtype]) dtype = peaks[0]?.[0];
    const recent = where === "here" ? newest.points : [];
    const chip = where === "here" ? CHIPS_OF[d.arch] : where;
    const paths = chip && known?.predicted?.chips ? pathsOf(chip) : [];
    const seen = JSON.stringify([where, dtype, d.name, recent.at(-1)?.id, recent.length, paths.length]);
    if (seen === drawn) return;
    drawn = seen;
    fill(board, chart(d, peaks, recent, paths));
    const label = d.rates === "measured" ? "measured at the worker's start" : d.rates === "clocks" ? "from its clocks" : "by datasheet";
    fill(about, table("Roofs", ["roof", "rate", "ridge", "from"], [
      ["memory", words(rate(d.bandwidth)), "", label],
      ...(paths.length ? [["L2 to SMs", words(rate(known.predicted.chips[chip].l2_bandwidth)), "", "the model's parameters"]] : []),
      ...peaks.map(([name, peak]) => [name, words(flops(peak)), `${digits(peak / d.bandwidth)} FLOP/B`, label])], [1, 2]),
      recent.some((p) => p.flops / p.seconds > 1.05 * roofOf(d, p)) ? note("Points above a roof: this computer was busier when the worker measured it.") : null);
    fill(points, where !== "here" ? note("Recent products run on this service's own device; choose it to see them.")
      : recent.length ? table("Recent batches, the newest first", ["M×N×K", "dtype", "requests", "FLOP/B", "FLOP/s", "of the roof", "variant"],
        [...recent].reverse().slice(0, 12).map((p) => {
          const x = p.flops / p.bytes;
          const y = p.flops / p.seconds;
          return [shape(p) + (p.batch > 1 ? ` ×${p.batch}` : ""), p.dtype, String(p.requests), digits(x), words(flops(y)), `${digits((100 * y) / roofOf(d, p))} %`, p.variant];
        }), [2, 3, 4, 5])
        : note("No product has been computed yet: send one under Try it."));
  }

  function pathsOf(chip) {
    const { rows } = steps(known, chip);
    return ["measured", "predicted", "published"].map((kind) => ({
      kind, stops: rows.filter((row) => row[kind]).map((row) => ({ step: row.step, title: row.title, x: intensity(row), y: row[kind].flops })),
    })).filter((path) => path.stops.length > 1);
  }

  function chart(d, peaks, recent, paths) {
    const WIDTH = width();
    const HEIGHT = Math.round(Math.max(320, Math.min(560, WIDTH * 0.55)));
    const narrow = WIDTH < 560;
    const xs = [1, ...recent.map((p) => p.flops / p.bytes), ...paths.flatMap((path) => path.stops.map((stop) => stop.x))];
    const top = Math.max(...peaks.map(([, peak]) => peak), ...recent.map((p) => p.flops / p.seconds));
    const ys = [top / 1e3, ...recent.map((p) => p.flops / p.seconds), ...paths.flatMap((path) => path.stops.map((stop) => stop.y))];
    const ridgeOf = Math.min(...peaks.map(([, peak]) => peak)) / d.bandwidth;
    const low = 10 ** Math.floor(Math.log10(Math.min(...xs, ridgeOf / 4))); // the slope must be seen
    const high = 10 ** Math.ceil(Math.log10(Math.max(...xs, (4 * top) / d.bandwidth, 1000)));
    const bottom = 10 ** Math.floor(Math.log10(Math.min(...ys)));
    const ceiling = 10 ** Math.ceil(Math.log10(top * 1.05));
    const x = logScale(low, high, BOX.left, WIDTH - BOX.right);
    const y = logScale(bottom, ceiling, HEIGHT - BOX.bottom, BOX.top);
    const clip = (value) => Math.max(bottom, value);
    const node = s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Roofline of ${d.name}; the tables below have the figures` });
    const every = Math.ceil(56 / ((x(high) - x(low)) / Math.log10(high / low)));
    for (const tick of decades(low, high).filter((_, at) => at % every === 0)) {
      node.append(s("line", { class: "grid-line", x1: x(tick), x2: x(tick), y1: BOX.top, y2: HEIGHT - BOX.bottom }), s("text", { x: x(tick), y: HEIGHT - 30, "text-anchor": "middle" }, tick.toLocaleString("en")));
    }
    for (const tick of decades(bottom, ceiling)) {
      node.append(s("line", { class: "grid-line", x1: BOX.left, x2: WIDTH - BOX.right, y1: y(tick), y2: y(tick) }), s("text", { x: BOX.left - 8, y: y(tick) + 4, "text-anchor": "end" }, words(flops(tick))));
    }
    node.append(s("text", { x: (BOX.left + WIDTH) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "FLOP per byte moved"));
    const line = (peak) => {
      const ridge = peak / d.bandwidth;
      const from = Math.max(low, bottom / d.bandwidth);
      return [[from, from * d.bandwidth], [Math.max(ridge, from), peak], [high, peak]].map(([a, b]) => `${x(a).toFixed(1)},${y(clip(b)).toFixed(1)}`);
    };
    const labels = []; // heights of what is written: roofs may lie close together
    const unlike = [...new Map(peaks.map(([name, peak]) => [peak, name])).entries()];
    for (const [peak, name] of unlike) {
      const mine = peak === d.peak_flops[dtype];
      const all = peaks.filter(([, other]) => other === peak).map(([each]) => each).join(", ");
      const said = mine || !narrow;
      let level = y(peak) - 6;
      while (labels.some((other) => Math.abs(other - level) < 13)) level += 7;
      if (said) labels.push(level);
      if (mine) node.append(s("polygon", { class: "under", points: `${line(peak).join(" ")} ${x(high)},${y(bottom)} ${x(Math.max(low, bottom / d.bandwidth))},${y(bottom)}` }));
      node.append(s("polyline", { class: mine ? "roof" : "roof other", points: line(peak).join(" "), "data-dtype": name }),
        !said ? "" : s("text", { class: mine ? "strong" : "", x: WIDTH - BOX.right - 4, y: level, "text-anchor": "end" }, `${narrow ? all.split(", ")[0] : all}: ${words(flops(peak))}`));
    }
    const chipOf = where === "here" ? CHIPS_OF[d.arch] : where;
    const wide = paths.length ? known.predicted.chips[chipOf].l2_bandwidth : 0;
    if (wide) {
      // tiles fetch from L2, whose roof is above memory's
      const from = Math.max(low, bottom / wide);
      const to = Math.min(high, d.peak_flops.fp16 / wide);
      node.append(s("polyline", { class: "roof other", id: "l2-roof", points: `${x(from)},${y(from * wide)} ${x(to)},${y(to * wide)}` }),
        narrow ? "" : s("text", { x: x(to) - 8, y: y(to * wide) + 1, "text-anchor": "end" }, `L2 to SMs ${words(rate(wide))}`));
    }
    // on the visible slope of memory's roof, which ends at the highlighted roof's ridge
    const foot = Math.max(low, bottom / d.bandwidth);
    const ridge = d.peak_flops[dtype] / d.bandwidth;
    const slope = Math.sqrt(foot * Math.max(ridge, foot));
    const angle = (Math.atan2(y(slope * d.bandwidth) - y(slope * 10 * d.bandwidth), x(slope * 10) - x(slope)) * -180) / Math.PI;
    const told = `memory ${words(rate(d.bandwidth))}`;
    const along = Math.hypot(x(ridge) - x(foot), y(foot * d.bandwidth) - y(ridge * d.bandwidth)) > 8 * told.length;
    node.append(along
      ? s("text", { class: "strong", id: "memory-roof", "text-anchor": "middle", x: x(slope), y: y(slope * d.bandwidth) - 8, transform: `rotate(${angle.toFixed(1)} ${x(slope).toFixed(1)} ${y(slope * d.bandwidth).toFixed(1)})` }, told)
      : s("text", { class: "strong", id: "memory-roof", x: x(foot) + 6, y: y(ridge * d.bandwidth) - 22 }, told));
    for (const path of paths) {
      node.append(s("polyline", { class: `path ${path.kind}`, points: path.stops.map((stop) => `${x(stop.x)},${y(stop.y)}`).join(" ") }));
      let before = { x: Infinity, y: Infinity };
      let aside = 9;
      for (const stop of path.stops) {
        aside = Math.hypot(x(stop.x) - before.x, y(stop.y) - before.y) < 12 ? aside + 11 : 9;
        before = { x: x(stop.x), y: y(stop.y) };
        node.append(s("g", {}, s("title", {}, `Step ${stop.step} ${stop.title}, ${path.kind}: ${words(flops(stop.y))} at ${digits(stop.x)} FLOP/B`),
          s("circle", { class: `stop ${path.kind}`, cx: x(stop.x), cy: y(stop.y), r: 5 }),
          path.kind === "published" || (narrow && path.kind !== "measured") ? "" : s("text", { x: x(stop.x) + (path.kind === "measured" ? -aside : aside), y: y(stop.y) + 4, "text-anchor": path.kind === "measured" ? "end" : "start" }, String(stop.step))));
      }
    }
    recent.forEach((p, at) => {
      const circle = s("circle", { class: "point", cx: x(p.flops / p.bytes), cy: y(clip(p.flops / p.seconds)), r: at === recent.length - 1 ? 7 : 4.5, opacity: 0.3 + (0.7 * (at + 1)) / recent.length });
      circle.append(s("title", {}, `${shape(p)} ${p.dtype}, ${words(flops(p.flops / p.seconds))}, ${p.variant}`));
      node.append(circle);
    });
    const legend = [["recent", "recent batches (bytes of operands and result)", recent.length], ...["measured", "predicted", "published"].map((kind) => [kind, `ladder, ${kind} (bytes that the kernel's tiles fetch)`, paths.some((path) => path.kind === kind)])];
    return [node, h("ul", { class: "legend" }, legend.filter(([, , any]) => any).map(([kind, name]) => h("li", {}, h("i", { class: `dot key-${kind}` }), name)))];
  }

  root.append(
    h("p", { class: "lead" }, "What bounds a product: on the slope the memory, under the flat roof the arithmetic. Each recent batch is a point; the ladder is a path, on which tiles grow and a byte fetched feeds more multiply-adds."),
    h("div", { class: "controls" },
      select("device", [["here", "this service's device"], ["h200", "H200, by datasheet"], ["b200", "B200, by datasheet"]], where, (value) => { where = value; draw(); }),
      select("highlight", [["fp16", "fp16, bf16"], ["tf32", "tf32"], ["fp32", "fp32"], ["fp64", "fp64"]], dtype, (value) => { dtype = value; draw(); })),
    h("div", { class: "grid uneven" }, h("div", { class: "panel wide" }, board), panel("Recent batches", points), panel("Roofs", about)));
  return {
    async enter() {
      try { known = await ladder(); } catch { known = null; /* the roofs of this device are shown without it */ }
      drawn = "";
      draw();
    },
    update(document_) {
      newest = document_;
      draw();
    },
  };
}
