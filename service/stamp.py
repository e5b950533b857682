"""Whether a file is another than before: receives its path, hands on what changes when it is replaced or written."""

from __future__ import annotations

from pathlib import Path


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Time, inode and size, links followed (orchestrators swap links); None where nothing can be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
