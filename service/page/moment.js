// A timeline at a moment: receives its spans, flips and waits, hands on what each part holds then. Pure.

const kept = new WeakMap();

/** What is looked up each frame, prepared once a timeline. */
function prepared(line) {
  let made = kept.get(line);
  if (made) return made;
  const products = new Map();
  for (const span of line.spans.filter((each) => each.what === "mma")) {
    const key = `${span.tile}/${span.k}`;
    const seen = products.get(key) ?? { begin: Infinity, end: 0 };
    products.set(key, { begin: Math.min(seen.begin, span.begin), end: Math.max(seen.end, span.end) });
  }
  const stages = Array.from({ length: line.depth }, () => []);
  for (const load of line.spans.filter((each) => each.what === "load")) {
    stages[load.stage].push({ ...load, read: products.get(`${load.tile}/${load.k}`) ?? { begin: Infinity, end: Infinity } });
  }
  const sums = Array.from({ length: line.consumers }, () => new Map());
  for (const span of line.spans) {
    if (span.consumer === undefined) continue;
    const tile = sums[span.consumer].get(span.tile) ?? { tile: span.tile, begin: Infinity, done: 0, read: 0, stored: 0, products: [] };
    if (span.what === "mma") {
      tile.begin = Math.min(tile.begin, span.begin);
      tile.done = Math.max(tile.done, span.end);
      tile.products.push(span);
    } else if (span.what === "read") tile.read = Math.max(tile.read, span.end);
    else if (span.what === "store") tile.stored = Math.max(tile.stored, span.end);
    sums[span.consumer].set(span.tile, tile);
  }
  made = { stages, sums: sums.map((tiles) => [...tiles.values()]) };
  kept.set(line, made);
  return made;
}

export function slotsAt(line, t) {
  return prepared(line).stages.map((loads) => {
    const load = loads.findLast((each) => each.asked <= t);
    if (!load || t >= load.read.end) return { state: "free", k: null, tile: null, progress: 0 };
    const { k, tile } = load;
    if (t < load.begin) return { state: "asked for", k, tile, progress: 0 };
    if (t < load.end) return { state: "loading", k, tile, progress: (t - load.begin) / (load.end - load.begin) };
    return { state: t < load.read.begin ? "full" : "reading", k, tile, progress: 1 };
  });
}

export function accumulatorsAt(line, t) {
  return prepared(line).sums.map((tiles) => {
    const sum = tiles.findLast((each) => each.begin <= t);
    if (!sum) return { state: "free", words: " ", mark: "free" };
    if (t < sum.done) return { state: "summing", words: `tile ${sum.tile}, ${sum.products.filter((p) => p.end <= t).length} of ${sum.products.length}`, mark: "reading" };
    if (sum.read && t < sum.read) return { state: "draining", words: `tile ${sum.tile}`, mark: "full" };
    if (t < sum.stored) return { state: sum.read ? "drained, D leaves" : "written back", words: `tile ${sum.tile}`, mark: "full" };
    return { state: "free", words: `tile ${sum.tile} is done`, mark: "free" };
  });
}

export function bitsAt(line, t) {
  const bits = {};
  for (const flip of line.flips) {
    if (flip.at > t + 1e-6) break;
    bits[`${flip.barrier}${flip.index}`] = flip.bit;
  }
  return bits;
}

export const waitersAt = (line, t) => line.waits.filter((w) => w.begin <= t && (w.end === null || w.end > t) && w.end !== w.begin);

/** What is worth a stop, in words and in order of time. */
export function eventsOf(line) {
  const events = [];
  for (const w of line.waits) {
    const where = `${w.barrier}[${w.index}]`;
    if (w.end === w.begin) events.push({ at: w.begin, words: `${w.lane} waits on ${where} for phase ${w.phase}; the bit is ${w.bit}, so it passes at once.` });
    else events.push({ at: w.begin, words: `${w.lane} waits on ${where} for phase ${w.phase}; the bit is ${w.bit}, so it blocks.` });
  }
  for (const flip of line.flips) {
    const woken = line.handoffs.filter((each) => each.barrier === flip.barrier && each.index === flip.index && each.at === flip.at).map((each) => each.to);
    events.push({ at: flip.at, words: `${flip.by} completes ${flip.barrier}[${flip.index}]: its bit turns ${flip.bit}.${woken.length ? ` ${woken.join(" and ")} may go on.` : ""}` });
  }
  return events.sort((a, b) => a.at - b.at);
}
