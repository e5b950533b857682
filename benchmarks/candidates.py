"""Candidates for the Step 9 family against cuBLAS and the selector's choice: receives a GPU, hands on candidates.json.

    python -m benchmarks.candidates [--dtype fp16] [--dtype bf16] [--only TEXT] [--machine h200] [--out DIR]

For each shape below its goal, and each that a candidate is meant for: what the selector chooses, the next of the
family by estimate, the candidates, full grids, all raced as in the suite: D checked first, bursts in turn, sustained
blocks forth and back (which count). A ratio is the faster of cuBLAS and cuBLASLt over it.
What gains is then moved from CANDIDATES to FAMILY (kernels/hopper/tilings.py).

First each tiling multiplies with one cluster on an idle chip, where neither L2 nor the power cap holds it back: two
lengths of K tell the cycles that a block of 64 along K takes, beside those that the tensor cores need for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import suite
from benchmarks.record import add_places, short_name, spread, write
from kernels.device import Device, describe_cuda
from kernels.hopper.tilings import TILE_K
from kernels.hopper.variants import Step9, candidates, variants
from kernels.libraries import NotBuilt
from kernels.operands import as_packed
from kernels.problem import DType, Problem
from kernels.selector import choose

SHAPES = (  # M, N, K: those below their goal first
    (4096, 4096, 4096),
    (256, 8192, 8192),
    (128, 8192, 8192),
    (8192, 8192, 8192),
    (16384, 4096, 4096),
    (4096, 4096, 14336),
    (2048, 2048, 2048),
    (16, 8192, 8192),
    (1, 8192, 8192),
)
RIVALS = 1  # of the family, by estimate
SLOWEST = 1.25  # what is estimated to take so much longer than the choice isn't raced
ROUNDS = 6
SHORT, LONG = 16_384, 65_536  # K of what one cluster multiplies alone
TENSOR_FLOPS = 4_096  # a cycle and SM


@dataclass(frozen=True, slots=True)
class Entry:
    """What is raced: a variant, and the size of its grid where it isn't the usual."""

    name: str
    variant: Step9
    blocks: int | None = None


def entries(problem: Problem, device: Device) -> Iterator[Entry]:
    """The selector's choice first, then what may be faster."""
    family = variants()
    choice = choose(problem, device, variants=family)
    chosen = next(each for each in family if each.name == choice.variant)
    yield Entry(chosen.name, chosen)
    able = [each for each in (*family, *candidates()) if each.unsupported(problem, device) is None]
    near = [each for each in able if each.seconds(problem, device) <= SLOWEST * choice.seconds]
    near.sort(key=lambda each: each.seconds(problem, device))
    rivals = [each for each in near if each in family and each != chosen]
    waiting = [each for each in near if each not in family]
    for each in (*rivals[:RIVALS], *waiting):
        yield Entry(each.name, each)
    if min(problem.m, problem.n) >= 2048:
        for each in (chosen, *waiting):
            if each.tiling.cluster <= 2 and each.blocks(problem, device.sms) < device.sms:
                yield Entry(f"{each.name} on every SM", each, device.sms)


def raced(problem: Problem, ours: suite.Ours, clock: suite.Clock) -> list[dict[str, Any]]:
    """Rows of one problem, the selector's choice first. Raises AssertionError where a D is wrong."""
    import torch

    device, fits = ours.device, as_packed(problem)
    sets = suite.operand_sets(problem, device.l2_bytes)
    launchers, errors, estimates = {}, {}, {}
    for entry in entries(fits, device):
        if not ours.runtime.has(entry.variant, fits):
            continue
        launch = ours.launcher(entry.variant, problem, entry.blocks)
        errors[entry.name] = suite.checked(launch, sets[0])
        estimates[entry.name] = entry.variant.seconds(fits, device)
        launchers[entry.name] = launch
    if not launchers:
        raise NotBuilt(f"nothing is built that computes {problem}")
    own = list(launchers)
    launchers |= {name: suite.reference(problem.batch, name) for name in suite.LIBRARIES}
    found = suite.race(launchers, sets, estimates[own[0]], clock, ROUNDS)
    rows = []
    for name in own:
        for timing in ("burst", "sustained"):
            best = suite.better(found, timing)
            times, theirs = getattr(found[name], timing), getattr(best, timing)
            rows.append(
                {
                    "problem": suite.described(problem),
                    "entry": name,
                    "timing": timing,
                    "seconds": spread(times),
                    "estimated_seconds": estimates[name],
                    "reference": best.name,
                    "reference_seconds": spread(theirs),
                    "ratio": statistics.median(theirs) / statistics.median(times),
                    "sm_clock_mhz": found[name].clocks,
                    "reference_sm_clock_mhz": best.clocks,
                    "error": errors[name],
                }
            )
    del found
    torch.cuda.empty_cache()
    return rows


