"""The tensor store of one front: receives tensors, keeps them in files of the data folder and rows in SQLite.

The folder is this front's alone, so all names are in memory; disk is the truth: a tensor is there once its
file, its folder and its row are synced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from service import audit
from service.arena import Slots
from service.database import Database
from service.errors import ServiceError
from service.folder import DataFolder, FolderBroken, refusing
from service.session import Session
from service.store import files, index
from service.store.conditions import Conditions
from service.store.content import Content, Hold, Source
from service.store.contents import Contents
from service.store.effects import Effects
from service.store.files import FolderFiles
from service.store.index import NameRow
from service.store.names import Named, Names
from service.store.notes import Notes
from service.store.share import Stock
from service.store.store import Binding, Entry, StoreSettings, TensorStore, entry_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Untold:
    """A result and its name, which in the index still means `before`."""

    content: Content
    name: NameRow
    before: Content | None


class LocalStore(TensorStore):
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
        effects = Effects()
        self.files = FolderFiles(self.folder.tensors, effects)
        contents = Contents(
            self.files,
            self.database,
            effects,
            slots,
            memory_budget=settings.store_memory_bytes,
            disk_budget=settings.store_disk_bytes,
            forget=forget,
        )
        super().__init__(self.database, effects, contents, clock)
        self._names: Names[Content] = Names()
        #: Names whose meaning the index hasn't heard of.
        self._untold: dict[tuple[str, str], _Untold] = {}
        contents.before_write = self._tell_of
        self._notes = Notes(self.folder.path / "results.notes")
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    # Life

    async def start(self) -> None:
        """Lock the folder, read the index, reclaim what a front that died left half done.

        FolderTaken where another front holds the folder; FolderBroken where the index can't be read.
        """
        await self.effects.in_pool(self._open)
        await self.database.prepare(index.prepare)
        if self.folder.writable:
            await self._replay()
        contents, names, keeps = await self.database.read(index.load)
        self.contents.restore(contents, await self._whole({row.id for row in contents}))
        for row in names:
            content = self.contents.get(row.content)
            content.needs += 1
            self._names.set(Named(row.owner, row.name, content, row.created, row.expires))
        for _, id_ in keeps:
            _keep(self.contents.get(id_))
        if self.folder.writable:
            self.sweep_often()

    def _open(self) -> None:
        self.folder.open()
        self.files.writable = self.folder.writable
        if not self.folder.writable:
            logger.warning("the data folder %s can't be written: serving what it holds", self.folder.path)
        try:
            self.database.open(writable=self.folder.writable)
        except sqlite3.Error as error:
            self.folder.close()
            raise FolderBroken(f"the database {self.folder.database} can't be opened: {error}") from error

    async def _replay(self) -> None:
        """Give the index what a front that died had answered before it was committed: those results are lost."""
        open_ones = await self.effects.in_pool(self._notes.open)

        def commit(db: Session) -> None:
            for row, name in open_ones:
                index.add(db, row)
                index.bind(db, name)

        if open_ones:
            await self.database.write(commit)
            for _, name in open_ones:
                self._notes.drop(name)

    async def _whole(self, known: set[str]) -> set[str]:
        """Ids of the contents whose file is there."""
        if not self.folder.writable:
            return await self.effects.in_pool(files.present, self.folder.tensors, known)
        reclaimed, whole = await self.effects.in_pool(files.reclaim, self.folder.tensors, known)
        if reclaimed:
            logger.info("reclaimed %d bytes of unfinished tensors", reclaimed)
        if lost := known - whole:
            logger.warning("%d tensors were lost before they were durable", len(lost))
        await self.database.write(lambda db: index.settle(db, whole))
        return whole

    async def end(self) -> None:
        """Let the folder go."""
        await asyncio.to_thread(self.database.close)
        self._notes.close()
        self.folder.close()

    async def sweep(self, now: float) -> None:
        """Forget what expired; try again to write what the disk refused."""
        for named in list(self._names.expired(now)):
            await self.unbind(named)
            audit.changed("expire", named.content.row, named.name)
        await self.contents.retry()

    # Lookups

    async def find(self, owner: str, name: str) -> Named[Content] | None:
        """What the name means, if anything; lost contents too."""
        return self._names.get(owner, name, self.clock())

    async def entries(self, owner: str, after: str, limit: int) -> tuple[list[Entry], str | None]:
        """A page of the owner's tensors by name; and what to pass as `after` for the next."""
        page, following = self._names.page(owner, after, limit, self.clock())
        return [entry_of(named) for named in page if not named.content.lost], following

    async def hold_content(self, content: str) -> Hold:
        """Keep a content readable by its id, which its keeper knows. ServiceError lost."""
        return self.contents.hold(self.contents.get(content))

    # Shares

    async def stock(self, owner: str, name: str = "") -> Stock:
        """What the owner keeps, with the versions of a name."""
        return self._stock(owner, name)

    def size(self, nbytes: int, dtype: str, shape: tuple[int, ...]) -> int:
        """Bytes of its file."""
        return len(files.header(dtype, shape)) + nbytes

    def _stock(self, owner: str, name: str = "") -> Stock:
        arrivals = self.contents.arrivals.get(owner, {})
        untold = (one for whose, one in self._untold if whose == owner)
        versions = {
            one: {
                content.row.id: content.disk_bytes
                for content in (*self._meant(owner, one), *arrivals.get(one, ()))
                if not content.lost and not content.keepers
            }
            for one in {name, *arrivals, *untold}
        }
        return Stock(self.contents.bytes_by_owner.get(owner, 0), versions)

    def _meant(self, owner: str, name: str) -> Iterator[Content]:
        """What the name means, expired or not; and what it still means for the index."""
        named, untold = self._names.get(owner, name), self._untold.get((owner, name))
        if named is not None:
            yield named.content
        if untold is not None and untold.before is not None:
            yield untold.before

    # Changes

    async def put_soon(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        """Nothing here waits but for the name, so who leaves leaves nothing half done."""
        return await self._put_soon(binding, source, conditions)

    async def bind(self, binding: Binding, conditions: Conditions, *, soft: bool = False) -> Entry:
        """Let the name mean the held content, if the conditions still hold."""
        if soft:
            return await self._bind_soon(binding, conditions)
        row = binding.hold.content.row
        async with self.binding(row.owner, [binding]) as (name,):
            await self.check(row.owner, binding.name, conditions)
            self._check_share(binding)

            def commit(db: Session) -> None:
                index.add(db, row)
                index.bind(db, name)

            await self.database.write(commit)
        return entry_of(Named(name.owner, name.name, binding.hold.content, name.created, name.expires))

    def _check_share(self, binding: Binding) -> None:
        """ServiceError quota where what the name means won't go after all: a job has come to keep it."""
        if binding.bound is not None:
            self._stock(binding.hold.content.row.owner, binding.name).check(binding.bound)

    async def _bind_soon(self, binding: Binding, conditions: Conditions) -> Entry:
        """Let the name mean the held content now. A note tells so until the index does (see `_tell`)."""
        content = binding.hold.content
        row = content.row
        key = row.owner, binding.name
        async with self._lock(*key):
            await self.check(row.owner, binding.name, conditions)
            self._check_share(binding)
            now = self.clock()
            expires = None if binding.ttl is None else now + binding.ttl
            name = NameRow(row.owner, binding.name, row.id, now, expires)
            with refusing():
                self._notes.add(row, name)
            content.needs += 1
            named = Named(row.owner, binding.name, content, now, expires)
            replaced, untold = self._names.set(named), self._untold.get(key)
            self._untold[key] = _Untold(content, name, replaced if untold is None else untold.before)
            if untold is not None:
                self.contents.drop(untold.content)
        return entry_of(named)

    async def _tell_of(self, content: Content) -> None:
        """A result is about to be written: its name must be in the index."""
        key = content.row.owner, content.row.name
        untold = self._untold.get(key)
        if untold is not None and untold.content is content:
            async with self._lock(*key):
                await self._tell(key)

    async def _tell(self, key: tuple[str, str]) -> None:
        """Let the index know what a name means, whose lock is held; to the end, whoever leaves."""
        untold = self._untold.pop(key, None)
        if untold is not None:
            await self.effects.to_the_end(self._commit(untold))

    async def _commit(self, untold: _Untold) -> None:
        content, name, row = untold.content, untold.name, untold.content.row

        def commit(db: Session) -> None:
            index.add(db, row)
            index.bind(db, name)

        try:
            await self.database.write(commit, soft=True)
        except ServiceError as error:
            logger.error("the result %r is lost: %s", name.name, error.detail)
            self.contents.lose(content)
        try:
            self._notes.drop(name)
        except OSError as error:
            logger.error("a note of the result %r stays: %s", name.name, error)
        if untold.before is not None:
            self.contents.drop(untold.before)

    @contextlib.asynccontextmanager
    async def binding(self, owner: str, bindings: Sequence[Binding]) -> AsyncIterator[list[NameRow]]:
        """Lock the names and yield their rows, to be committed in the block; then they mean the contents."""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({binding.name for binding in bindings}):
                await stack.enter_async_context(self._lock(owner, name))
                await self._tell((owner, name))
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

    async def unbind(self, named: Named[Content]) -> None:
        """Forget the name, if it still means this."""
        async with self._lock(named.owner, named.name):
            await self._tell((named.owner, named.name))
            id_ = named.content.row.id
            await self.database.write(lambda db: index.unbind(db, named.owner, named.name, id_))
            if self._names.remove(named):
                self.contents.drop(named.content)

    def _lock(self, owner: str, name: str) -> asyncio.Lock:
        return self._locks.setdefault((owner, name), asyncio.Lock())

    def kept(self, holds: Iterable[Hold]) -> None:
        """These contents have a keeper's row now."""
        for hold in holds:
            _keep(hold.content)

    def unkept(self, contents: Iterable[str]) -> None:
        """A keeper's rows for these contents are gone."""
        for id_ in contents:
            content = self.contents.get(id_)
            content.keepers -= 1
            self.contents.drop(content)


def _keep(content: Content) -> None:
    """A job needs it."""
    content.needs += 1
    content.keepers += 1
