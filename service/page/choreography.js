// Choreography: receives two timelines of the model, hands on lanes, the ring, barriers and figures at a moment.

import * as api from "./api.js";
import { digits, fill, h, note, percent, select, text, words } from "./dom.js";
import { Lanes } from "./lanes.js";
import { accumulatorsAt, bitsAt, eventsOf, slotsAt, waitersAt } from "./moment.js";

const STEPS = {
  5: "5 pipeline, one team", 7: "7 warp specialized", 8: "8 cluster of two", 9: "9 two consumers",
};
const SPEEDS = [["0.2", "0.2 µs a second"], ["0.5", "0.5 µs a second"], ["1", "1 µs a second"], ["2", "2 µs a second"], ["5", "5 µs a second"]];
const ZOOMS = [["1", "fit"], ["2", "2×"], ["4", "4×"], ["8", "8×"], ["16", "16×"]];
const micro = (ns) => `${(ns / 1000).toFixed(2)} µs`;

function slider(label, low, high, value, onchange) {
  const shown = h("output", {}, String(value));
  const control = h("input", { type: "range", min: low, max: high, value, "data-what": label, oninput: () => { text(shown, control.value); onchange(Number(control.value)); } });
  const node = h("label", { class: "field" }, h("span", {}, `${label}: `, shown), control);
  return { node, set(x) { control.value = x; text(shown, String(x)); } };
}

