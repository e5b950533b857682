"""One version of a tensor and who needs it: receives a row, hands on holds (it stays readable) and pins (in
the arena as well).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from service.arena import Slot
from service.messages import Operand
from service.store import files
from service.store.index import ContentRow
from service.store.memory import Resident

Data = Slot | bytes | bytearray | memoryview


def tensor_of(owner: str, name: str, etag: str) -> str:
    """The name that a device cache may keep a content under."""
    return f"{owner}/{name}@{etag}"


class Content:
    """A tensor that never changes. `needs` counts names, keepers and holds; at zero it goes, file and memory.
    `keepers` are those of them that are jobs.

    `loading` and `writing` are what is being done about it, once for all who wait. `filed`: there may be a file.
    `data_start` is where the data begins in it, `disk_bytes` its size.
    """

    __slots__ = ("data_start", "disk_bytes", "filed", "keepers", "loading", "lost", "needs", "row", "writing")

    def __init__(self, row: ContentRow) -> None:
        self.row = row
        self.filed = row.whole
        self.data_start = len(files.header(row.dtype, row.shape))
        self.disk_bytes = self.data_start + row.nbytes
        self.needs = 0
        self.keepers = 0
        self.lost = False
        self.loading: asyncio.Task[None] | None = None
        self.writing: asyncio.Task[None] | None = None

    @property
    def tensor(self) -> str:
        """The name that a device cache may keep it under."""
        return tensor_of(self.row.owner, self.row.name, self.row.etag)


class Hold:
    """Keeps a content readable; not in memory. Release it once; `drop` is told."""

    __slots__ = ("_drop", "content")

    def __init__(self, content: Content, drop: Callable[[Content], None]) -> None:
        self._drop: Callable[[Content], None] | None = drop
        self.content = content
        content.needs += 1

    def release(self) -> None:
        """Let the content go; again is no harm."""
        drop, self._drop = self._drop, None
        if drop is not None:
            drop(self.content)


class Pin:
    """Keeps a content in the arena, at `operand`. Release it once the bytes aren't read any more."""

    __slots__ = ("_hold", "_resident", "operand")

    def __init__(self, hold: Hold, resident: Resident) -> None:
        row = hold.content.row
        self._hold = hold
        self._resident: Resident | None = resident
        resident.users += 1
        self.operand = Operand(
            resident.slot.offset, row.nbytes, row.dtype, row.shape, tensor=hold.content.tensor
        )

    @property
    def etag(self) -> str:
        """The content's hash."""
        return self._hold.content.row.etag

    def view(self) -> memoryview:
        """The tensor's bytes."""
        assert self._resident is not None, "pin was released"
        return self._resident.slot.view(self.operand.nbytes)

    def release(self) -> None:
        """Let the memory and the content go; again is no harm."""
        if self._resident is not None:
            self._resident.users -= 1
            self._resident = None
            self._hold.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Source:
    """Where a new tensor's bytes come from; inside a `with` block its slot stays."""

    def __init__(self, data: Data, start: int, nbytes: int) -> None:
        self.slot = data.hold() if isinstance(data, Slot) else None
        self.start = start
        self.nbytes = nbytes
        whole = data.view(start + nbytes) if isinstance(data, Slot) else memoryview(data).cast("B")
        self.view = whole[start : start + nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.slot is not None:
            self.slot.release()
