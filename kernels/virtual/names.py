"""Names of barriers: receives the source line that initializes one, hands on what the kernel calls it."""

from __future__ import annotations

import linecache
import re

from kernels.virtual.ptx import Source

_INIT = re.compile(r"(?:mbarrier_)?init\w*\(\s*(?:self\.)?([A-Za-z_]\w*)")


def barrier_in_source(source: Source | None) -> str | None:
    """The first argument of the call on that line, such as "tma2mma"."""
    if source is None:
        return None
    match = _INIT.search(linecache.getline(source.file, source.line))
    return match.group(1) if match else None