/** One timeline with what surrounds it. */
class Part {
  constructor(title, id) {
    this.id = id;
    this.title = h("h3", {}, title);
    this.kpis = h("div", { class: "kpis" });
    this.lanes = new Lanes(title);
    this.ring = h("ul", { class: "ring", "aria-label": `Stages of shared memory, ${title}` });
    this.sums = h("ul", { class: "ring", "aria-label": `Accumulators, ${title}` });
    this.bits = h("tbody");
    this.told = h("p", { class: "told" });
    this.alarm = h("div");
    this.list = h("ol", { class: "scroll", tabindex: "0", "aria-label": `Events, ${title}` });
    this.node = h("div", { class: "panel", id },
      this.title, this.kpis, this.lanes.node, this.told, this.alarm,
      h("h4", {}, "Ring in shared memory"), this.ring, h("h4", {}, "Accumulators"), this.sums,
      h("h4", {}, "Barriers"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Barriers, ${title}` }, h("table", { class: "bits" },
        h("thead", {}, h("tr", {}, ["barrier", "phase bits", "waiting now"].map((head) => h("th", { scope: "col" }, head)))), this.bits)),
      h("details", {}, h("summary", {}, "Every event in words"), this.list));
  }

  set(line, title, span, other) {
    this.line = line;
    this.events = eventsOf(line);
    text(this.title, title);
    const k = line.kpis;
    const kpi = (name, shown, kind = "") => h("div", { class: `kpi ${kind}` }, h("b", {}, shown), h("span", {}, name));
    const steady = k.steady["tensor core"];
    fill(this.kpis,
      kpi("tensor core busy, first to last product", steady === null ? "–" : words(percent(steady)), "mma"),
      kpi("tensor core busy, over all", words(percent(k.busy["tensor core"])), "mma"),
      kpi("TMA busy", words(percent(k.busy.TMA)), "tma"),
      kpi("stores busy", words(percent(k.busy["TMA store"])), "wb"),
      kpi("fill", k.fill_nanoseconds === null ? "–" : micro(k.fill_nanoseconds)),
      kpi("drain", k.drain_nanoseconds === null ? "–" : micro(k.drain_nanoseconds)),
      kpi(other && !line.deadlock.length && !other.deadlock.length && other.nanoseconds > line.nanoseconds ? `whole, ${digits(other.nanoseconds / line.nanoseconds)}× as fast` : "whole", line.deadlock.length ? "never ends" : micro(line.nanoseconds)));
    this.lanes.set(line, span);
    this.slots = Array.from({ length: line.depth }, (_, at) => {
      const bar = h("i", { class: "k-tma" });
      const state = h("b");
      const what = h("span");
      const node = h("li", { class: "slot" }, `stage ${at}`, state, what, bar);
      return { node, bar, state, what };
    });
    fill(this.ring, this.slots.map((slot) => slot.node));
    this.accumulators = Array.from({ length: line.consumers }, (_, at) => {
      const state = h("b");
      const what = h("span");
      return { node: h("li", { class: "slot" }, line.consumers > 1 ? `consumer ${at}` : "the one", state, what), state, what };
    });
    fill(this.sums, this.accumulators.map((each) => each.node));
    this.rows = line.barriers.map((barrier) => {
      const bits = Array.from({ length: barrier.count }, () => h("span", { class: "bit" }, "0"));
      const waiting = h("td", { class: "waiter" });
      return { barrier, bits, waiting, node: h("tr", {}, h("th", { scope: "row" }, barrier.name, h("br"), h("small", { class: "note" }, `${barrier.who}: ${barrier.says}`)), h("td", { class: "nowrap" }, bits), waiting) };
    });
    fill(this.bits, this.rows.map((row) => row.node));
    fill(this.alarm, line.deadlock.length ? h("div", { class: "alarm", role: "alert" },
      h("h4", {}, "Deadlock: nothing is in flight, and everybody waits"),
      h("ul", {}, line.deadlock.map((w) => h("li", {}, `${w.lane} waits on ${w.barrier}[${w.index}] for phase ${w.phase}; its bit is ${w.bit}, so it blocks, and nobody is left to flip it.`)))) : null);
    fill(this.list, this.events.slice(0, 400).map((event) => h("li", {}, `${micro(event.at)}: ${event.words}`)));
  }

  at(t) {
    const { line } = this;
    this.lanes.at(t);
    slotsAt(line, t).forEach((slot, at) => {
      const shown = this.slots[at];
      if (shown.node.dataset.state !== slot.state) shown.node.dataset.state = slot.state;
      text(shown.state, slot.state);
      text(shown.what, slot.k === null ? " " : `tile ${slot.tile}, k${slot.k}`);
      shown.bar.style.transform = `scaleX(${slot.progress.toFixed(3)})`;
    });
    accumulatorsAt(line, t).forEach((sum, at) => {
      text(this.accumulators[at].state, sum.state);
      text(this.accumulators[at].what, sum.words);
      if (this.accumulators[at].node.dataset.state !== sum.mark) this.accumulators[at].node.dataset.state = sum.mark;
    });
    const bits = bitsAt(line, t);
    const waiters = waitersAt(line, t);
    for (const row of this.rows) {
      row.bits.forEach((node, index) => {
        const bit = String(bits[`${row.barrier.name}${index}`] ?? 0);
        if (node.dataset.bit !== bit) node.dataset.bit = bit;
        text(node, bit);
      });
      text(row.waiting, waiters.filter((w) => w.barrier === row.barrier.name).map((w) => `${w.lane} at [${w.index}] for phase ${w.phase}`).join("; "));
    }
    const last = this.events.findLast((event) => event.at <= t + 1e-6);
    text(this.told, last ? `${micro(last.at)}: ${last.words}` : "");
  }
}

/** What the two timelines come to, in a sentence or two. */
function lesson({ lockstep, chosen }) {
  if (chosen.deadlock.length) return ["With equal phases at the start nobody ever moves: see the red bars and the notice below."];
  const share = (line) => words(percent(line.kpis.steady["tensor core"]));
  const faster = lockstep.nanoseconds / chosen.nanoseconds;
  return [
    "From the first product to the last, the tensor core works ", h("b", {}, share(lockstep)), " of the time in lockstep and ", h("b", {}, share(chosen)),
    chosen.roles ? " once roles run apart" : " with one team and this ring", `: the same tiles, ${faster >= 1 ? `${digits(faster)}× as fast` : `${digits(1 / faster)}× as slow`}. `,
    chosen.roles ? "Nothing computes faster: loads, products and stores merely overlap. What is left is fill and drain, which a longer K or more tiles spread thinner." : "One team still stops to write each tile back.",
  ];
}

const LEGEND = [["k-tma", "TMA loads"], ["k-mma", "tensor core"], ["k-wb", "write-back"], ["k-wait", "waits on a barrier"]];
const legend = () => h("ul", { class: "legend" }, LEGEND.map(([kind, name]) => h("li", {}, h("i", { class: `dot ${kind}` }), name)),
  h("li", {}, "tick: a role asks an engine"), h("li", {}, "arrow: a barrier flips, and who waited goes on"));

/** Why the first waits pass and block, from the timeline's own first waits. */
function startUp(line) {
  const producer = line.waits.find((w) => w.barrier === "mma2tma" && w.begin === 0);
  const consumer = line.waits.find((w) => w.barrier === "tma2mma");
  const told = (w, who) => {
    if (!w) return h("p", {}, `${who} never gets there: the wait before it blocks.`);
    const passes = w.bit !== w.phase;
    return h("p", {}, h("b", {}, `${who}: `), `wait on ${w.barrier}[${w.index}] for phase ${w.phase}. The bit is ${w.bit}, ${passes ? "unlike" : "equal to"} ${w.phase}, so it ${passes ? "passes at once" : w.end === null ? "blocks, for ever" : `blocks until ${micro(w.end)}`}.`);
  };
  return [
    h("p", { class: "note" }, "wait(P) passes exactly when the barrier's bit is unlike P. All bits start at 0, and nothing has arrived anywhere."),
    told(producer, "Producer"), told(consumer, "Consumer"),
    h("p", { class: "note" }, line.deadlock.length
      ? "Both sides start at the same phase here: the producer waits for a stage to be given back that it never filled, the consumer for data that nobody loads."
      : "So the two sides start at opposite phases: an empty ring is free for the producer's first lap, and holds nothing yet for the consumer. After a lap both flip."),
  ];
}

export function view(root) {
  const asked = { arch: "sm_100a", step: 9, depth: 4, k_tiles: 8, tiles: 2, same_phase: false };
  const left = new Part("Lockstep", "lockstep");
  const right = new Part("Specialised", "specialised");
  const start = h("div");
  const about = h("div");
  const verdict = h("p", { class: "verdict", id: "verdict" });
  const problem = h("div");
  const said = h("p", { class: "sr", role: "status" });
  let answer = null;
  let span = 0;
  let t = 0;
  let playing = false;
  let speed = 1;
  let before = 0;
  let pending = null;
  let frames = [];

  const scrub = h("input", { type: "range", min: 0, max: 1000, value: 0, step: 1, "aria-label": "Moment", id: "scrub", oninput: () => { pause(); moveTo((scrub.value / 1000) * span); } });
  const time = h("span", { class: "time" }, "0.00 µs");
  const play = h("button", { type: "button", class: "primary", id: "play", onclick: () => (playing ? pause() : begin()) }, "Play");
  const button = (id, label, words_, call) => h("button", { type: "button", id, "aria-label": words_, title: words_, onclick: () => { pause(); call(); } }, label);

  function moveTo(x, { tell = false } = {}) {
    t = Math.max(0, Math.min(span, x));
    scrub.value = span ? Math.round((1000 * t) / span) : 0;
    scrub.setAttribute("aria-valuetext", micro(t));
    text(time, `${micro(t)} of ${micro(span)}`);
    if (!answer) return;
    left.at(t);
    right.at(t);
    if (tell) text(said, `Lockstep: ${left.told.textContent} Specialised: ${right.told.textContent}`);
  }
  function stepTo(direction) {
    const moments = [...left.events, ...right.events].map((event) => event.at);
    const next = direction > 0 ? Math.min(...moments.filter((x) => x > t + 0.01), span) : Math.max(...moments.filter((x) => x < t - 0.01), 0);
    moveTo(next, { tell: true });
  }
  function frame(stamp) {
    if (!playing) return;
    frames.push(stamp);
    if (frames.length > 240) frames.shift();
    moveTo(t + Math.min(100, stamp - before) * speed);
    before = stamp;
    if (t >= span) pause();
    else requestAnimationFrame(frame);
  }
  function begin() {
    if (!answer || span <= 0) return;
    if (t >= span) moveTo(0);
    playing = true;
    frames = [];
    text(play, "Pause");
    before = performance.now();
    requestAnimationFrame(frame);
  }
  function pause() {
    playing = false;
    text(play, "Play");
    // By the median frame: what else this computer does holds single ones up.
    const each = frames.slice(1).map((stamp, i) => stamp - frames[i]).sort((x, y) => x - y);
    if (each.length) root.dataset.fps = (1000 / each[each.length >> 1]).toFixed(1);
  }

  async function load() {
    pending?.abort();
    const mine = (pending = new AbortController());
    root.setAttribute("aria-busy", "true");
    try {
      await new Promise((done) => setTimeout(done, 60));
      if (mine.signal.aborted) return;
      const got = await api.post("/timeline", asked, mine.signal);
      pause();
      answer = got;
      fill(problem);
      const stuck = got.chosen.deadlock.length > 0;
      span = Math.max(got.lockstep.nanoseconds, got.chosen.nanoseconds) || 1000;
      left.set(got.lockstep, "Lockstep: one team loads, multiplies, writes back", span, null);
      right.set(got.chosen, got.chosen.roles ? `Specialised: Step ${STEPS[asked.step]}, ring of ${asked.depth}` : `Step ${STEPS[asked.step]}, ring of ${asked.depth}`, span, got.lockstep);
      fill(start, startUp(got.chosen));
      fill(verdict, lesson(got));
      const tight = got.smem_bytes > got.smem_limit;
      fill(about,
        note(`${got.device}, one CTA${asked.step >= 8 ? " of a cluster of two, its peer does the same" : ""}: ${got.chosen.tile.join("×")} a tile${asked.step >= 8 ? " of the cluster" : ""}, ${digits(got.chosen.stage_bytes / 1024)} KiB a stage. A discrete-event model at ${digits(got.clock_hz / 1e9)} GHz (parameters under Ladder), never measured; the same that python -m kernels predict --timeline prints.`),
        tight ? h("p", { class: "bad" }, `A ring of ${asked.depth} would take ${got.smem_bytes.toLocaleString("en")} bytes of shared memory; the chip has ${got.smem_limit.toLocaleString("en")}. The model plays it all the same.`)
          : note(`Shared memory: ${got.smem_bytes.toLocaleString("en")} of ${got.smem_limit.toLocaleString("en")} bytes; the kernel's own ring has ${got.own_depth} stages.`));
      moveTo(stuck ? 0 : Math.min(t, span));
      root.dataset.ready = JSON.stringify(asked);
    } catch (error) {
      if (error.name === "AbortError") return;
      fill(problem, h("div", { class: "panel bad", role: "alert" }, h("p", {}, error.message)));
    } finally {
      if (pending === mine) root.removeAttribute("aria-busy");
    }
  }

  const depth = slider("PIPE_DEPTH", 1, 6, asked.depth, (x) => { asked.depth = x; load(); });
  const zoom = (x) => { left.lanes.zoom(Number(x)); right.lanes.zoom(Number(x)); moveTo(t); };
  const wide = matchMedia("(min-width: 700px)").matches;
  root.append(
    h("p", { class: "lead" }, "The same tiles twice: on the left one team takes turns at loading, multiplying and writing back; on the right each role has its own warps, which meet at barriers only. Watch the tensor core's lane."),
    h("div", { class: "panel" }, h("div", { class: "controls" },
      select("chip", [["sm_100a", "B200"], ["sm_90a", "H200"]], asked.arch, (x) => { asked.arch = x; load(); }, { id: "arch" }),
      select("step", Object.entries(STEPS), asked.step, (x) => { asked.step = Number(x); load(); }, { id: "step" }),
      depth.node,
      slider("K tiles", 2, 32, asked.k_tiles, (x) => { asked.k_tiles = x; load(); }).node,
      slider("output tiles", 1, 4, asked.tiles, (x) => { asked.tiles = x; load(); }).node,
      h("label", { class: "check" }, h("input", { type: "checkbox", id: "same", onchange: (event) => { asked.same_phase = event.target.checked; load(); } }), "start both sides at the same phase")), about),
    problem,
    h("div", { class: "panel player", role: "group", "aria-label": "Player" },
      play,
      button("first", "|◀", "To the start", () => moveTo(0)),
      button("back", "◀", "One event back", () => stepTo(-1)),
      button("next", "▶", "One event on", () => stepTo(1)),
      scrub, time,
      select("speed", SPEEDS, "1", (x) => { speed = Number(x); }, { id: "speed" }),
      select("zoom", ZOOMS, wide ? "2" : "4", zoom, { id: "zoom" })),
    said,
    h("div", { class: "panel" }, verdict, legend()),
    h("div", { class: "pair" }, left.node, right.node),
    h("div", { class: "grid" }, h("div", { class: "panel wide", id: "start-up" }, h("h3", {}, "The first moment"), start)));
  zoom(wide ? 2 : 4);
  new MutationObserver(() => { left.lanes.draw(); right.lanes.draw(); moveTo(t); }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  return {
    enter() { if (answer) { left.lanes.draw(); right.lanes.draw(); moveTo(t); } else load(); },
    leave: pause,
  };
}
