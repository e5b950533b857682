"""Writes results files: receives rows, hands on a JSON file with how they came about."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def write(path: Path, what: str, rows: Iterable[dict[str, Any]], **more: Any) -> None:
    """Write a file of benchmarks/results; this computer is its machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(what, rows, **more), indent=1, ensure_ascii=False) + "\n")


def document(what: str, rows: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What stands in it; `more` is added, or stands in the place of what is known here."""
    return {
        "what": what,
        "machine": {"name": "cpu", "system": platform.release(), "cores": len(os.sched_getaffinity(0))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(),
        "versions": versions(*_PACKAGES),
        "commit": commit(),
        **more,
        "rows": list(rows),
    }


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
    """How this process was started, as one types it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name
    return " ".join(["python", "-m", module, *sys.argv[1:]])


def commit() -> str:
    """GEMM_COMMIT, for a tree carried elsewhere, else git's; "+" marks uncommitted changes."""
    if named := os.environ.get("GEMM_COMMIT"):
        return named
    run = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
