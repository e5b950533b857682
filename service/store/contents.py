"""Versions of tensors, kept and in the arena: receives bytes, hands on holds and pins.

A content's file is written once and never changed; where it lies is the matter of `Files`. The arena holds
copies, least recently used first out, and for a while the only copy of what is to be written soon.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import Protocol

from service.arena import Slots
from service.errors import ServiceError
from service.folder import refusing
from service.kept import Kept, Owner
from service.session import Transactions
from service.store import files, index
from service.store.content import Content, Hold, Pin, Source
from service.store.effects import Effects
from service.store.files import Files
from service.store.index import ContentRow
from service.store.memory import Backing, Memory

logger = logging.getLogger(__name__)

#: Seconds for which a result of /gemm may be replaced before it is written.
WRITE_BACK_SECONDS = 0.25
#: Results that are written at once.
WRITERS = 2


async def _nothing_before(content: Content) -> None:
    """Nobody needs to know."""


def new_id() -> str:
    """An id for a content, unlike any other."""
    return secrets.token_hex(16)


class Devices(Protocol):
    """Which tensors only a device has: service.kept.Kept."""

    owner: Owner

    def away(self, tensor: str) -> bool: ...
    def lost(self, tensor: str) -> bool: ...
    async def bring(self, tensor: str) -> None: ...


class Contents:
    """See the module. `forget(*tensors)` is told what a device cache may drop."""

    def __init__(
        self,
        kept: Files,
        database: Transactions,
        effects: Effects,
        slots: Slots,
        *,
        memory_budget: int,
        disk_budget: int,
        forget: Callable[..., None],
    ) -> None:
        self.files = kept
        self.database = database
        self.effects = effects
        self.memory = Memory(slots, memory_budget, self._evicted_only_copy)
        self.disk_budget = disk_budget
        self.disk_bytes = 0
        self.bytes_by_owner: dict[str, int] = {}
        #: Contents on their way to a name, by owner and name.
        self.arrivals: dict[str, dict[str, list[Content]]] = {}
        self.closing = False
        self._writers = asyncio.Semaphore(WRITERS)
        self._forget = forget
        self._devices: Devices = Kept()
        #: Called with a result that is about to be written.
        self.before_write: Callable[[Content], Awaitable[None]] = _nothing_before
        self._contents: dict[str, Content] = {}
        self._unwritten: dict[str, Content] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def attach(self, devices: Devices) -> None:
        """Results may stay on devices."""
        self._devices = devices
        devices.owner = self

    # Who needs what

    def restore(self, rows: Iterable[ContentRow], whole: Collection[str]) -> None:
        """Know what the index knows; what isn't `whole` was lost."""
        for row in rows:
            content = self._contents[row.id] = Content(replace(row, whole=row.id in whole))
            content.lost = not content.row.whole
            if not content.lost:
                self._charge(content, content.disk_bytes)

    def get(self, id_: str) -> Content:
        """The content; ServiceError lost."""
        content = self._contents.get(id_)
        if content is None:
            raise ServiceError("lost", "the tensor is gone")
        return content

    def hold(self, content: Content) -> Hold:
        """Keep it readable."""
        return Hold(content, self.drop)

    def drop(self, content: Content) -> None:
        """One need less; the last takes file and memory along."""
        content.needs -= 1
        if content.needs:
            return
        id_ = content.row.id
        del self._contents[id_]
        self._unwritten.pop(id_, None)
        self.memory.remove(id_)
        if not content.lost:
            self._charge(content, -content.disk_bytes)
        self._forget(content.tensor)
        if content.filed and not self.closing:  # else the next start finds it
            self.effects.spawn(self._remove(id_))

    async def _remove(self, id_: str) -> None:
        try:
            await self.files.remove(id_)
        except (OSError, ServiceError) as error:
            logger.warning("a deleted tensor's file stays for now: %s", error)

    # Room

    def check_room(self, nbytes: int) -> None:
        """Refuse what can't be written: read_only, no_room; too_large where it never will be."""
        if not self.files.writable:
            raise ServiceError("read_only", "the data folder can't be written")
        budget = self.disk_budget
        if nbytes > budget:
            detail = f"{nbytes} bytes are above the store's share of the disk"
            raise ServiceError("too_large", detail, field="body", limit=budget)
        if self.disk_bytes + nbytes > budget:
            detail = "the store's share of the disk is used up"
            raise ServiceError("no_room", detail, field="body", limit=budget)

    def arrive(self, content: Content) -> None:
        """The content is on its way to the name that it is made under."""
        row = content.row
        self.arrivals.setdefault(row.owner, {}).setdefault(row.name, []).append(content)

    def arrived(self, content: Content) -> None:
        """The name means it, or won't."""
        row = content.row
        names = self.arrivals[row.owner]
        names[row.name].remove(content)
        if not names[row.name]:
            del names[row.name]
            if not names:
                del self.arrivals[row.owner]

    def _charge(self, content: Content, nbytes: int) -> None:
        self.disk_bytes += nbytes
        owner = content.row.owner
        self.bytes_by_owner[owner] = self.bytes_by_owner.get(owner, 0) + nbytes
        if not self.bytes_by_owner[owner]:
            del self.bytes_by_owner[owner]

    # Reading

    async def bring(self, hold: Hold) -> None:
        """Have a held content's bytes here, if only a device has them. ServiceError lost."""
        await self._devices.bring(hold.content.tensor)

    async def load(self, hold: Hold) -> Pin:
        """Give a held content a place in the arena and keep it there. ServiceError lost, no_room.

        For products: the bytes are there too, unless only a device has them (see `bring`).
        """
        content = hold.content
        loaded = False
        while True:
            if content.lost:
                raise lost(content)
            resident = self.memory.get(content.row.id)
            if resident is not None:
                pin = Pin(self.hold(content), resident)
                if loaded:  # not before it is in use, or one above the budget would go again at once
                    self.memory.trim()
                return pin
            if content.loading is None:
                content.loading = self.effects.spawn(self._load(content, self.hold(content)))
            await asyncio.shield(content.loading)
            loaded = True

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
        finally:
            content.loading = None
            hold.release()

    async def read(self, hold: Hold, start: int, nbytes: int) -> bytearray:
        """A piece of a held content, without a place in the arena for the whole."""
        data = bytearray(nbytes)
        await self.bring(hold)
        resident = self.memory.peek(hold.content.row.id)
        if resident is not None:
            data[:] = resident.slot.view(hold.content.row.nbytes)[start : start + nbytes]
        elif hold.content.lost:
            raise lost(hold.content)
        else:
            await self._read_into(hold.content, start, memoryview(data))
        return data

    def resident(self, hold: Hold) -> Pin | None:
        """A pin on a held content if it has a place in the arena already."""
        resident = self.memory.get(hold.content.row.id)
        return None if resident is None else Pin(self.hold(hold.content), resident)

    async def _read_into(self, content: Content, start: int, view: memoryview) -> None:
        try:
            await self.files.read_into(content.row.id, content.data_start + start, view)
        except (EOFError, FileNotFoundError) as error:
            logger.error("a tensor's file is gone or cut: %s", error)
            self._lose(content)
            raise lost(content) from error

    # Writing

    def reserve(
        self, owner: str, name: str, nbytes: int, dtype: str, shape: tuple[int, ...], *, id_: str = ""
    ) -> Hold:
        """A new content, its room on disk taken, its bytes to come. no_room, read_only."""
        if nbytes != files.extent(dtype, shape):
            raise ValueError(f"{nbytes} bytes given for {dtype} of shape {shape}")
        id_ = id_ or new_id()
        content = Content(ContentRow(id_, owner, name, "", dtype, shape, nbytes, whole=False))
        self.check_room(content.disk_bytes)
        self._charge(content, content.disk_bytes)
        self._contents[id_] = content
        return self.hold(content)

    async def write(self, content: Content, source: Source) -> None:
        """Write the file of a new content; the arena may keep the source's slot."""
        await self._write_file(content, source.view)
        self._adopt(content, source, Backing.WRITTEN)

    async def keep(self, content: Content, source: Source) -> None:
        """Keep a new content in the arena, to be written by `write_back`."""
        row = content.row
        # A version of its own, not a hash of the bytes: hashing would take longer than the product that made them.
        content.row = replace(row, etag=row.id)
        if not self._adopt(content, source, Backing.WRITING):
            slot = self.memory.allocate(source.nbytes)
            slot.view(source.nbytes)[:] = source.view
            self.memory.add(row.id, slot, Backing.WRITING)
        self._unwritten[row.id] = content
        if self._devices.lost(content.tensor):
            self.lose_copy(content.tensor)

    # What only a device has: service.kept.Owner

    def hold_copy(self, tensor: str) -> Callable[[], None] | None:
        """Keep its place in the arena."""
        content = self._contents.get(tensor.rpartition("@")[2])
        return None if content is None or content.lost else self.hold(content).release

    def lose_copy(self, tensor: str) -> None:
        """Its place in the arena holds nothing, and nothing will be written there."""
        content = self._contents.get(tensor.rpartition("@")[2])
        if content is not None and not content.lost:
            logger.warning("the tensor %r was lost with the worker that computed it", content.row.name)
            self.lose(content)

    def lose(self, content: Content) -> None:
        """Its only copy is gone, or nobody will know of it."""
        if content.lost:
            return
        self._lose_only_copy(content)
        resident = self.memory.peek(content.row.id)
        if resident is not None:
            resident.backing = Backing.WRITTEN  # so that it may be evicted

    def abandon(self, tensor: str) -> None:
        """D's memory is let go: if it didn't become a content, no device need keep it."""
        if tensor.rpartition("@")[2] not in self._contents and self._devices.away(tensor):
            self._forget(tensor)

    async def write_back(self, content: Content) -> None:
        """Write what is in the arena alone, once for all who ask. What the disk refuses is tried again."""
        if content.row.id not in self._unwritten:
            return
        if content.writing is None:
            content.writing = self.effects.spawn(self._write_back(content, self.hold(content)))
        await asyncio.shield(content.writing)

    def write_back_soon(self, content: Content) -> None:
        """Write it in a while, if it is still wanted then.

        A name that is bound to one result after another costs the disk only what stays, and until its turn
        comes a result that was replaced holds no memory.
        """
        if self.closing:
            self._write_back_now(content)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(WRITE_BACK_SECONDS, self._write_back_now, content)

    def _write_back_now(self, content: Content) -> None:
        if content.row.id in self._unwritten and content.writing is None:
            self.effects.spawn(self._write_back_in_turn(content))

    async def _write_back_in_turn(self, content: Content) -> None:
        async with self._writers:
            if content.row.id in self._unwritten:
                await self.write_back(content)

    def hurry(self) -> None:
        """The end is near: write what waits, now."""
        self.closing = True
        self.write_waiting()

    def write_waiting(self) -> None:
        """Begin to write what is to be written in a while."""
        for content in list(self._unwritten.values()):
            self._write_back_now(content)

    async def retry(self) -> None:
        """Try again to write what the disk refused."""
        for content in list(self._unwritten.values()):
            resident = self.memory.peek(content.row.id)
            if resident is None or resident.backing is not Backing.REFUSED:
                continue
            try:
                await self.write_back(content)
            except ServiceError:
                return

    async def _write_back(self, content: Content, hold: Hold) -> None:
        resident = self.memory.peek(content.row.id)
        assert resident is not None, "an only copy was evicted"
        resident.backing = Backing.WRITING
        try:
            await self.before_write(content)
            if content.lost:
                raise lost(content)
            await self._devices.bring(content.tensor)
            if not content.row.whole:
                await self._write_file(content, resident.slot.view(content.row.nbytes))
            await self.database.write(lambda db: index.written(db, content.row.id))
            resident.backing = Backing.WRITTEN
            self._unwritten.pop(content.row.id, None)
        except ServiceError as error:
            if not content.lost:
                logger.warning("a tensor couldn't be written yet: %s", error.detail)
                resident.backing = Backing.REFUSED
            raise
        finally:
            content.writing = None
            hold.release()
            self.memory.trim()

    async def _write_file(self, content: Content, data: memoryview) -> None:
        row = content.row
        content.filed = True
        with refusing():
            if row.etag:
                await self.files.write(row.id, row.dtype, row.shape, data)
                content.row = replace(row, whole=True)
                return
            # Side by side: hashing takes as long as many disks do. Both end before the memory may go.
            written, etag = await asyncio.gather(
                self.files.write(row.id, row.dtype, row.shape, data),
                self.effects.in_pool(files.digest, row.dtype, row.shape, data),
                return_exceptions=True,
            )
            for outcome in (written, etag):
                if isinstance(outcome, BaseException):
                    raise outcome
        content.row = replace(row, etag=str(etag), whole=True)

    def _adopt(self, content: Content, source: Source, backing: Backing) -> bool:
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
        self._lose_only_copy(self._unwritten[id_])
        logger.warning("a tensor that the disk refused was evicted, so it is lost")

    def _lose_only_copy(self, content: Content) -> None:
        self._unwritten.pop(content.row.id, None)
        self._lose(content)

    def _lose(self, content: Content) -> None:
        if not content.lost:
            content.lost = True
            self._charge(content, -content.disk_bytes)


def lost(content: Content) -> ServiceError:
    """What is told of it."""
    return ServiceError("lost", f"the tensor {content.row.name!r} was lost")
