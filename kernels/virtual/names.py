"""Names of barriers: receives the source line that initializes one, hands on what the kernel calls it."""

from __future__ import annotations

import linecache
import re
from pathlib import Path

from kernels.virtual.ptx import Source

PACKAGE = Path(__file__).resolve().parents[1]
_INIT = re.compile(r"(?:mbarrier_)?init\w*\(\s*(?:self\.)?([A-Za-z_]\w*)")


def barrier_in_source(source: Source | None) -> str | None:
    """The first argument of the call on that line, such as "tma2mma"."""
    if source is None:
        return None
    match = _INIT.search(linecache.getline(_here(source.file), source.line))
    return match.group(1) if match else None


def _here(file: str) -> str:
    """The file; of one of this package that was compiled elsewhere, this package's own."""
    own = PACKAGE / file.rpartition(f"/{PACKAGE.name}/")[2]
    return file if Path(file).is_file() or not own.is_file() else str(own)
