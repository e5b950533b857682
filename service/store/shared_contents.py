"""Versions of tensors that fronts share, as one front sees them: receives rows and bytes, hands on holds and pins.

The database knows all contents and says which may go; here are those that this front holds, has in its arena, or is
about to write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from service.errors import ServiceError
from service.fronts import ALIVE
from service.session import Session
from service.store.content import Content, Hold, Pin
from service.store.contents import Contents, lost
from service.store.index import ContentRow

#: Seconds between looks at, and most seconds of waiting for, a result that another front is writing.
UNWRITTEN_POLL, UNWRITTEN_PATIENCE = 0.05, 5.0


class SharedContents(Contents):
    """Contents that this front has to do with: held, in its arena, or on their way. The database knows all."""

    lease: float

    def __init__(self, *args: Any, lease: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lease = lease
        self._fresh: set[str] = set()
        self._lost: set[str] = set()
        #: Owners whose new contents are noted, and bytes of those by id.
        self._noted: dict[object, tuple[str, dict[str, int]]] = {}

    def reserve(
        self, owner: str, name: str, nbytes: int, dtype: str, shape: tuple[int, ...], *, id_: str = ""
    ) -> Hold:
        """As ever; the database doesn't know it yet."""
        hold = super().reserve(owner, name, nbytes, dtype, shape, id_=id_)
        self._fresh.add(hold.content.row.id)
        for whose, noted in self._noted.values():
            if whose == owner:
                noted[hold.content.row.id] = nbytes
        return hold

    def known(self, content: Content) -> None:
        """The database knows it."""
        self._fresh.discard(content.row.id)

    @contextlib.contextmanager
    def noting(self, owner: str) -> Iterator[dict[str, int]]:
        """Bytes by id of the owner's contents that the database doesn't know yet, and of those made in the block."""
        found = (self._contents[id_] for id_ in self._fresh)
        noted = {content.row.id: content.row.nbytes for content in found if content.row.owner == owner}
        key = object()
        self._noted[key] = owner, noted
        try:
            yield noted
        finally:
            del self._noted[key]

    def of(self, row: ContentRow, *, lost: bool = False) -> Content:
        """The content of a row of the database."""
        content = self._contents.get(row.id)
        if content is None:
            content = self._contents[row.id] = Content(row)
        elif row.whole and not content.row.whole:
            content.row = replace(content.row, whole=True)
        content.lost = row.id in self._lost or (lost and row.id not in self._unwritten)
        self.known(content)
        return content

    def charge_as(self, by_owner: dict[str, int]) -> None:
        """The bytes that all fronts keep, as the database has just told."""
        self.bytes_by_owner = by_owner
        self.disk_bytes = sum(by_owner.values())

    def drop(self, content: Content) -> None:
        """One need less. The arena keeps it while there is room; whether its object goes, the database says."""
        content.needs -= 1
        id_ = content.row.id
        if content.needs or id_ in self._unwritten:
            return
        if id_ in self._fresh:
            self._fresh.discard(id_)
            self.forget(content)
            if not self.closing:  # else it is found as an orphan
                self.effects.spawn(self._note(id_))
        elif self.memory.peek(id_) is None:
            self.forget(content)

    def forget(self, content: Content) -> None:
        """Keep nothing of it here."""
        self._contents.pop(content.row.id, None)
        self._unwritten.pop(content.row.id, None)
        self.memory.remove(content.row.id)
        self.abandon(content.tensor)

    async def _note(self, id_: str) -> None:
        """The object of a content that came to nothing may go, unless the database took it after all."""
        with contextlib.suppress(ServiceError):  # found as an orphan
            await self.database.write(lambda db: note_orphans(db, [id_]))

    def tidy(self) -> None:
        """Forget what is neither held nor in the arena."""
        for id_, content in list(self._contents.items()):
            if not content.needs and self.memory.peek(id_) is None:
                del self._contents[id_]

    async def load(self, hold: Hold) -> Pin:
        """As ever, after what another front still writes."""
        if self.memory.peek(hold.content.row.id) is None:
            await self._settled(hold.content)
        return await super().load(hold)

    async def write_back(self, content: Content) -> None:
        """As ever; what another front has, that one writes."""
        if content.row.id in self._unwritten:
            await super().write_back(content)
        else:
            await self._settled(content)

    async def _read_into(self, content: Content, start: int, view: memoryview) -> None:
        await self._settled(content)
        await super()._read_into(content, start, view)

    async def _settled(self, content: Content) -> None:
        """Wait until the file is there. ServiceError lost, or unavailable where that takes too long."""
        end = time.monotonic() + UNWRITTEN_PATIENCE
        while not content.row.whole:
            if content.lost:
                raise lost(content)
            state = await self.database.read(lambda db: written_state(db, content.row.id, self.lease))
            if state == "whole":
                content.row = replace(content.row, whole=True)
            elif state == "lost":
                content.lost = True
            elif time.monotonic() > end:
                raise ServiceError(
                    "unavailable", "another front hasn't written this tensor yet", retry_after=1.0
                )
            else:
                await asyncio.sleep(UNWRITTEN_POLL)

    def _lose_only_copy(self, content: Content) -> None:
        super()._lose_only_copy(content)
        self._lost.add(content.row.id)

    async def tell_lost(self) -> None:
        """Let others know what this front had alone, and lost."""
        if gone := list(self._lost):
            await self.database.write(
                lambda db: db.executemany("DELETE FROM unwritten WHERE content = ?", [(id_,) for id_ in gone])
            )
            self._lost.difference_update(gone)


def written_state(db: Session, content: str, lease: float) -> str:
    """Of a content: "whole", "lost", or "unwritten" while a living front has it."""
    row = db.execute(
        f"SELECT whole, EXISTS (SELECT 1 FROM unwritten WHERE content = contents.id AND front IN ({ALIVE})) "
        "FROM contents WHERE id = ?",
        (lease, content),
    ).fetchone()
    if row is None or not (row[0] or row[1]):
        return "lost"
    return "whole" if row[0] else "unwritten"


def note_orphans(db: Session, ids: list[str]) -> int:
    """Let objects go that no row names; returns how many."""
    return db.execute(
        "INSERT INTO dropped (content) SELECT id FROM unnest(?::text[]) AS found (id) "
        "WHERE NOT EXISTS (SELECT 1 FROM contents WHERE contents.id = found.id) ON CONFLICT DO NOTHING",
        (ids,),
    ).rowcount
