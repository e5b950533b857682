"""What bounds a shape below its goal: receives the suite's rows and a GPU, hands on readings of NVML and ncu.

For each such shape ours and the better reference run for a while on their own: NVML tells power, clock and why it
is held down. Then `ncu`, where it is installed and permitted, counts one launch of each in a process of its own:

    ncu … python -m benchmarks.profile VARIANT LIBRARY DTYPE LAYOUT BATCH M N K    (the child)

`bound` is a sentence made from these figures: which limit a kernel comes nearest to. Where A has few rows, so that most
of what is moved is B, the same product with `READING_ROWS` rows runs as well: hardly more than reading B. Under the
power cap a launch takes time by the joules that it needs, and this tells how many of them go into reading.
"""

from __future__ import annotations

import csv
import io
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import suite
from kernels.hopper.variants import variants
from kernels.operands import as_packed
from kernels.problem import DType, Problem
from kernels.selector import choose

SECONDS = 0.6  # a contender, once it has been warm for suite.WARM_SECONDS
SAMPLE_SECONDS = 0.01
READING_ROWS = 16
NCU_SECONDS = 90
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "Occupancy",
)
# ncu's own names of what is kept.
KEPT = {
    "Duration": "duration",
    "SM Frequency": "sm_frequency",
    "Elapsed Cycles": "elapsed_cycles",
    "Compute (SM) Throughput": "sm_throughput_percent",
    "Memory Throughput": "memory_throughput",
    "DRAM Throughput": "dram_throughput_percent",
    "L2 Cache Throughput": "l2_throughput_percent",
    "L1/TEX Cache Throughput": "l1_throughput_percent",
    "L2 Hit Rate": "l2_hit_percent",
    "SM Busy": "sm_busy_percent",
    "Issue Slots Busy": "issue_slots_busy_percent",
    "Warp Cycles Per Issued Instruction": "warp_cycles_per_instruction",
    "Achieved Occupancy": "achieved_occupancy_percent",
}
POWER_CAP = "power cap (software)"
REASONS = {  # NVML's bits of why the clock is lower than it could be
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


def goal(problem: dict[str, Any]) -> float:
    """The ratio that a shape of the suite should reach, sustained."""
    m, n, k, batch = (problem[key] for key in ("m", "n", "k", "batch"))
    if m in (128, 256) and n == k == 8192:
        return 1.08
    if n % 8 or k % 8:
        return 1.3
    if batch == 1 and (min(m, n, k) >= 4096 or m == n == k):
        return 1.0
    return 0.97


def profile(
    rows: Sequence[dict[str, Any]], ours: suite.Ours, clock: Callable[[], int], bandwidth: float
) -> list[dict[str, Any]]:
    """Rows of the shapes whose sustained ratio is below its goal."""
    below = [
        row
        for row in rows
        if row["timing"] == "sustained" and not row["batch_invariant"] and row["ratio"] < goal(row["problem"])
    ]
    return [_profiled(row, ours, bandwidth) for row in below]


def _profiled(row: dict[str, Any], ours: suite.Ours, bandwidth: float) -> dict[str, Any]:
    p = row["problem"]
    problem = suite.problem_of((p["batch"], p["m"], p["n"], p["k"]), DType(p["dtype"]), p["layout"])
    variant = next(each for each in variants() if each.name == row["variant"])
    sets = suite.operand_sets(problem, ours.device.l2_bytes)
    launchers = {
        row["variant"]: ours.launcher(variant, problem),
        row["reference"]: suite.reference(problem.batch, row["reference"]),
    }
    seconds = row["seconds"]["median"]
    read = {name: _powered(name, launch, sets, seconds) for name, launch in launchers.items()}
    del sets
    floor = (problem.bytes_read + problem.bytes_written) / bandwidth
    found = {
        "problem": p,
        "variant": row["variant"],
        "reference": row["reference"],
        "ratio": row["ratio"],
        "goal": goal(p),
        "read_floor_seconds": floor,
        "seconds": seconds,
        "nvml": read,
        "reading": _reading(problem, ours, floor),
        "ncu": counted(row["variant"], row["reference"], p),
    }
    return found | {"bound": bound(found)}


def _reading(problem: Problem, ours: suite.Ours, floor: float) -> dict[str, Any]:
    """`_powered`, of the same product with `READING_ROWS` rows; empty where A has as much to read as B."""
    if not READING_ROWS < problem.m <= problem.n // 8:
        return {}
    few = replace(problem, m=READING_ROWS)
    name = choose(as_packed(few), ours.device, variants=variants()).variant
    variant = next(each for each in variants() if each.name == name)
    sets = suite.operand_sets(few, ours.device.l2_bytes)
    return _powered(name, ours.launcher(variant, few), sets, floor)


def _powered(name: str, launch: Any, sets: Any, seconds: float) -> dict[str, Any]:
    """Watts, clock and reasons while one contender runs alone; `seconds`: about what a launch takes."""
    import torch

    runner = suite.contender(name, launch, sets, seconds)
    runner.burst.append(runner.replay_seconds())
    runner.warm(suite.WARM_SECONDS)
    count = max(2, round(SECONDS / (runner.replay_seconds() * runner.launches)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        runner.graph.replay()
    end.record()
    samples = list(_samples(end))
    end.synchronize()
    late = samples[len(samples) // 3 :]
    if not late:
        return {"seconds": begin.elapsed_time(end) / 1e3 / count / runner.launches}
    held = {text for _, _, reasons in late for bit, text in REASONS.items() if reasons & bit}
    return {
        "seconds": begin.elapsed_time(end) / 1e3 / count / runner.launches,
        "watts": statistics.fmean(each[0] for each in late),
        "sm_clock_mhz": statistics.median(each[1] for each in late),
        "held_down_by": sorted(held),
        "samples": len(late),
    }


def _samples(end: Any) -> Any:
    """(watts, MHz, reasons) until the event has passed; nothing where NVML's bindings are missing."""
    try:
        import pynvml
    except ImportError:
        return
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    while not end.query():
        yield (
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        )
        time.sleep(SAMPLE_SECONDS)


def counted(variant: str, library: str, problem: dict[str, Any]) -> dict[str, Any]:
    """What ncu counted in one launch of ours and of the reference, or why it couldn't."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return {"missing": "ncu is not installed"}
    child = [variant, library, *(str(problem[key]) for key in ("dtype", "layout", "batch", "m", "n", "k"))]
    command = [
        ncu, "--clock-control", "none", "--csv", "--page", "details",
        *(part for section in SECTIONS for part in ("--section", section)),
        "--kernel-name", "regex:step9|gemm|nvjet|xmma|cutlass", "--launch-skip", "2", "--launch-count", "4",
        sys.executable, "-m", "benchmarks.profile", *child,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired:
        return {"missing": f"ncu took more than {NCU_SECONDS} s"}
    found = parse(done.stdout)
    return found or {"missing": f"ncu ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}"}


def parse(text: str) -> dict[str, Any]:
    """Figures of the first launch of each kernel in ncu's CSV, by "ours" and "reference"."""
    start = text.find('"ID"')
    found: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    for line in csv.DictReader(io.StringIO(text[start:])) if start >= 0 else ():
        who = "ours" if "step9" in line["Kernel Name"] else "reference"
        if first.setdefault(who, line["ID"]) != line["ID"] or line["Metric Name"] not in KEPT:
            continue
        value = line["Metric Value"].replace(",", "")
        try:
            number = float(value)
        except ValueError:
            continue
        unit = line["Metric Unit"]
        key = KEPT[line["Metric Name"]]
        if key == "memory_throughput":  # ncu has two of that name: a share, and bytes a second
            key += "_percent" if unit == "%" else f" ({unit})"
        elif not key.endswith("_percent") and unit not in ("", "cycle"):
            key = f"{key} ({unit})"
        found.setdefault(who, {"kernel": line["Kernel Name"][:80]})[key] = number
    return found


def bound(row: dict[str, Any]) -> str:
    """Which limits ours comes nearest to, as a sentence."""
    said = [
        f"{row['read_floor_seconds'] / row['seconds']:.0%} of the time that a reduction takes to read as much"
    ]
    mine = row["nvml"].get(row["variant"], {})
    if "watts" in mine:
        held = " and ".join(mine["held_down_by"]) or "nothing"
        said.append(f"{mine['watts']:.0f} W at {mine['sm_clock_mhz']:.0f} MHz, clock held down by {held}")
    counts = row["ncu"].get("ours", {})
    for key, text in (("sm_throughput_percent", "SMs"), ("dram_throughput_percent", "DRAM"),
                      ("l2_throughput_percent", "L2")):  # fmt: skip
        if key in counts:
            said.append(f"{text} {counts[key]:.0f} % busy in one launch")
    reading, theirs = _joules(row["reading"]), _joules(row["nvml"].get(row["reference"], {}))
    if reading and theirs and POWER_CAP in row["nvml"][row["reference"]]["held_down_by"]:
        less = 1 - (theirs / row["goal"] - reading) / (theirs - reading)
        said.append(
            f"of the {theirs * 1e3:.1f} mJ that a launch of {row['reference']} takes, {reading * 1e3:.1f} go into "
            f"reading B, so at {row['goal']:.2f} all the rest would have to take {less:.0%} less"
        )
    return "; ".join(said)


def _joules(reading: dict[str, Any]) -> float:
    """Of a launch; 0 where NVML told nothing."""
    return float(reading.get("watts", 0.0) * reading.get("seconds", 0.0))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a shape."""
    lines = [f"{len(rows)} shapes are below their goal"]
    for row in rows:
        p = row["problem"]
        shape = "×".join(str(p[key]) for key in ("m", "n", "k"))
        lines.append(f"{shape}: {row['variant']} {row['ratio']:.3f} of {row['goal']:.2f}: {row['bound']}")
        lines += [f"  {name}: {reading}" for name, reading in row["nvml"].items()]
        lines += [f"  {READING_ROWS} rows: {row['reading']}"] if row["reading"] else []
        lines += [f"  ncu, {who}: {reading}" for who, reading in row["ncu"].items()]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The child that ncu watches: three launches of ours, then three of the reference."""
    import torch

    from kernels.device import describe_cuda

    name, library, dtype, layout, *sizes = argv
    batch, m, n, k = map(int, sizes)
    problem = suite.problem_of((batch, m, n, k), DType(dtype), layout)
    variant = next(each for each in variants() if each.name == name)
    device = describe_cuda()
    operands = suite.operand_sets(problem, device.l2_bytes)[0]
    launch = suite.Ours(device).launcher(variant, problem)
    for each in (launch, suite.reference(batch, library)):
        for _ in range(3):
            each(operands)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
