"""Checks kernels on the virtual GPU: receives steps and a number of schedules, hands on a table and an exit code.

    python -m kernels verify --device virtual [--arch sm_100a] [--step 9] [--schedules 16] [--all] [--jobs 2]

What runs is built first if it isn't there (without the compiler, what is built has to do). A fault or a wrong element
makes the exit code 1. `--kept FILE` goes on where a run was cut off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels import results
from kernels.virtual.cases import cases
from kernels.virtual.launch import Options
from kernels.virtual.ptx import PtxError
from kernels.virtual.spread import Result, spread
from kernels.virtual.subject import Case, Subject, have

NOTE = "not covered: time, ptxas faults, register limits, weak memory, the hardware's order of accumulation"


@dataclass(frozen=True, slots=True)
class Task:
    """A case and how to run it, for a process."""

    arch: str
    root: Path | None
    case: Case
    schedules: int
    detect: bool
    sms: int


@cache
def _subject(arch: str, root: Path | None) -> Subject:
    return Subject(arch, root)


def run(task: Task) -> Result:
    """Everything that a table and a results file say of a case."""
    settings = Options(detect=task.detect, sms=task.sms)
    try:
        outcome = _subject(task.arch, task.root).verify(task.case, schedules=task.schedules, options=settings)
    except PtxError as error:
        return {
            "ok": False,
            "kinds": ["refused"],
            "text": str(error),
            "seconds": 0.0,
            "count": 0,
            "worst": 0.0,
        }
    return {
        "ok": outcome.ok,
        "kinds": sorted({f.kind for f in outcome.report.faults}),
        "text": outcome.text(),
        "seconds": outcome.seconds,
        "count": sum(r.instructions for r in outcome.report.runs),
        "worst": outcome.verdict.worst,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels verify --device virtual", description=__doc__)
    parser.add_argument("--arch", choices=("sm_90a", "sm_100a"), default="sm_100a")
    parser.add_argument(
        "--step", type=int, action="append", help="may be given more than once; all by default"
    )
    parser.add_argument("--schedules", type=int, default=3, help="late, early, then seeded random ones")
    parser.add_argument("--all", action="store_true", help="every function of the Step 9 family")
    parser.add_argument("--no-detect", action="store_true", help="leave out the race detector")
    parser.add_argument("--sms", type=int, default=8, help="SMs of the virtual GPU")
    parser.add_argument("--only", default="", help="functions whose name holds this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--kept", type=Path, default=None, help="file of outcomes, to go on from")
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--json", type=Path, default=None, help="write a results file")
    options = parser.parse_args(argv)
    steps = options.step or list(range(1, 10))
    wanted = [c for c in cases(options.arch, steps, every=options.all) if options.only in c.function]
    if not wanted:
        parser.error("no case matches")
    have(options.arch, (c.function for c in wanted), options.root)
    tasks = {
        f"{options.arch} {c.problem} {c.function} {options.schedules} {options.sms} {options.no_detect}": Task(
            options.arch, options.root, c, options.schedules, not options.no_detect, options.sms
        )
        for c in wanted
    }
    outcomes = _progress(tasks, options.jobs, options.kept)
    pairs = [(task.case, outcomes[key]) for key, task in tasks.items()]
    _show(pairs, options.schedules)
    if options.json:
        results.write(options.json, "kernels on the virtual GPU", rows(pairs), schedules=options.schedules)
    return 0 if all(outcome["ok"] for _, outcome in pairs) else 1


def _progress(tasks: Mapping[str, Task], jobs: int, kept: Path | None) -> dict[str, Result]:
    """Run all under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    outcomes: dict[str, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(tasks))
        for key, outcome in spread(run, tasks, jobs=jobs, kept=kept):
            outcomes[key] = outcome
            progress.update(bar, description=tasks[key].case.function, advance=1)
    return outcomes


def _show(pairs: Sequence[tuple[Case, Result]], schedules: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    table = Table(title=f"virtual GPU, {schedules} schedules, race detector")
    for name in ("step", "function", "M×N×K", "instructions", "seconds", "error / bound", "outcome"):
        table.add_column(
            name,
            no_wrap=True,
            justify="right" if name in ("instructions", "seconds", "error / bound") else "left",
        )
    for case, o in pairs:
        p = case.problem
        outcome = "[green]pass[/]" if o["ok"] else f"[red]{', '.join(o['kinds'])}[/]"
        table.add_row(
            str(case.step), case.function, f"{p.m}×{p.n}×{p.k}", f"{o['count']:,}", f"{o['seconds']:.2f}",
            f"{o['worst']:.2f}", outcome,
        )  # fmt: skip
    console.print(table)
    for case, o in pairs:
        if not o["ok"]:
            console.print(f"{case}\n{o['text']}", markup=False, highlight=False)
    console.print(NOTE, style="dim")


def rows(pairs: Sequence[tuple[Case, Result]]) -> Iterator[dict[str, Any]]:
    """Rows of a results file."""
    for case, o in pairs:
        yield {
            "name": str(case),
            "outcome": "pass" if o["ok"] else "fail",
            "detail": o["text"] or f"{o['count']} warp instructions",
            "seconds": round(o["seconds"], 3),
        }


if __name__ == "__main__":
    raise SystemExit(main())
