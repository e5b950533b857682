"""How fast the virtual GPU is: receives built kernels, hands on virtual-speed.json.

    python -m benchmarks.virtual [--rounds 5] [--jobs 2]

Times Step 9 at 512×512×1024 with the race detector under three schedules, in one process with one BLAS thread (its
matrices are too small for two; translation of the PTX left out, as it happens once a process), and what CI checks of
Steps 1 to 9 of both architectures, in so many processes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_places, write_here
from benchmarks.record import spread as minmax
from kernels.problem import DType, Problem
from kernels.virtual.cases import cases
from kernels.virtual.mutants import case_of
from kernels.virtual.spread import spread
from kernels.virtual.subject import Case, Subject, have
from kernels.virtual.verify import Task, run

SIZE = (512, 512, 1024)
SCHEDULES = 3
ARCHITECTURES = ("sm_100a", "sm_90a")


def large_case() -> Case:
    """Step 9 of sm_100a at the size that the goal names."""
    m, n, k = SIZE
    case = case_of("sm_100a", 9)
    return Case(
        9, case.function, Problem(m, n, k, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True), case.variant
    )


def single(rounds: int, root: Path | None) -> dict[str, Any]:
    """A row: Step 9, late, early and random, with the detector, in a process that spread() starts for it."""
    have("sm_100a", [large_case().function], root)
    ((_, row),) = spread(_timed, {"single": (rounds, root)}, jobs=2)
    return row


def _timed(task: tuple[int, Path | None]) -> dict[str, Any]:
    rounds, root = task
    case = large_case()
    subject = Subject("sm_100a", root)
    times, count = [], 0
    for number in range(rounds + 1):
        begin = time.perf_counter()
        outcome = subject.verify(case, schedules=SCHEDULES)
        if not outcome.ok:
            raise AssertionError(outcome.text())
        if number:  # the first one translates
            times.append(outcome.seconds)
        count = sum(r.instructions for r in outcome.report.runs)
        print(f"{case}: {outcome.seconds:.2f} s of {time.perf_counter() - begin:.2f} s", flush=True)
    return {
        "name": f"{case}, {SCHEDULES} schedules, race detector",
        "seconds": minmax(times),
        "instructions": count,
    }


def sweep(arch: str, jobs: int, root: Path | None) -> dict[str, Any]:
    """A row: all that CI checks of an architecture."""
    wanted = list(cases(arch, list(range(1, 10))))
    have(arch, (case.function for case in wanted), root)
    tasks = {str(case): Task(arch, root, case, SCHEDULES, detect=True, sms=8) for case in wanted}
    begin = time.perf_counter()
    outcomes = dict(spread(run, tasks, jobs=jobs))
    wall = time.perf_counter() - begin
    wrong = [name for name, outcome in outcomes.items() if not outcome["ok"]]
    if wrong:
        raise AssertionError(", ".join(wrong))
    return {
        "name": f"Steps 1 to 9 of {arch}: {len(wanted)} cases, {SCHEDULES} schedules, {jobs} processes",
        "wall_seconds": round(wall, 1),
        "core_seconds": round(sum(outcome["seconds"] for outcome in outcomes.values()), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.virtual", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--root", type=Path, help="folder of compiled kernels")
    add_places(parser)
    options = parser.parse_args(argv)
    rows = [single(options.rounds, options.root)]
    for arch in ARCHITECTURES:
        rows.append(sweep(arch, options.jobs, options.root))
        print(rows[-1], flush=True)
    packages = ["numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi"]
    print(write_here(options, "virtual-speed", rows, packages))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
