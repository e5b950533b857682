"""The tensor store: receives tensors by owner and name, hands on pins: operands in the arena, kept readable.

Disk is the truth: a tensor is there once its file, its folder and its row are synced. The arena holds copies,
least recently used first out. A content (one version of a tensor, never changed) lives as long as a name, a
job or a pin needs it, so what was replaced or deleted stays readable to who pinned it.

All state belongs to the front's loop; files are read and written in a small pool, rows in the database's
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

from service.arena import Slot, Slots
from service.database import Database
from service.errors import ServiceError
from service.folder import DataFolder, refusing
from service.messages import Operand
from service.store import files, index
from service.store.index import ContentRow, NameRow
from service.store.memory import Backing, Memory, Resident
from service.store.names import Named, Names, valid

logger = logging.getLogger(__name__)
T = TypeVar("T")

POOL_THREADS = 4
SWEEP_SECONDS = 5.0
ANY = "*"


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
class Conditions:
    """If-Match and If-None-Match as sets of hashes, {"*"} for any tensor; None where not given."""

    if_match: Collection[str] | None = None
    if_none_match: Collection[str] | None = None

    def check(self, etag: str | None) -> None:
        """ServiceError precondition_failed unless a tensor with `etag` (None: no tensor) meets them."""
        if self.if_match is not None and not _matches(self.if_match, etag):
            raise ServiceError("precondition_failed", "the tensor isn't the one that If-Match names")
        if self.if_none_match is not None and _matches(self.if_none_match, etag):
            raise ServiceError("precondition_failed", "the tensor is one that If-None-Match excludes")


def _matches(tags: Collection[str], etag: str | None) -> bool:
    return etag is not None and (ANY in tags or etag in tags)


UNCONDITIONAL = Conditions()


class Content:
    """One version of a tensor. `needs` counts names, keepers and holds; at zero it goes, file and memory."""

    __slots__ = ("loading", "lost", "needs", "row")

    def __init__(self, row: ContentRow) -> None:
        self.row = row
        self.needs = 0
        self.lost = False
        self.loading: asyncio.Task[None] | None = None

    @property
    def tensor(self) -> str:
        """The name that a device cache may keep it under."""
        return f"{self.row.owner}/{self.row.name}@{self.row.etag}"

    @property
    def data_start(self) -> int:
        """Where the data begins in the file."""
        return len(files.header(self.row.dtype, self.row.shape))

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self.data_start + self.row.nbytes


class Hold:
    """Keeps a content readable; not in memory. Release it once."""

    __slots__ = ("_store", "content")

    def __init__(self, store: TensorStore, content: Content) -> None:
        self._store: TensorStore | None = store
        self.content = content
        content.needs += 1

    def release(self) -> None:
        """Let the content go."""
        if self._store is not None:
            store, self._store = self._store, None
            store._drop(self.content)


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
        """Let the memory and the content go."""
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
        self.memory = Memory(slots, settings.store_memory_bytes, self._evicted_only_copy)
        self.disk_budget = settings.store_disk_bytes
        self.disk_bytes = 0
        self.bytes_by_owner: dict[str, int] = {}
        self.clock = clock
        self._forget = forget
        self._names: Names[Content] = Names()
        self._contents: dict[str, Content] = {}
        self._refused: dict[str, Content] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="store")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._closing = False

    # Life

    async def start(self) -> None:
        """Lock the folder, read the index, reclaim what a front that died left half done.

        FolderTaken where another front holds the folder; sqlite3.Error where the index can't be read.
        """
        await self._in_pool(self._open)
        await self.database.prepare(index.prepare)
        contents, names, keeps = await self.database.read(index.load)
        whole = await self._reclaim({row.id for row in contents})
        for row in contents:
            content = self._contents[row.id] = Content(replace(row, whole=row.id in whole))
            content.lost = not content.row.whole
            if not content.lost:
                self._charge(content, content.disk_bytes)
        for named in names:
            content = self._contents[named.content]
            content.needs += 1
            self._names.set(Named(named.owner, named.name, content, named.created, named.expires))
        for _, id_ in keeps:
            self._contents[id_].needs += 1
        if self.folder.writable:
            self._sweeper = asyncio.create_task(self._sweep_often())

    def _open(self) -> None:
        self.folder.open()
        if not self.folder.writable:
            logger.warning("the data folder %s can't be written: serving what it holds", self.folder.path)
        try:
            self.database.open(writable=self.folder.writable)
        except sqlite3.Error:
            self.folder.close()
            raise

    async def _reclaim(self, known: set[str]) -> set[str]:
        """Delete files that no row names; the ids of the contents whose file is there."""
        if not self.folder.writable:
            return await self._in_pool(files.present, self.folder.tensors, known)
        reclaimed, whole = await self._in_pool(files.reclaim, self.folder.tensors, known)
        if reclaimed:
            logger.info("reclaimed %d bytes of unfinished tensors", reclaimed)
        if lost := known - whole:
            logger.warning("%d tensors were lost before they were durable", len(lost))
        await self.database.write(lambda db: index.settle(db, whole))
        return whole

    async def close(self) -> None:
        """Finish the writes that go on, then let the folder go."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.to_thread(self.database.close)
        self._pool.shutdown()
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
        for content in list(self._refused.values()):
            await self._write_back(content)

    def reclaim(self, nbytes: int) -> int:
        """Evict until the arena has a piece of `nbytes`, as far as that helps; returns the bytes freed."""
        return self.memory.reclaim(nbytes)

    def bytes_by_tier(self) -> dict[str, float]:
        """Bytes of stored tensors in memory (the arena) and on disk."""
        return {"memory": float(self.memory.nbytes), "disk": float(self.disk_bytes)}

    # Lookups

    def head(self, owner: str, name: str) -> Entry:
        """What the name means. ServiceError not_found, or lost."""
        return _entry(self._find(owner, name))

    def entries(self, owner: str, after: str, limit: int) -> tuple[list[Entry], str | None]:
        """A page of the owner's tensors by name; and what to pass as `after` for the next."""
        page, following = self._names.page(owner, after, limit, self.clock())
        return [_entry(named) for named in page if not named.content.lost], following

    def check(self, owner: str, name: str, conditions: Conditions) -> None:
        """Refuse early what `put` would refuse: precondition_failed."""
        named = self._names.get(owner, name, self.clock())
        conditions.check(None if named is None or named.content.lost else named.content.row.etag)

    def check_room(self, nbytes: int) -> None:
        """Refuse early what can't be written: read_only, no_room."""
        if not self.folder.writable:
            raise ServiceError("read_only", "the data folder can't be written")
        if self.disk_bytes + nbytes > self.disk_budget:
            raise ServiceError("no_room", "the store's share of the disk is used up", limit=self.disk_budget)

    def check_share(self, owner: str, nbytes: int, share: int | None) -> None:
        """Refuse what is beyond an owner's share of the disk, if it has one: quota."""
        used = self.bytes_by_owner.get(owner, 0)
        if share is not None and used + nbytes > share:
            raise ServiceError(
                "quota", f"this key's owner keeps {used} bytes of tensors and results", limit=share
            )

    def exists(self, owner: str, name: str) -> bool:
        """Whether the name means a tensor."""
        named = self._names.get(owner, name, self.clock())
        return named is not None and not named.content.lost

    def hold(self, owner: str, name: str) -> Hold:
        """Keep what the name means now readable. ServiceError not_found, or lost."""
        return Hold(self, self._find(owner, name).content)

    def hold_content(self, content: str) -> Hold:
        """The same by a content's id, which a keeper knows. ServiceError lost."""
        if content not in self._contents:
            raise ServiceError("lost", "the tensor is gone")
        return Hold(self, self._contents[content])

    def _find(self, owner: str, name: str) -> Named[Content]:
        named = self._names.get(owner, name, self.clock())
        if named is None:
            raise ServiceError("not_found", f"there is no tensor {name!r}")
        if named.content.lost:
            raise ServiceError("lost", f"the tensor {name!r} was lost before it was durable")
        return named

    # Reading

    async def pin(self, owner: str, name: str) -> Pin:
        """Bring what the name means now into the arena and keep it there. not_found, lost, no_room."""
        hold = self.hold(owner, name)
        try:
            return await self.load(hold)
        finally:
            hold.release()

    async def load(self, hold: Hold) -> Pin:
        """Bring a held content into the arena and keep it there."""
        content = hold.content
        while (resident := self.memory.get(content.row.id)) is None:
            if content.lost:
                raise ServiceError("lost", f"the tensor {content.row.name!r} was lost before it was durable")
            if content.loading is None:
                content.loading = self._spawn(self._load(content, Hold(self, content)))
            await asyncio.shield(content.loading)
        return Pin(Hold(self, content), resident)

    async def _load(self, content: Content, hold: Hold) -> None:
        row = content.row
        try:
            slot = self.memory.allocate(row.nbytes)
            try:
                await self._read_into(content, 0, slot.view(row.nbytes))
            except BaseException:
                slot.release()
                raise
            self.memory.add(row.id, slot)
            self.memory.trim()
        finally:
            content.loading = None
            hold.release()

    async def _read_into(self, content: Content, start: int, view: memoryview) -> None:
        path = self._path(content.row.id)
        try:
            await self._in_pool(files.read_into, path, content.data_start + start, view)
        except (EOFError, FileNotFoundError) as error:
            logger.error("a tensor's file is gone or cut: %s", error)
            self._lose(content)
            raise ServiceError("lost", f"the file of tensor {content.row.name!r} is gone or cut") from error

    async def read(self, hold: Hold, start: int, nbytes: int) -> bytearray:
        """A piece of a held content, without a place in the arena for the whole."""
        data = bytearray(nbytes)
        resident = self.memory.peek(hold.content.row.id)
        if resident is not None:
            data[:] = resident.slot.view(hold.content.row.nbytes)[start : start + nbytes]
        else:
            await self._read_into(hold.content, start, memoryview(data))
        return data

    def resident(self, hold: Hold) -> Pin | None:
        """A pin on a held content if it is in the arena already."""
        resident = self.memory.get(hold.content.row.id)
        return None if resident is None else Pin(Hold(self, hold.content), resident)

    # Writing

    async def put(
        self,
        owner: str,
        name: str,
        source: Slot | bytes | bytearray | memoryview,
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
        self.check_share(owner, nbytes, share)
        content = self._reserve(owner, name, nbytes, dtype, shape)
        hold = Hold(self, content)
        put = self._put_durable if durable else self._put_soon
        work = put(hold, _Source(source, start, nbytes), name, ttl, conditions)
        return await asyncio.shield(self._spawn(work))

    async def _put_durable(
        self, hold: Hold, source: _Source, name: str, ttl: float | None, conditions: Conditions
    ) -> Entry:
        try:
            with source:
                await self._write(hold.content, source.view)
                self._adopt(hold.content, source, Backing.WRITTEN)
            return await self.name(name, hold, ttl, conditions=conditions)
        finally:
            hold.release()

    async def _put_soon(
        self, hold: Hold, source: _Source, name: str, ttl: float | None, conditions: Conditions
    ) -> Entry:
        content = hold.content
        try:
            with source:
                row = content.row
                etag = await self._in_pool(files.digest, row.dtype, row.shape, source.view)
                content.row = replace(row, etag=etag)
                if not self._adopt(content, source, Backing.WRITING):
                    slot = self.memory.allocate(source.nbytes)
                    slot.view(source.nbytes)[:] = source.view
                    self.memory.add(row.id, slot, Backing.WRITING)
            entry = await self.name(name, hold, ttl, conditions=conditions, soft=True)
            self._spawn(self._write_back(content))
            return entry
        finally:
            hold.release()

    async def save(
        self,
        owner: str,
        source: Slot | bytes | bytearray | memoryview,
        nbytes: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        name: str = "",
    ) -> Hold:
        """Write a file that no name points to: for who keeps it (`index.keep` with `hold.content.row`)."""
        hold = Hold(self, self._reserve(owner, name, nbytes, dtype, shape))
        saving = self._spawn(self._save(hold, _Source(source, 0, nbytes)))
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            saving.add_done_callback(_release_unclaimed)
            raise

    async def _save(self, hold: Hold, source: _Source) -> Hold:
        try:
            with source:
                await self._write(hold.content, source.view)
                self._adopt(hold.content, source, Backing.WRITTEN)
        except BaseException:
            hold.release()
            raise
        return hold

    async def make_durable(self, hold: Hold) -> None:
        """Write a held content's file if it isn't there yet."""
        if not hold.content.row.whole:
            await asyncio.shield(self._spawn(self._write_back(hold.content, patient=False)))

    async def name(
        self,
        name: str,
        hold: Hold,
        ttl: float | None,
        *,
        conditions: Conditions = UNCONDITIONAL,
        soft: bool = False,
    ) -> Entry:
        """Let the name mean the held content."""
        row = hold.content.row
        async with self._lock(row.owner, name):
            self.check(row.owner, name, conditions)
            now = self.clock()
            named = Named(row.owner, name, hold.content, now, None if ttl is None else now + ttl)

            def commit(db: sqlite3.Connection) -> None:
                index.add(db, row)
                index.bind(db, NameRow(row.owner, name, row.id, now, named.expires))

            await self.database.write(commit, soft=soft)
            self._bind(named)
            return _entry(named)

    async def delete(self, owner: str, name: str, conditions: Conditions = UNCONDITIONAL) -> None:
        """Forget the name. not_found, precondition_failed."""
        self.check(owner, name, conditions)
        named = self._names.get(owner, name, self.clock())
        if named is None:
            raise ServiceError("not_found", f"there is no tensor {name!r}")
        await asyncio.shield(self._spawn(self._unbind(named)))

    async def _unbind(self, named: Named[Content]) -> None:
        async with self._lock(named.owner, named.name):
            id_ = named.content.row.id
            await self.database.write(lambda db: index.unbind(db, named.owner, named.name, id_))
            if self._names.remove(named):
                self._drop(named.content)

    @contextlib.asynccontextmanager
    async def binding(self, owner: str, bindings: Sequence[Binding]) -> AsyncIterator[list[NameRow]]:
        """Lock the names and yield their rows, to be committed in the block; then they mean the contents."""
        now = self.clock()
        rows = [
            NameRow(owner, b.name, b.hold.content.row.id, now, None if b.ttl is None else now + b.ttl)
            for b in bindings
        ]
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({binding.name for binding in bindings}):
                await stack.enter_async_context(self._lock(owner, name))
            yield rows
            for binding, row in zip(bindings, rows, strict=True):
                self._bind(Named(owner, row.name, binding.hold.content, now, row.expires))

    def _bind(self, named: Named[Content]) -> None:
        named.content.needs += 1
        before = self._names.set(named)
        if before is not None:
            self._drop(before)

    # Keepers: what a job needs besides names; the rows are in the job's own transaction

    def kept(self, holds: Iterable[Hold]) -> None:
        """These contents have a keeper's row now."""
        for hold in holds:
            hold.content.needs += 1

    def unkept(self, contents: Iterable[str]) -> None:
        """A keeper's rows for these contents are gone."""
        for id_ in contents:
            self._drop(self._contents[id_])

    # Contents

    def _reserve(self, owner: str, name: str, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Content:
        if nbytes != files.extent(dtype, shape):
            raise ValueError(f"{nbytes} bytes given for {dtype} of shape {shape}")
        id_ = secrets.token_hex(16)
        content = Content(ContentRow(id_, owner, name, "", dtype, shape, nbytes, whole=False))
        self.check_room(content.disk_bytes)
        self._charge(content, content.disk_bytes)
        self._contents[id_] = content
        return content

    def _charge(self, content: Content, nbytes: int) -> None:
        self.disk_bytes += nbytes
        owner = content.row.owner
        self.bytes_by_owner[owner] = self.bytes_by_owner.get(owner, 0) + nbytes
        if not self.bytes_by_owner[owner]:
            del self.bytes_by_owner[owner]

    async def _write(self, content: Content, data: memoryview) -> None:
        row = content.row
        with refusing():
            # Side by side: hashing takes as long as many disks do. Both end before the memory may go.
            written, etag = await asyncio.gather(
                self._in_pool(files.write, self._path(row.id), row.dtype, row.shape, data),
                self._in_pool(files.digest, row.dtype, row.shape, data),
                return_exceptions=True,
            )
            for outcome in (written, etag):
                if isinstance(outcome, BaseException):
                    raise outcome
        content.row = replace(row, etag=str(etag), whole=True)

    async def _write_back(self, content: Content, *, patient: bool = True) -> None:
        """Write what is in the arena alone. `patient`: what the disk refuses is tried again by the sweep."""
        resident = self.memory.peek(content.row.id)
        if content.row.whole or content.lost or resident is None:
            return
        hold = Hold(self, content)
        resident.backing = Backing.WRITING
        resident.users += 1
        try:
            await self._write(content, resident.slot.view(content.row.nbytes))
            await self.database.write(lambda db: index.written(db, content.row.id))
            resident.backing = Backing.WRITTEN
            self._refused.pop(content.row.id, None)
        except ServiceError as error:
            logger.warning("a tensor couldn't be written yet: %s", error.detail)
            resident.backing = Backing.REFUSED
            self._refused[content.row.id] = content
            if not patient:
                raise
        finally:
            resident.users -= 1
            hold.release()
            self.memory.trim()

    def _adopt(self, content: Content, source: _Source, backing: Backing) -> bool:
        """Keep the source's slot as the content's memory, where it fits in."""
        slot = source.slot
        if slot is None or source.start or slot.state == "tensor":
            return False
        if backing is Backing.WRITTEN and slot.capacity > self.memory.budget:
            return False
        slot.become("tensor")
        self.memory.add(content.row.id, slot.hold(), backing)
        self.memory.trim()
        return True

    def _evicted_only_copy(self, id_: str) -> None:
        self._lose(self._refused.pop(id_))
        logger.warning("a tensor that the disk refused was evicted, so it is lost")

    def _lose(self, content: Content) -> None:
        if not content.lost:
            content.lost = True
            self._charge(content, -content.disk_bytes)

    def _drop(self, content: Content) -> None:
        content.needs -= 1
        if content.needs:
            return
        id_ = content.row.id
        del self._contents[id_]
        self._refused.pop(id_, None)
        self.memory.remove(id_)
        if not content.lost:
            self._charge(content, -content.disk_bytes)
        self._forget(content.tensor)
        if not self._closing:
            self._spawn(self._remove(id_))

    async def _remove(self, id_: str) -> None:
        try:
            await self._in_pool(files.remove, self._path(id_))
        except OSError as error:
            logger.warning("a deleted tensor's file stays until the next start: %s", error)

    # Effects

    def _path(self, id_: str) -> Path:
        return self.folder.tensors / (id_ + files.SUFFIX)

    def _lock(self, owner: str, name: str) -> asyncio.Lock:
        return self._locks.setdefault((owner, name), asyncio.Lock())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run to the end even if who waits for it is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, ServiceError) else logging.ERROR
            logger.log(level, "work of the store failed", exc_info=error)

    async def _in_pool(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


class _Source:
    """Where a tensor's bytes come from; holds its slot while they are read."""

    def __init__(self, source: Slot | bytes | bytearray | memoryview, start: int, nbytes: int) -> None:
        self.slot = source.hold() if isinstance(source, Slot) else None
        self.start = start
        self.nbytes = nbytes
        data = source.view(start + nbytes) if isinstance(source, Slot) else memoryview(source).cast("B")
        self.view = data[start : start + nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.slot is not None:
            self.slot.release()


def _release_unclaimed(saving: asyncio.Task[Hold]) -> None:
    """Who asked for the hold has left."""
    if not saving.cancelled() and saving.exception() is None:
        saving.result().release()


def _entry(named: Named[Content]) -> Entry:
    row = named.content.row
    return Entry(
        named.name, row.etag, row.dtype, row.shape, row.nbytes, named.created, named.expires, row.whole
    )
