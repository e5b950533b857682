"""`python -m benchmarks.drills [--part NAME …]`: runs drills, hands on benchmarks/results/<machine>/drills.json.

Rows of drills that weren't asked for stay as they were. Status 1 where one failed.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from dataclasses import replace

import benchmarks.drills
from benchmarks import record
from benchmarks.drills.frame import DRILLS, perform

PACKAGES = ("uvicorn", "uvloop", "httptools", "fastapi", "obstore", "psycopg", "ray")


def load() -> None:
    """Import every module of this package: each registers its drills."""
    for module in pkgutil.iter_modules(benchmarks.drills.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.drills.{module.name}")


def main() -> int:
    """Run what was asked for."""
    load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=__doc__)
    parser.add_argument("--part", action="append", choices=sorted(DRILLS), help="a drill; default: all")
    record.add_places(parser)
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
    record.write_here(options, "drills", rows, PACKAGES, key="name")
    return int(any(row["outcome"] != "passed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
