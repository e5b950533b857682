"""POSIX shared memory of clients on this host: receives a key, hands on its bytes by pread and pwrite.

It is never mapped: a client may truncate its region at any time, which makes a short read here and would be
SIGBUS in a mapping. Only keys of the allow-list are opened, and only regular files of /dev/shm, never through a link.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any

from service.decode import Bound
from service.errors import ServiceError
from service.inference.regions import to_end

KIND = "system"
FOLDER = "/dev/shm"

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,253}")
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
#: Copies shorter than this take less time than to hand them over to a thread.
_SHORT = 1 << 18


def allowed(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether the allow-list has the key, by name or by a beginning that ends with `*`."""
    return any(
        key.startswith(pattern[:-1]) if pattern.endswith("*") else key == pattern for pattern in patterns
    )


class SystemMemory:
    """A part of a region in /dev/shm."""

    kind = KIND

    def __init__(self, fd: int, key: str, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = fd
        self._key = key
        self._offset = offset

    @classmethod
    async def open(
        cls, key: str, offset: int, nbytes: int, patterns: tuple[str, ...], folder: str = FOLDER
    ) -> SystemMemory:
        """The region's bytes [offset, offset + nbytes)."""
        name = key.removeprefix("/")
        if not _KEY.fullmatch(name) or not allowed(name, patterns):
            raise _wrong("key: not a name that the setting shared_memory_keys allows", field="key")
        if nbytes == 0:
            raise _wrong("byte_size: a region has 1 byte or more", field="byte_size")
        try:
            fd = os.open(f"{folder}/{name}", _FLAGS)
        except OSError:
            raise _wrong(f"key: shared memory {key!r} can't be opened", field="key") from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise _wrong(f"key: shared memory {key!r} can't be opened", field="key")
        if offset > status.st_size or nbytes > status.st_size - offset:
            os.close(fd)
            raise _wrong(
                f"byte_size: {nbytes} bytes at offset {offset} pass the end of shared memory {key!r}",
                field="byte_size",
            )
        return cls(fd, key, offset, nbytes)

    def told(self) -> dict[str, Any]:
        """Its status."""
        return {"key": self._key, "offset": self._offset, "byte_size": self.nbytes}

    async def read(self, offset: int, target: Bound) -> None:
        """Fill the operand."""
        view = target.view()
        if len(view) < _SHORT:
            self._read(offset, view)
        else:
            await to_end(lambda: self._read(offset, view))

    async def write(self, offset: int, source: Bound) -> None:
        """Copy the result."""
        view = source.view()
        if len(view) < _SHORT:
            self._write(offset, view)
        else:
            await to_end(lambda: self._write(offset, view))

    async def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def _read(self, offset: int, view: memoryview) -> None:
        at = 0
        while at < len(view):
            try:
                n = os.preadv(self._fd, [view[at:]], self._offset + offset + at)
            except OSError:
                n = 0
            if not n:
                raise self._shrunk()
            at += n

    def _write(self, offset: int, view: memoryview) -> None:
        # A write past the end would make the client's region grow, which is not ours to do.
        if os.fstat(self._fd).st_size < self._offset + offset + len(view):
            raise self._shrunk()
        at = 0
        while at < len(view):
            try:
                n = os.pwritev(self._fd, [view[at:]], self._offset + offset + at)
            except OSError:
                n = 0
            if not n:
                raise self._shrunk()
            at += n

    def _shrunk(self) -> ServiceError:
        return _wrong(
            f"shared memory {self._key!r} is smaller than it was when it was registered",
            field="shared_memory_region",
        )


def _wrong(detail: str, *, field: str) -> ServiceError:
    return ServiceError("invalid", detail, field=field)
