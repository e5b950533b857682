"""What the model says: receives a chip, a step and a size, hands on predicted times and timelines.

    python -m kernels predict [--chip b200] [--size 4096 4096 4096] [--json] [--write]
    python -m kernels predict --timeline --step 9 --depth 4

It plays the kernels' schedules, at once and without a compiler. `python -m kernels trace` drives the same engines
(kernels/engines.py) by the compiled instructions instead; a test holds the two together. `--write` writes
benchmarks/results/cpu/model-<chip>.json.

`answer` is what a worker says to "predict" and "trace", so the service's page shows what this command prints.
Predictions are a model's, never measured; where they are off a published time the table says by how much.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernels.device import DATASHEETS
from kernels.engines import Engines
from kernels.ladder import LADDER, TILE_MN, Step
from kernels.model import Cta, Machine
from kernels.schedules import BLK_K, CHIP_OF, CHIPS, SCHEDULES, Rates, Schedule, lockstep

DEEPEST = 6
SMEM_OF_SM = 233_472
TMEM_COLUMNS = 512
TOLERANCE = 0.25
SIZE = (4096, 4096, 4096)
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SMALL = {1: (128, 128, 64), 2: (128, 128, 4096)}

#: Seconds that others published for the same nine steps, 4096³ (Step 1 and 2 as given there).
PUBLISHED_SOURCE = (
    "One B200 at locked clocks, 4096³, fp16 with fp32 accumulation: Modern GPU Programming for MLSys, MLC"
    " community (mlc.ai/modern-gpu-programming-for-mlsys). Its kernels are not this project's."
)
PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "b200": [
        {"step": 3, "seconds": 53.6e-3, "note": ""},
        {"step": 4, "seconds": 0.49e-3, "note": ""},
        {"step": 5, "seconds": 0.272e-3, "note": ""},
        {"step": 6, "seconds": 0.239e-3, "note": ""},
        {"step": 7, "seconds": 0.23e-3, "note": "ring of 2; 0.132 ms with a ring of 4"},
        {"step": 8, "seconds": 0.104e-3, "note": ""},
        {"step": 9, "seconds": 0.094e-3, "note": "as cuBLAS"},
    ],
    "h200": [],
}


def measured(chip: str) -> dict[int, float]:
    """Measured seconds by step, from the results file of a checkout; empty where there is none."""
    path = RESULTS / chip / "ladder.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text())["rows"]
    return {row["step"]: row["seconds"]["median"] for row in rows if row["timing"] != "sustained"}


def told_by_others(chip: str) -> dict[int, float]:
    """Published seconds by step."""
    return {row["step"]: row["seconds"] for row in PUBLISHED[chip]}


def residents(schedule: Schedule) -> int:
    """CTAs that an SM holds at once, by shared and tensor memory."""
    by_smem = SMEM_OF_SM // (schedule.smem + 1024)
    columns = schedule.cta[0] * schedule.cta[1] // 128
    by_tmem = TMEM_COLUMNS // columns if schedule.arch == "sm_100a" else by_smem
    return max(1, min(by_smem, by_tmem, schedule.at_most)) if schedule.ctas == 1 else 1


@lru_cache(maxsize=256)
def seconds(chip: str, schedule: Schedule, m: int, n: int, k: int, resident: int) -> float:
    """Predicted time of a product: launch, and the SM with the most tiles (or memory, if that takes longer)."""
    model = CHIPS[chip]
    tiles = -(-m // schedule.tile[0]) * -(-n // schedule.tile[1])
    most = -(-tiles // (model.device.sms // schedule.ctas))
    machine, engines = Machine(keep=False), Engines(model.chip)
    for index in range(resident):
        share = (most - index + resident - 1) // resident
        if share:
            Cta(machine, engines, model, schedule, f"CTA {index} ").run(share, -(-k // BLK_K))
    if machine.run():
        raise AssertionError(f"the schedule of Step {schedule.step} deadlocks in the model")
    end = max(machine.now, engines.store.free) + model.chip.load_latency.value
    moved = 2 * (m * k + n * k + m * n)
    return model.chip.launch.value + max(end / model.clock, moved / model.device.bandwidth)


def fetched(step: Step, arch: str, m: int, n: int, k: int) -> int:
    """Bytes of A and B that the step's tiles fetch from L2 and memory."""
    schedule = SCHEDULES[arch].get(step.number)
    tile = schedule.tile if schedule else (TILE_MN, TILE_MN)
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    a_block = schedule.fetched * schedule.ctas if schedule else 2 * TILE_MN * BLK_K * 2
    return tiles * -(-k // BLK_K) * a_block


def table(chip: str, size: tuple[int, int, int] = SIZE) -> list[dict[str, Any]]:
    """The ladder's steps; `seconds` None for Steps 1 and 2, which compute one tile (not modelled)."""
    arch = next(a for a, name in CHIP_OF.items() if name == chip)
    model = CHIPS[chip]
    rows = []
    for step in LADDER[arch]:
        m, n, k = SMALL.get(step.number, size)
        schedule = SCHEDULES[arch].get(step.number)
        took = alone = None
        if schedule is not None:
            took = seconds(chip, schedule, m, n, k, residents(schedule))
            alone = seconds(chip, schedule, m, n, k, 1)
        rows.append(
            {
                "step": step.number,
                "title": " ".join(step.name.split("_")[1:]),
                "idea": step.idea,
                "m": m,
                "n": n,
                "k": k,
                "seconds": took,
                "alone_seconds": alone,
                "busy": None if took is None else 2.0 * m * n * k / took / model.peak,
                "residents": None if schedule is None else residents(schedule),
                "fetched_bytes": fetched(step, arch, m, n, k),
            }
        )
    return rows


def timeline(
    arch: str, step: int, depth: int, k_tiles: int, tiles: int, same_phase: bool = False
) -> dict[str, Any]:
    """One CTA's schedule beside the same tiles in lockstep."""
    chip = CHIPS[CHIP_OF[arch]]
    base = SCHEDULES[arch].get(step)
    if base is None or base.copied:
        raise ValueError(f"the model has no schedule of Step {step} with a ring of stages")
    if not 1 <= depth <= DEEPEST:
        raise ValueError(f"a ring has 1 to {DEEPEST} stages")
    chosen = replace(base, depth=depth, ahead=depth, same_phase=same_phase)
    needs = base.smem + (depth - base.depth) * base.load_bytes
    return {
        "chip": CHIP_OF[arch],
        "device": chip.device.name,
        "clock_hz": chip.clock,
        "parameters": chip.parameters(),
        "own_depth": base.depth,
        "smem_bytes": needs,
        "smem_limit": chip.device.smem_bytes,
        "lockstep": _play(chip, replace(lockstep(base), same_phase=same_phase), k_tiles, tiles),
        "chosen": _play(chip, chosen, k_tiles, tiles),
    }


_ROLES = ("one team", "TMA warp", "MMA warp", "consumer", "write back")
_MEANING = {
    "tma2mma": ("TMA tells MMA", "stage loaded"),
    "mma2tma": ("MMA tells TMA", "stage read, may be overwritten"),
    "mma2ld": ("MMA tells write-back", "accumulator complete"),
    "ld2mma": ("write-back tells MMA", "accumulator drained"),
}


def _play(chip: Rates, schedule: Schedule, k_tiles: int, tiles: int) -> dict[str, Any]:
    machine, engines = Machine(), Engines(chip.chip)
    cta = Cta(machine, engines, chip, schedule)
    barriers = list(cta.barriers())
    cta.run(tiles, k_tiles)
    deadlock = machine.run()
    ns = 1e9 / chip.clock
    last = max((span["end"] for span in machine.spans), default=0.0)
    products = [span for span in machine.spans if span["what"] == "mma"]
    first_mma = min((span["begin"] for span in products), default=None)
    last_mma = max((span["end"] for span in products), default=None)
    named: dict[str, dict[str, Any]] = {}
    for barrier in barriers:
        who, what = _MEANING[barrier.name]
        row = named.setdefault(barrier.name, {"name": barrier.name, "who": who, "says": what, "count": 0})
        row["count"] += 1
    lanes = [engines.tma, engines.tensor, engines.reader, engines.store]
    if schedule.arch == "sm_90a":
        lanes.remove(engines.reader)
    roles = sorted(
        dict.fromkeys(wait["lane"] for wait in machine.waits),
        key=lambda lane: (_ROLES.index(lane.rstrip(" 01")), lane),
    )
    return {
        "roles": schedule.roles,
        "depth": schedule.depth,
        "consumers": schedule.consumers,
        "tile": schedule.tile,
        "stage_bytes": schedule.load_bytes,
        "nanoseconds": last * ns,
        "lanes": [{"name": name, "kind": "role"} for name in roles]
        + [{"name": engine.lane, "kind": "engine"} for engine in lanes],
        "barriers": list(named.values()),
        "spans": _scaled(machine.spans, ns),
        "flips": _scaled(machine.flips, ns),
        "waits": _scaled(machine.waits, ns),
        "handoffs": _scaled(machine.handoffs, ns),
        "deadlock": deadlock,
        "kpis": {
            "busy": {engine.lane: engine.busy / last if last else 0.0 for engine in lanes},
            "steady": {
                engine.lane: _within(machine.spans, engine.lane, first_mma, last_mma) for engine in lanes
            },
            "fill_nanoseconds": None if first_mma is None else first_mma * ns,
            "drain_nanoseconds": None if last_mma is None else (last - last_mma) * ns,
        },
    }


def _within(spans: list[dict[str, Any]], lane: str, begin: float | None, end: float | None) -> float | None:
    """Share of [begin, end] in which `lane` was busy."""
    if begin is None or end is None or end <= begin:
        return None
    busy: float = sum(
        max(0.0, min(span["end"], end) - max(span["begin"], begin)) for span in spans if span["lane"] == lane
    )
    return busy / (end - begin)


def _scaled(rows: list[dict[str, Any]], ns: float) -> list[dict[str, Any]]:
    times = ("begin", "end", "at", "until", "asked")
    return [
        {
            key: round(value * ns, 2) if key in times and value is not None else value
            for key, value in row.items()
        }
        for row in rows
    ]


def answer(what: str, args: dict[str, Any]) -> Any:
    """A worker's answer to "predict" (all chips at the ladder's size) and "trace" (a timeline)."""
    if what == "trace":
        return timeline(**args)
    return {"chips": {chip: document(chip) for chip in CHIPS}}


@lru_cache(maxsize=8)
def document(chip: str) -> dict[str, Any]:
    """Steps, parameters, the chip by its datasheet, and what others published."""
    model = CHIPS[chip]
    return {
        "device": asdict(DATASHEETS[model.device.arch]),
        "l2_bandwidth": model.l2_bandwidth,
        "steps": table(chip),
        "parameters": model.parameters(),
        "published": PUBLISHED[chip],
        "published_source": PUBLISHED_SOURCE,
    }


def main(argv: Sequence[str]) -> int:
    """`python -m kernels predict`."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels predict", description="What a model says of a kernel's time on a chip."
    )
    parser.add_argument("--chip", choices=sorted(CHIPS), default="b200")
    parser.add_argument("--size", nargs=3, type=int, metavar=("M", "N", "K"), default=SIZE)
    parser.add_argument("--timeline", action="store_true", help="one CTA's events instead of the table")
    parser.add_argument("--step", type=int, choices=range(4, 10), default=9)
    parser.add_argument("--depth", type=int, help="stages of the ring (default: the step's own)")
    parser.add_argument("--k-tiles", type=int, default=8)
    parser.add_argument("--tiles", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="as the page gets it")
    parser.add_argument("--write", action="store_true", help="write a results file too")
    options = parser.parse_args(argv)
    arch = next(a for a, name in CHIP_OF.items() if name == options.chip)
    if options.timeline:
        depth = options.depth or SCHEDULES[arch][options.step].depth
        try:
            played = timeline(arch, options.step, depth, options.k_tiles, options.tiles)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        print(json.dumps(played, indent=1) if options.json else _told(played))
    elif options.json:
        print(
            json.dumps(
                {**document(options.chip), "steps": table(options.chip, tuple(options.size))}, indent=1
            )
        )
    else:
        _print_table(options.chip, tuple(options.size))
    if options.write:
        print(write(options.chip))
    return 0


def write(chip: str) -> Path:
    """Write what the model says of the ladder at its own size beside what is known; hands back the file."""
    from kernels import results

    path = RESULTS / "cpu" / f"model-{chip}.json"
    what = f"model of {CHIPS[chip].chip.name} at {'×'.join(map(str, SIZE))}, fp16; not a measurement"
    arch = next(a for a, name in CHIP_OF.items() if name == chip)
    played = timeline(arch, 9, SCHEDULES[arch][9].depth, SIZE[2] // BLK_K, 2)
    steady = {name: played[name]["kpis"]["steady"]["tensor core"] for name in ("lockstep", "chosen")}
    results.write(
        path,
        what,
        [_judged(chip, row) for row in table(chip) if row["seconds"] is not None],
        parameters=CHIPS[chip].parameters(),
        step_9_tensor_busy_in_steady_state=steady,
    )
    return path


def _judged(chip: str, row: dict[str, Any]) -> dict[str, Any]:
    """A step's prediction, and how far it is off."""
    published, ours = told_by_others(chip).get(row["step"]), measured(chip).get(row["step"])
    known = ours or published
    field = "seconds" if ours else "alone_seconds"
    off = None if known is None else row[field] / known - 1
    return {
        "name": f"step {row['step']} {row['title']}",
        "step": row["step"],
        "predicted_seconds": row["seconds"],
        "predicted_seconds_one_cta_an_sm": row["alone_seconds"],
        "tensor_busy": row["busy"],
        "residents": row["residents"],
        "reference": "measured here" if ours else "published, one CTA an SM" if published else None,
        "reference_seconds": known,
        "off": off,
        "outcome": "no reference"
        if off is None
        else "within a quarter"
        if abs(off) <= TOLERANCE
        else f"off by {off:+.0%}",
    }


def _outcome(off: float | None) -> str:
    if off is None:
        return "no reference"
    return "within a quarter" if abs(off) <= TOLERANCE else f"off by {off:+.0%}"


def _told(played: dict[str, Any]) -> str:
    lines = []
    for name in ("lockstep", "chosen"):
        part = played[name]
        kpis = part["kpis"]
        lines.append(f"{name}: {part['nanoseconds'] / 1e3:.2f} µs on {played['device']}, a model")
        lines += [
            f"  {lane:<14} busy {100 * busy:5.1f} %, first MMA to last {100 * (kpis['steady'][lane] or 0):5.1f} %"
            for lane, busy in kpis["busy"].items()
        ]
    return "\n".join(lines)


def _print_table(chip: str, size: tuple[int, int, int]) -> None:
    from rich.console import Console
    from rich.table import Table

    ours = measured(chip) if size == SIZE else {}
    published = told_by_others(chip) if size == SIZE else {}
    shown = Table("step", "size", "predicted µs", "TFLOP/s", "tensor busy", "one CTA an SM, µs")
    # the published kernels run one CTA an SM, so that prediction is the one to hold against them
    others = [(ours, "measured µs", "seconds"), (published, "published µs", "alone_seconds")]
    others = [other for other in others if other[0]]
    for _, name, _ in others:
        shown.add_column(name)
        shown.add_column("model off")
    for row in table(chip, size):
        cells = [f"{row['step']} {row['title']}", f"{row['m']}×{row['n']}×{row['k']}"]
        if row["seconds"] is None:
            cells += ["not modelled", "", "", ""]
        else:
            rate = 2.0 * row["m"] * row["n"] * row["k"] / row["seconds"] / 1e12
            cells += [
                f"{row['seconds'] * 1e6:.1f}",
                f"{rate:.0f}",
                f"{100 * row['busy']:.0f} %",
                f"{row['alone_seconds'] * 1e6:.1f}",
            ]
        for known, _, field in others:
            told = known.get(row["step"])
            off = None if told is None or row[field] is None else row[field] / told - 1
            cells += [
                "" if told is None else f"{told * 1e6:,.1f}",
                "" if off is None else f"{100 * off:+.0f} %",
            ]
        shown.add_row(*cells)
    console = Console()
    console.print(shown)
    console.print(
        "Predicted by a model that doesn't know the power cap. Published: other kernels, one CTA an SM.",
        highlight=False,
    )
    for row in CHIPS[chip].parameters():
        console.print(f"  {row['name']}: {row['value']} ({row['source']})", highlight=False)
