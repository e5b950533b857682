"""The tensor store: receives tensors by owner and name, hands on pins: operands in the arena, kept readable.

Disk is the truth: a tensor is there once its file, its folder and its row are synced. A content (one version
of a tensor, never changed) lives as long as a name, a job or a pin needs it, so what was replaced or deleted
stays readable to who pinned it.

All state belongs to the front's loop; files are read and written in a small pool, rows in the database's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from service.arena import Slots
from service.database import Database
from service.errors import ServiceError
from service.folder import DataFolder, FolderBroken
from service.store import index
from service.store.conditions import UNCONDITIONAL, Conditions
from service.store.content import Content, Data, Hold, Pin, Source
from service.store.contents import Contents
from service.store.effects import Effects
from service.store.index import NameRow
from service.store.names import Named, Names, valid

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0


class StoreSettings(Protocol):
    """The settings that the store reads."""

    @property
    def data(self) -> Path: ...
    @property
    def store_memory_bytes(self) -> int: ...
    @property
    def store_disk_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """What may be told of a stored tensor. `etag` is the content's hash, unquoted."""

    name: str
    etag: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    created: float
    expires: float | None
    durable: bool


@dataclass(frozen=True, slots=True)
class Binding:
    """A name that is to mean a held content, for `ttl` seconds if that isn't None."""

    name: str
    hold: Hold
    ttl: float | None


