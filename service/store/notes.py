"""Names of results that the index hasn't taken yet: receives them one by one, hands on after a start what is open.

A result of /gemm is answered before its row is committed. A line in this file, which outlives the process as the
page cache does, says meanwhile what the name means, so that a front which dies in between leaves a name that
answers "lost" rather than what it meant before.
"""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path

import msgspec

from service.store.index import ContentRow, NameRow

#: The file is cut when it is longer and nothing in it is open.
MOST_BYTES = 1 << 20

Note = tuple[ContentRow, NameRow]


class Notes:
    """Lines of one file: a JSON pair of rows, or the id of a content that the index has now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._nbytes = 0
        self._open: set[str] = set()

    def open(self) -> list[Note]:
        """Open the file; what it says that the index may not know, in order. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._path, flags, 0o600)
        self._nbytes = os.fstat(self._file).st_size
        found: dict[str, Note] = {}
        for line in os.pread(self._file, self._nbytes, 0).split(b"\n"):
            if not line.startswith(b"["):
                found.pop(line.decode("ascii", "replace"), None)
                continue
            try:
                row, name = msgspec.json.decode(line)
            except msgspec.DecodeError:  # the machine died while it was written
                continue
            row[5] = tuple(row[5])
            found[row[0]] = ContentRow(*row), NameRow(*name)
        self._open = set(found)
        return list(found.values())

    def add(self, row: ContentRow, name: NameRow) -> None:
        """The name means this from now on. Raises OSError."""
        self._write(msgspec.json.encode((astuple(row), astuple(name))))
        self._open.add(row.id)

    def drop(self, content: str) -> None:
        """The index knows. Raises OSError."""
        self._open.discard(content)
        if not self._open and self._nbytes > MOST_BYTES:
            os.ftruncate(self._file, 0)
            self._nbytes = 0
        else:
            self._write(content.encode())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, line: bytes) -> None:
        line += b"\n"
        written = os.write(self._file, line)
        self._nbytes += written
        if written < len(line):  # a full disk: end the line, so that it is no other's beginning
            os.write(self._file, b"\n")
            raise OSError(28, os.strerror(28))
