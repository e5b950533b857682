"""`python -m benchmarks.drills [--part NAME …]`: runs drills, hands on benchmarks/results/<machine>/drills.json.

Rows of drills that weren't asked for stay as they were. Status 1 where one failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path

import benchmarks.drills
from benchmarks import record
from benchmarks.drills.frame import DRILLS, Row, perform

PACKAGES = ("uvicorn", "uvloop", "httptools", "fastapi", "obstore", "psycopg", "ray")


def load() -> None:
    """Import every module of this package: each registers its drills."""
    for module in pkgutil.iter_modules(benchmarks.drills.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.drills.{module.name}")


def merged(path: Path, rows: list[Row]) -> list[Row]:
    """The rows of the file with these in place of those of the same name, by name."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    by_name = {row["name"]: row for row in [*earlier, *rows]}
    return [by_name[name] for name in sorted(by_name)]


def main() -> int:
    """Run what was asked for."""
    load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(DRILLS), help="a drill; default: all")
    parser.add_argument("--machine", default="cpu", help="name in benchmarks/results (default: cpu)")
    parser.add_argument(
        "--lasts", type=float, metavar="S", help="seconds that drills which go on for a while do"
    )
    parser.add_argument("--list", action="store_true", help="name the drills and the seconds that bound each")
    options = parser.parse_args()
    if options.list:
        for drill in DRILLS.values():
            print(f"{drill.name:32} {drill.seconds + drill.lasts:6g} s")
        return 0
    rows = []
    for name in options.part or DRILLS:
        drill = DRILLS[name]
        if drill.lasts and options.lasts:
            drill = replace(drill, lasts=options.lasts)
        row = perform(drill)
        print(f"{row['name']:32} {row['outcome']:8} {row['seconds']:7.1f} s  {row['detail']}", flush=True)
        rows.append(row)
    path = record.RESULTS / options.machine / "drills.json"
    record.write(
        options.machine, "drills", merged(path, rows), details=record.cpu_machine(), packages=PACKAGES
    )
    return int(any(row["outcome"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
