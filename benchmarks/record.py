"""Results files: receives rows, hands on benchmarks/results/<machine>/<what>.json with how they came about."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those `packages` that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit measured: GEMM_COMMIT, for a tree carried elsewhere, else git's; "+" marks uncommitted changes."""
    if named := os.environ.get("GEMM_COMMIT"):
        return named
    try:
        run = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_machine() -> dict[str, Any]:
    """This computer: processor, cores, memory."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": platform.release(),
    }


def write(
    machine: str,
    what: str,
    rows: Iterable[dict[str, Any]],
    *,
    details: dict[str, Any],
    packages: Sequence[str],
    folder: Path | None = None,
) -> Path:
    """Write benchmarks/results/<machine>/<what>.json (or into `folder`) and return its path."""
    path = (folder or RESULTS / machine) / f"{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "what": what,
        "machine": {"name": machine, **details},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "versions": versions(*packages),
        "commit": commit(),
        "rows": list(rows),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else Path(sys.argv[0]).name