def alone(ours: suite.Ours, clock: suite.Clock) -> list[dict[str, Any]]:
    """Cycles of a block of K in each tiling, one cluster on the chip; fp16, row-major."""
    rows = []
    for variant in (*variants(), *candidates()):
        t = variant.tiling
        p, q = t.p * t.cluster_p, t.q * t.cluster_q
        m, n = (q, p) if t.swap else (p, q)
        seconds, mhz = [], 0
        for k in (SHORT, LONG):
            problem = suite.problem_of((1, m, n, k), DType.FP16, "nn")
            if variant.unsupported(problem, ours.device) or not ours.runtime.has(variant, problem):
                break
            launch = ours.launcher(variant, problem, t.cluster)
            runner = suite.contender(variant.name, launch, suite.operand_sets(problem, 0), 1e-3)
            seconds.append(min(runner.replay_seconds() for _ in range(5)))
            runner.graph.replay()
            mhz = clock()
        if len(seconds) < 2:
            continue
        blocks = (LONG - SHORT) / TILE_K / t.split
        rows.append(
            {
                "variant": variant.name,
                "timing": "alone",
                "seconds_a_block": (seconds[1] - seconds[0]) / blocks,
                "sm_clock_mhz": mhz,
                "cycles_a_block": (seconds[1] - seconds[0]) / blocks * mhz * 1e6,
                "tensor_cycles": 2 * t.p * t.q * TILE_K / TENSOR_FLOPS,
            }
        )
    return rows


def alone_table(rows: Sequence[dict[str, Any]]) -> str:
    """A line a tiling: cycles a block of K, and the share of them that the tensor cores need."""
    lines = ["one cluster alone: cycles a block of 64 along K, those of the tensor cores, their share"]
    for row in rows:
        cycles, needed = row["cycles_a_block"], row["tensor_cycles"]
        share = f"{needed / cycles:>7.1%}" if cycles > 0 else ""
        lines.append(f"  {row['variant'].removeprefix('step9-'):<44}{cycles:>9.0f}{needed:>7.0f}{share}")
    return "\n".join(lines)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A block a problem, fastest first when sustained; `*` marks the selector's choice."""
    lines = [f"{'':<46}{'µs':>9}{'MHz':>6}{'burst':>8}{'sustained':>11}{'× choice':>10}"]
    problems = [dict(items) for items in dict.fromkeys(tuple(row["problem"].items()) for row in rows)]
    for problem in problems:
        mine = [row for row in rows if row["problem"] == problem]
        burst = {row["entry"]: row for row in mine if row["timing"] == "burst"}
        sustained = {row["entry"]: row for row in mine if row["timing"] == "sustained"}
        choice = next(iter(sustained))
        shape = "×".join(str(problem[key]) for key in ("m", "n", "k"))
        lines.append(f"{shape} {problem['dtype']}, {sustained[choice]['reference']} is the faster reference")
        for name in sorted(sustained, key=lambda name: -sustained[name]["ratio"]):
            row = sustained[name]
            gain = row["ratio"] / sustained[choice]["ratio"]
            lines.append(
                f"{'*' if name == choice else ' '} {name.removeprefix('step9-'):<44}"
                f"{row['seconds']['median'] * 1e6:>9.1f}{max(row['sm_clock_mhz'], default=0):>6}"
                f"{burst[name]['ratio']:>8.3f}{row['ratio']:>11.3f}{gain:>10.3f}"
            )
    return "\n".join(lines)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.candidates", description="Race candidates.")
    parser.add_argument("--dtype", action="append", choices=["fp16", "bf16"], help="default: both")
    parser.add_argument("--only", default="", help="shapes whose MxNxK holds this text")
    add_places(parser, None)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a result was wrong."""
    options = _options(argv)

    import torch

    suite.exact_references()
    torch.zeros(1, device="cuda")
    device = describe_cuda()
    ours, clock = suite.Ours(device, (*variants(), *candidates())), suite.Clock()
    bandwidth = suite.reduction_bandwidth()
    print(f"{device.name}: a reduction reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    single = alone(ours, clock)
    print(alone_table(single), flush=True)
    rows: list[dict[str, Any]] = []
    failed = 0
    for dtype in options.dtype or ("fp16", "bf16"):
        for m, n, k in SHAPES:
            if options.only not in f"{m}x{n}x{k}":
                continue
            try:
                rows += raced(suite.problem_of((1, m, n, k), DType(dtype), "nn"), ours, clock)
            except AssertionError as wrong:
                failed += 1
                print(f"{m}×{n}×{k} {dtype}: {wrong}", file=sys.stderr, flush=True)
    print(table(rows))
    machine = options.machine or short_name(device.name)
    details = suite.machine_of(device, bandwidth, ours)
    packages = ["torch", "apache-tvm-ffi", "nvidia-cublas"]
    print(
        write(machine, "candidates", [*rows, *single], details=details, packages=packages, folder=options.out)
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
