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
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "commit": _commit(),
        **more,
        "rows": list(rows),
    }


def _versions() -> Iterable[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec is not None else Path(sys.argv[0]).name


def _commit() -> str:
    """GEMM_COMMIT, for a tree carried elsewhere, else git's; "+" marks uncommitted changes."""
    if named := os.environ.get("GEMM_COMMIT"):
        return named
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
