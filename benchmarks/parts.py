"""A measurement in parts: receives generators of rows by name, hands on a results file that grows row by row.

So a run that is cut short keeps what it found, and parts that weren't asked for stay as the file has them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

Row = dict[str, Any]
Parts = Mapping[str, Callable[[], Iterable[Row]]]


def add_choice(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Flags that say which parts run, and for how long parts are begun."""
    parser.add_argument("--part", action="append", choices=names, help="only these parts")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no part is begun")


def run(
    what: str,
    parts: Parts,
    options: argparse.Namespace,
    *,
    details: dict[str, Any],
    packages: Sequence[str],
) -> int:
    """Run the parts that `options` name (add_choice, record.add_places); the exit status: 1 where one failed."""
    rows: list[Row] = []
    failed = 0

    def note(part: str, row: Row) -> Path:
        print(row, flush=True)
        rows.append({"part": part, **row})
        return record.write(
            options.machine,
            what,
            rows,
            details=details,
            packages=packages,
            folder=options.out,
            key="part",
        )

    begun = time.perf_counter()
    for name in options.part or parts:
        started = time.perf_counter()
        if started - begun > options.budget:
            failed += 1
            print(f"{name}: not begun, the time was used up", flush=True)
            continue
        try:
            for row in parts[name]():
                note(name, row)
        except (Exception, SystemExit) as error:  # what the other parts found must come home
            failed += 1
            note(name, {"name": name, "outcome": "failed", "detail": f"{type(error).__name__}: {error}"})
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    return 1 if failed else 0
