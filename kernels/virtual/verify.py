"""Checks kernels on the virtual GPU: receives steps and a number of schedules, hands on a table and an exit code.

    python -m kernels verify --device virtual [--arch sm_100a] [--step 9] [--schedules 16] [--all]

What runs is built first if it isn't there. A fault or a wrong element makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kernels.virtual import results
from kernels.virtual.machine import Options
from kernels.virtual.subject import Case, Outcome, Subject, cases

NOTE = "not covered: time, ptxas faults, register limits, weak memory, the hardware's order of accumulation"


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
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--json", type=Path, default=None, help="write a results file")
    options = parser.parse_args(argv)
    steps = options.step or list(range(1, 10))
    wanted = [c for c in cases(options.arch, steps, every=options.all) if options.only in c.function]
    if not wanted:
        parser.error("no case matches")
    _build(options.arch, wanted, options.root)
    subject = Subject(options.arch, options.root)
    settings = Options(detect=not options.no_detect, sms=options.sms)
    outcomes = _run(subject, wanted, options.schedules, settings)
    _show(outcomes, options.schedules)
    if options.json:
        results.write(options.json, "kernels on the virtual GPU", rows(outcomes), schedules=options.schedules)
    return 0 if all(o.ok for o in outcomes) else 1


def _build(arch: str, wanted: Sequence[Case], root: Path | None) -> None:
    from kernels.build import build

    for module in sorted({c.function for c in wanted}):
        build(arch, only=module, root=root)


def _run(subject: Subject, wanted: Sequence[Case], schedules: int, settings: Options) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    outcomes = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(wanted))
        for case in wanted:
            progress.update(task, description=case.function)
            outcomes.append(subject.verify(case, schedules=schedules, options=settings))
            progress.advance(task)
    return outcomes


def _show(outcomes: Sequence[Outcome], schedules: int) -> None:
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
    for o in outcomes:
        p = o.case.problem
        count = sum(r.instructions for r in o.report.runs)
        outcome = (
            "[green]pass[/]" if o.ok else f"[red]{', '.join(sorted({f.kind for f in o.report.faults}))}[/]"
        )
        table.add_row(
            str(o.case.step), o.case.function, f"{p.m}×{p.n}×{p.k}", f"{count:,}", f"{o.seconds:.2f}",
            f"{o.verdict.worst:.2f}", outcome,
        )  # fmt: skip
    console.print(table)
    for o in outcomes:
        if not o.ok:
            console.print(f"{o.case}\n{o.text()}", markup=False, highlight=False)
    console.print(NOTE, style="dim")


def rows(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Rows of a results file."""
    for o in outcomes:
        yield {
            "name": str(o.case),
            "outcome": "pass" if o.ok else "fail",
            "detail": o.text() or f"{sum(r.instructions for r in o.report.runs)} warp instructions",
            "seconds": round(o.seconds, 3),
        }


if __name__ == "__main__":
    raise SystemExit(main())
