"""Results files: receives rows, hands on benchmarks/results/<machine>/<what>.json with how they came about."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels.results import command, commit, versions

RESULTS = Path(__file__).parent / "results"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


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
        "command": command(),
        "versions": versions(*packages),
        "commit": commit(),
        "rows": list(rows),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