class TensorStore:
    """See the module. `forget(*tensors)` is told what a device cache may drop."""

    def __init__(
        self,
        settings: StoreSettings,
        slots: Slots,
        forget: Callable[..., None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = DataFolder(Path(settings.data).expanduser())
        self.database = Database(self.folder.database)
        self.effects = Effects()
        self.contents = Contents(
            self.folder,
            self.database,
            self.effects,
            slots,
            memory_budget=settings.store_memory_bytes,
            disk_budget=settings.store_disk_bytes,
            forget=forget,
        )
        self.clock = clock
        self._names: Names[Content] = Names()
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._sweeper: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Lock the folder, read the index, reclaim what a front that died left half done.

        FolderTaken where another front holds the folder; FolderBroken where the index can't be read.
        """
        await self.effects.in_pool(self._open)
        await self.database.prepare(index.prepare)
        contents, names, keeps = await self.database.read(index.load)
        await self.contents.restore(contents)
        for row in names:
            content = self.contents.get(row.content)
            content.needs += 1
            self._names.set(Named(row.owner, row.name, content, row.created, row.expires))
        for _, id_ in keeps:
            self.contents.get(id_).needs += 1
        if self.folder.writable:
            self._sweeper = asyncio.create_task(self._sweep_often())

    def _open(self) -> None:
        self.folder.open()
        if not self.folder.writable:
            logger.warning("the data folder %s can't be written: serving what it holds", self.folder.path)
        try:
            self.database.open(writable=self.folder.writable)
        except sqlite3.Error as error:
            self.folder.close()
            raise FolderBroken(f"the database {self.folder.database} can't be opened: {error}") from error

    async def close(self) -> None:
        """Finish the writes that go on, then let the folder go."""
        self.contents.hurry()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.effects.settle()
        await asyncio.to_thread(self.database.close)
        self.effects.close()
        self.folder.close()

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep(self.clock())
            except ServiceError as error:
                logger.warning("the store's sweep will try again: %s", error.detail)

    async def sweep(self, now: float) -> None:
        """Forget what expired; try again to write what the disk refused."""
        for named in list(self._names.expired(now)):
            await self._unbind(named)
        await self.contents.retry()

    def reclaim(self, nbytes: int) -> int:
        """Evict until the arena has a piece of `nbytes`, as far as that helps; returns the bytes freed."""
        return self.contents.memory.reclaim(nbytes)

    def bytes_by_tier(self) -> dict[str, float]:
        """Bytes of stored tensors in memory (the arena) and on disk."""
        return {"memory": float(self.contents.memory.nbytes), "disk": float(self.contents.disk_bytes)}

    # Lookups

    def head(self, owner: str, name: str) -> Entry:
        """What the name means. ServiceError not_found, or lost."""
        return _entry(self._find(owner, name))

    def entries(self, owner: str, after: str, limit: int) -> tuple[list[Entry], str | None]:
        """A page of the owner's tensors by name; and what to pass as `after` for the next."""
        page, following = self._names.page(owner, after, limit, self.clock())
        return [_entry(named) for named in page if not named.content.lost], following

    def exists(self, owner: str, name: str) -> bool:
        """Whether the name means a tensor."""
        return self._etag(owner, name) is not None

    def check(self, owner: str, name: str, conditions: Conditions) -> None:
        """Refuse early what `put` would refuse: precondition_failed."""
        conditions.check(self._etag(owner, name))

    def hold(self, owner: str, name: str) -> Hold:
        """Keep what the name means now readable. ServiceError not_found, or lost."""
        return self.contents.hold(self._find(owner, name).content)

    async def pin(self, owner: str, name: str) -> Pin:
        """Bring what the name means now into the arena and keep it there. not_found, lost, no_room."""
        hold = self.hold(owner, name)
        try:
            return await self.contents.load(hold)
        finally:
            hold.release()

    def _etag(self, owner: str, name: str) -> str | None:
        named = self._names.get(owner, name, self.clock())
        return None if named is None or named.content.lost else named.content.row.etag

    def _find(self, owner: str, name: str) -> Named[Content]:
        named = self._names.get(owner, name, self.clock())
        if named is None:
            raise ServiceError("not_found", f"there is no tensor {name!r}")
        if named.content.lost:
            raise ServiceError("lost", f"the tensor {name!r} was lost before it was durable")
        return named

    # Changes

    async def put(
        self,
        owner: str,
        name: str,
        source: Data,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        start: int = 0,
        durable: bool = True,
        ttl: float | None = None,
        conditions: Conditions = UNCONDITIONAL,
        share: int | None = None,
    ) -> Entry:
        """Store `nbytes` from `start` of `source` on under `name`; with `durable` once all is synced.

        Without, the entry says durable=False, the file follows, and until then the tensor is in the arena
        alone. A slot stays the caller's to release; the store may keep it, as memory of state "tensor". The
        work goes on if the caller is cancelled. `share` bounds the bytes that the owner keeps. Refused:
        invalid, precondition_failed, quota, no_room, read_only.
        """
        if not valid(name):
            raise ServiceError("invalid", f"{name!r} can't be a tensor's name", field="name")
        self.check(owner, name, conditions)
        self.contents.check_share(owner, nbytes, share)
        hold = self.contents.reserve(owner, name, nbytes, dtype, shape)
        put = self._put_durable if durable else self._put_soon
        return await self.effects.to_the_end(
            put(Binding(name, hold, ttl), Source(source, start, nbytes), conditions)
        )

    async def _put_durable(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        try:
            with source:
                await self.contents.write(binding.hold.content, source)
            return await self._bind(binding, conditions)
        finally:
            binding.hold.release()

    async def _put_soon(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        try:
            with source:
                await self.contents.keep(binding.hold.content, source)
            entry = await self._bind(binding, conditions, soft=True)
            self.effects.spawn(self.contents.write_back_soon(binding.hold.content))
            return entry
        finally:
            binding.hold.release()

    async def delete(self, owner: str, name: str, conditions: Conditions = UNCONDITIONAL) -> None:
        """Forget the name. not_found, precondition_failed."""
        self.check(owner, name, conditions)
        named = self._names.get(owner, name, self.clock())
        if named is None:
            raise ServiceError("not_found", f"there is no tensor {name!r}")
        await self.effects.to_the_end(self._unbind(named))

    async def _bind(self, binding: Binding, conditions: Conditions, *, soft: bool = False) -> Entry:
        """Let the name mean the held content, if the conditions still hold."""
        row = binding.hold.content.row
        async with self.binding(row.owner, [binding]) as (name,):
            self.check(row.owner, binding.name, conditions)

            def commit(db: sqlite3.Connection) -> None:
                index.add(db, row)
                index.bind(db, name)

            await self.database.write(commit, soft=soft)
        return _entry(Named(name.owner, name.name, binding.hold.content, name.created, name.expires))

    @contextlib.asynccontextmanager
    async def binding(self, owner: str, bindings: Sequence[Binding]) -> AsyncIterator[list[NameRow]]:
        """Lock the names and yield their rows, to be committed in the block; then they mean the contents."""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({binding.name for binding in bindings}):
                await stack.enter_async_context(self._lock(owner, name))
            now = self.clock()
            rows = [
                NameRow(owner, b.name, b.hold.content.row.id, now, None if b.ttl is None else now + b.ttl)
                for b in bindings
            ]
            yield rows
            for binding, row in zip(bindings, rows, strict=True):
                content = binding.hold.content
                content.needs += 1
                before = self._names.set(Named(owner, row.name, content, now, row.expires))
                if before is not None:
                    self.contents.drop(before)

    async def _unbind(self, named: Named[Content]) -> None:
        async with self._lock(named.owner, named.name):
            id_ = named.content.row.id
            await self.database.write(lambda db: index.unbind(db, named.owner, named.name, id_))
            if self._names.remove(named):
                self.contents.drop(named.content)

    def _lock(self, owner: str, name: str) -> asyncio.Lock:
        return self._locks.setdefault((owner, name), asyncio.Lock())

    # For jobs, which keep contents besides names; their rows are in the job's own transactions

    async def save(
        self,
        owner: str,
        source: Data,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        name: str = "",
    ) -> Hold:
        """Write a file that no name points to, for who keeps it (`index.keep` with `hold.content.row`)."""
        hold = self.contents.reserve(owner, name, nbytes, dtype, shape)
        saving = self.effects.spawn(self._save(hold, Source(source, 0, nbytes)))
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            saving.add_done_callback(_release_unclaimed)
            raise

    async def _save(self, hold: Hold, source: Source) -> Hold:
        try:
            with source:
                await self.contents.write(hold.content, source)
        except BaseException:
            hold.release()
            raise
        return hold

    def kept(self, holds: Iterable[Hold]) -> None:
        """These contents have a keeper's row now."""
        for hold in holds:
            hold.content.needs += 1

    def unkept(self, contents: Iterable[str]) -> None:
        """A keeper's rows for these contents are gone."""
        for id_ in contents:
            self.contents.drop(self.contents.get(id_))

    def hold_content(self, content: str) -> Hold:
        """Keep a content readable by its id, which its keeper knows. ServiceError lost."""
        return self.contents.hold(self.contents.get(content))


def _release_unclaimed(saving: asyncio.Task[Hold]) -> None:
    """Who asked for the hold has left."""
    if not saving.cancelled() and saving.exception() is None:
        saving.result().release()


def _entry(named: Named[Content]) -> Entry:
    row = named.content.row
    return Entry(
        named.name, row.etag, row.dtype, row.shape, row.nbytes, named.created, named.expires, row.whole
    )
