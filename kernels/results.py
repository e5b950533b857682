"""Writes results files: receives rows, hands on a JSON file with how they came about."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi")
#: Flags that say where files are or go, which tells nothing of the figures.
_PLACES = ("--out", "--log", "--json", "--kept", "--root")


def write(path: Path, what: str, rows: Iterable[dict[str, Any]], key: str = "", **more: Any) -> None:
    """Write a file of benchmarks/results; this computer is its machine.

    With `key`, rows of the file that is there stay where no new row has the same `key`.
    """
    rows = list(rows)
    if key:
        rows = [*kept(path, rows, key), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(what, rows, **more), indent=1, ensure_ascii=False) + "\n")


def document(what: str, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What stands in it; `more` is added, or stands in the place of what is known here."""
    return {
        "what": what,
        "machine": {"name": "cpu", "system": platform.release(), "cores": len(os.sched_getaffinity(0))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "versions": versions(*_PACKAGES),
        "commit": commit(),
        **more,
        "rows": rows,
    }


def kept(path: Path, rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Rows of the file at `path`, if it is there, whose `key` none of the new `rows` has.

    Each names the commit that it was measured at, where that isn't the one at hand.
    """
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    new = {row[key] for row in rows}
    of = {} if earlier["commit"] == commit() else {"commit": earlier["commit"]}
    return [{**of, **row} for row in earlier["rows"] if row.get(key) not in new]


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those `packages` that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command() -> str:
    """How this process was started, as one types it; without flags that name places."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    words: list[str] = []
    given = iter(sys.argv[1:])
    for word in given:
        if word in _PLACES:
            next(given, None)
        elif word.partition("=")[0] not in _PLACES:
            words.append(word)
    return " ".join(["python", "-m", module, *words])


def commit() -> str:
    """GEMM_COMMIT, for a tree carried elsewhere, else git's; "+" marks uncommitted changes."""
    if named := os.environ.get("GEMM_COMMIT"):
        return named
    run = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
