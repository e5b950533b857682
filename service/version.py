"""Which release this is: receives nothing, hands on the version, of an installation or of the sources beside it."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path

NAME = "gemm-service"
_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def version() -> str:
    """Of the package that is installed; run from its sources, what pyproject.toml says."""
    try:
        return installed(NAME)
    except PackageNotFoundError:
        pass
    try:
        return str(tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["version"])
    except FileNotFoundError:
        return "unknown"
