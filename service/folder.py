"""The data folder: receives its path, hands on a locked folder, durable file operations and clear refusals.

One front holds the folder by a lock that the kernel drops with the process, however it ends. A folder that
can't be written is opened for reading: what it holds can be read, and what needs it written is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import ServiceError, short

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_SQLITE_PRIMARY = 0xFF  # an extended SQLite result code keeps its primary one in the low byte


class FolderTaken(OSError):
    """Another front holds the data folder: start-up stops."""


class FolderBroken(OSError):
    """The data folder can't be made, or its database not opened: start-up stops."""


def refusal(error: OSError | sqlite3.Error) -> ServiceError:
    """What a client is told when the disk refuses: no room, or can't be written."""
    if (soon := short(error)) is not None:
        return soon
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return ServiceError("no_room", f"the data folder's disk is full ({error.strerror})")
        return ServiceError("read_only", f"the data folder can't be written ({error.strerror})")
    code = getattr(error, "sqlite_errorcode", 0) & _SQLITE_PRIMARY
    if code == sqlite3.SQLITE_FULL:
        return ServiceError("no_room", "the data folder's disk is full")
    return ServiceError("read_only", f"the data folder's database can't be written ({error})")


@contextmanager
def refusing() -> Iterator[None]:
    """Turn what the disk refuses inside the block into a ServiceError."""
    try:
        yield
    except OSError as error:
        raise refusal(error) from error
    except (sqlite3.OperationalError, sqlite3.DatabaseError) as error:
        raise refusal(error) from error


def sync_folder(path: Path) -> None:
    """Make renames and unlinks in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class DataFolder:
    """`path` with its lock. `writable` is false where the system refuses to write there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = path / "tensors"
        self.database = path / "service.db"
        self.writable = True
        self._lock: int | None = None

    def open(self) -> None:
        """Make the folder (mode 0700) and lock it; raises FolderTaken where another front holds it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.tensors.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise FolderBroken(
                    f"data = {str(self.path)!r}: can't be the data folder: {error.strerror}"
                ) from error
            self.writable = False
            return
        self._take(self._lock)
        self._probe()

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise FolderTaken(
                f"the data folder {self.path} is held by another front (process {holder}); "
                "stop it, or give this one a folder of its own (setting data)"
            ) from None
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a full disk: the lock holds without the number
            if error.errno not in _FULL:
                raise

    def _probe(self) -> None:
        """A remounted or foreign folder may let the lock be opened and yet take no file."""
        self.writable = os.access(self.path, os.W_OK) and os.access(self.tensors, os.W_OK)

    def close(self) -> None:
        """Let the folder go."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
