"""Names of results that the index hasn't taken yet: receives them one by one, hands on after a start what is open.

A result of /gemm is answered before its row is committed: that waits until the result is written, which one that is
replaced before never is. A line in this file, which outlives the process as the page cache does, says meanwhile what
the name means, so that a front which dies leaves a name that answers "lost" rather than what it meant before.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from service.store.index import ContentRow, NameRow

#: A longer file is replaced by one with what is open.
MOST_BYTES = 1 << 20

Note = tuple[ContentRow, NameRow]
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Notes:
    """Lines of one file: a JSON pair of rows, of which a name's last counts, or the id of a content in the index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._nbytes = 0
        self._most = MOST_BYTES
        self._open: dict[tuple[str, str], tuple[str, bytes]] = {}

    def open(self) -> list[Note]:
        """Open the file; what it says that the index may not know, in order. Raises OSError."""
        self._file = os.open(self._path, _FLAGS, 0o600)
        self._nbytes = os.fstat(self._file).st_size
        found: dict[tuple[str, str], Note] = {}
        names: dict[str, tuple[str, str]] = {}
        for line in os.pread(self._file, self._nbytes, 0).split(b"\n"):
            if not line.startswith(b"["):
                id_ = line.decode("ascii", "replace")
                key = names.get(id_)
                if key in found and found[key][0].id == id_:
                    del found[key]
                continue
            try:
                row, name = msgspec.json.decode(line)
            except msgspec.DecodeError:  # the machine died while it was written
                continue
            row[5] = tuple(row[5])
            note = ContentRow(*row), NameRow(*name)
            key = names[note[0].id] = note[1].owner, note[1].name
            found.pop(key, None)
            found[key] = note
        self._open = {key: (note[0].id, _line(*note)) for key, note in found.items()}
        return list(found.values())

    def add(self, row: ContentRow, name: NameRow) -> None:
        """The name means this from now on. Raises OSError."""
        line = _line(row, name)
        self._write(line)
        self._open[name.owner, name.name] = row.id, line
        self._tidy()

    def drop(self, name: NameRow) -> None:
        """The index knows what the name means. Raises OSError."""
        key = name.owner, name.name
        if key in self._open and self._open[key][0] == name.content:
            del self._open[key]
            self._write(name.content.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _tidy(self) -> None:
        if self._nbytes <= self._most:
            return
        data = b"".join(line for _, line in self._open.values())
        new = self._path.with_name(self._path.name + ".new")
        file = os.open(new, _FLAGS | os.O_TRUNC, 0o600)
        try:
            if os.write(file, data) == len(data):
                os.replace(new, self._path)
                file, self._file = self._file, file
                self._nbytes = len(data)
        finally:
            os.close(file)
        self._most = max(MOST_BYTES, 2 * self._nbytes)

    def _write(self, line: bytes) -> None:
        written = os.write(self._file, line)
        self._nbytes += written
        if written < len(line):  # a full disk: end the line, so that it is no other's beginning
            os.write(self._file, b"\n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(row: ContentRow, name: NameRow) -> bytes:
    content = (row.id, row.owner, row.name, row.etag, row.dtype, row.shape, row.nbytes, row.whole)
    return (
        msgspec.json.encode((content, (name.owner, name.name, name.content, name.created, name.expires)))
        + b"\n"
    )
