"""The tensor store: receives tensors by owner and name, hands on pins: operands in the arena, kept readable.

A content (one version of a tensor, never changed) lives as long as a name, a job or a pin needs it, so what was
replaced or deleted stays readable to who pinned it. What is here holds for a store of one front
(service.store.local) and for one that fronts share (service.store.shared).

All state belongs to the front's loop; files are read and written in a small pool, rows in the database's
threads.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from service import audit
from service.errors import ServiceError
from service.session import Transactions
from service.store.conditions import UNCONDITIONAL, Conditions
from service.store.content import Content, Data, Hold, Pin, Source
from service.store.contents import Contents
from service.store.effects import Effects
from service.store.index import NameRow
from service.store.names import Named, valid
from service.store.share import Stock

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
    #: Bytes that may stay of the owner's once the name means it; None for any.
    bound: int | None = None


class TensorStore(ABC):
    """See the module."""

    def __init__(
        self,
        database: Transactions,
        effects: Effects,
        contents: Contents,
        clock: Callable[[], float],
    ) -> None:
        self.transactions = database
        self.effects = effects
        self.contents = contents
        self.clock = clock
        self._sweeper: asyncio.Task[None] | None = None

    # Life

    @abstractmethod
    async def start(self) -> None:
        """Open what keeps the tensors."""

    @abstractmethod
    async def end(self) -> None:
        """Let go of what keeps the tensors."""

    async def close(self) -> None:
        """Finish the writes that go on, then let everything go."""
        self.contents.hurry()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.effects.settle()
        await self.end()
        self.effects.close()

    def sweep_often(self) -> None:
        """Begin to sweep."""
        self._sweeper = asyncio.create_task(self._sweep_often())

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep(self.clock())
            except ServiceError as error:
                logger.warning("the store's sweep will try again: %s", error.detail)

    @abstractmethod
    async def sweep(self, now: float) -> None:
        """Forget what expired; try again to write what was refused."""

    @property
    def writable(self) -> bool:
        """Whether it takes tensors."""
        return self.contents.files.writable

    def reclaim(self, nbytes: int) -> int:
        """Evict until the arena has a piece of `nbytes`, as far as that helps; returns the bytes freed."""
        return self.contents.memory.reclaim(nbytes)

    def parts_up(self) -> dict[str, float]:
        """Of what fronts share: 1 where the last request to it was served. Nothing where nothing is shared."""
        return {}

    def bytes_by_tier(self) -> dict[str, float]:
        """Bytes of stored tensors in memory (the arena) and on disk."""
        return {"memory": float(self.contents.memory.nbytes), "disk": float(self.contents.disk_bytes)}

    # Lookups

    @abstractmethod
    async def find(self, owner: str, name: str) -> Named[Content] | None:
        """What the name means, if anything; lost contents too."""

    @abstractmethod
    async def entries(self, owner: str, after: str, limit: int) -> tuple[list[Entry], str | None]:
        """A page of the owner's tensors by name; and what to pass as `after` for the next."""

    async def head(self, owner: str, name: str) -> Entry:
        """What the name means. ServiceError not_found, or lost."""
        return entry_of(await self._found(owner, name))

    async def exists(self, owner: str, name: str) -> bool:
        """Whether the name means a tensor."""
        return await self._etag(owner, name) is not None

    async def check(self, owner: str, name: str, conditions: Conditions) -> None:
        """Refuse early what `put` would refuse: precondition_failed."""
        conditions.check(await self._etag(owner, name))

    async def hold(self, owner: str, name: str) -> Hold:
        """Keep what the name means now readable. ServiceError not_found, or lost."""
        return self.contents.hold((await self._found(owner, name)).content)

    async def pin(self, owner: str, name: str) -> Pin:
        """Give what the name means now a place in the arena, for products. not_found, lost, no_room."""
        hold = await self.hold(owner, name)
        try:
            return await self.contents.load(hold)
        finally:
            hold.release()

    def abandon(self, tensor: str) -> None:
        """D's memory is let go, stored or not."""
        self.contents.abandon(tensor)

    async def _etag(self, owner: str, name: str) -> str | None:
        named = await self.find(owner, name)
        return None if named is None or named.content.lost else named.content.row.etag

    async def _found(self, owner: str, name: str) -> Named[Content]:
        named = await self.find(owner, name)
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
        id_: str = "",
    ) -> Entry:
        """Store `nbytes` from `start` of `source` on under `name`; with `durable` once all is synced.

        Without, the entry says durable=False, the file follows, and until then the tensor is in the arena
        alone, or on a device that kept it under `id_` (see `tensor_of`). A slot stays the caller's to release;
        the store may keep it, as memory of state "tensor". The work goes on if the caller is cancelled. `share`
        bounds the bytes that the owner keeps. Refused: invalid, precondition_failed, quota, no_room, read_only.
        """
        if not valid(name):
            raise ServiceError("invalid", f"{name!r} can't be a tensor's name", field="name")
        with audit.refusals("store", owner, name, nbytes):
            await self.check(owner, name, conditions)
            bound = await self.check_share(owner, name, nbytes, dtype, shape, share)
            hold = self.contents.reserve(owner, name, nbytes, dtype, shape, id_=id_)
            self.contents.arrive(hold.content)
            binding, origin = Binding(name, hold, ttl, bound), Source(source, start, nbytes)
            if not durable:
                return await self.put_soon(binding, origin, conditions)
            return await self.effects.to_the_end(self._put_durable(binding, origin, conditions))

    async def check_share(
        self, owner: str, name: str, nbytes: int, dtype: str, shape: tuple[int, ...], share: int | None
    ) -> int | None:
        """Refuse what is beyond the owner's share of the disk, if it has one (see service.store.share).

        A tensor that takes another's place counts by the difference. Hands on how many bytes may stay then.
        """
        if share is None:
            return None
        stock = await self.stock(owner, name)
        return stock.admit(nbytes, share, name=name, size=self.size(nbytes, dtype, shape))

    @abstractmethod
    async def stock(self, owner: str, name: str = "") -> Stock:
        """What the owner keeps, with the versions of a name."""

    @abstractmethod
    def size(self, nbytes: int, dtype: str, shape: tuple[int, ...]) -> int:
        """What a tensor counts as in the stock."""

    async def _put_durable(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        try:
            with source:
                await self.contents.write(binding.hold.content, source)
            entry = await self.bind(binding, conditions)
            audit.changed("store", binding.hold.content.row, binding.name)
            return entry
        finally:
            self.contents.arrived(binding.hold.content)
            binding.hold.release()

    async def put_soon(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        """Store a result whose file follows."""
        return await self.effects.to_the_end(self._put_soon(binding, source, conditions))

    async def _put_soon(self, binding: Binding, source: Source, conditions: Conditions) -> Entry:
        try:
            with source:
                await self.contents.keep(binding.hold.content, source)
            entry = await self.bind(binding, conditions, soft=True)
            audit.changed("store", binding.hold.content.row, binding.name)
            self.contents.write_back_soon(binding.hold.content)
            return entry
        finally:
            self.contents.arrived(binding.hold.content)
            binding.hold.release()

    async def delete(self, owner: str, name: str, conditions: Conditions = UNCONDITIONAL) -> None:
        """Forget the name. not_found, precondition_failed."""
        with audit.refusals("delete", owner, name):
            named = await self.find(owner, name)
            conditions.check(None if named is None or named.content.lost else named.content.row.etag)
            if named is None:
                raise ServiceError("not_found", f"there is no tensor {name!r}")
            await self.effects.to_the_end(self._delete(named))

    async def _delete(self, named: Named[Content]) -> None:
        await self.unbind(named)
        audit.changed("delete", named.content.row, named.name)

    @abstractmethod
    async def bind(self, binding: Binding, conditions: Conditions, *, soft: bool = False) -> Entry:
        """Let the name mean the held content, if the conditions still hold; `soft`: its file is to follow."""

    @abstractmethod
    async def unbind(self, named: Named[Content]) -> None:
        """Forget the name, if it still means this."""

    @abstractmethod
    def binding(self, owner: str, bindings: Sequence[Binding]) -> AbstractAsyncContextManager[list[NameRow]]:
        """Yield rows of the names, to be committed in the block; then they mean the contents."""

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

    @abstractmethod
    def kept(self, holds: Iterable[Hold]) -> None:
        """These contents have a keeper's row now."""

    @abstractmethod
    def unkept(self, contents: Iterable[str]) -> None:
        """A keeper's rows for these contents are gone."""

    @abstractmethod
    async def hold_content(self, content: str) -> Hold:
        """Keep a content readable by its id, which its keeper knows. ServiceError lost."""


def _release_unclaimed(saving: asyncio.Task[Hold]) -> None:
    """Who asked for the hold has left."""
    if not saving.cancelled() and saving.exception() is None:
        saving.result().release()


def entry_of(named: Named[Content]) -> Entry:
    """What may be told of a name."""
    row = named.content.row
    return Entry(
        named.name, row.etag, row.dtype, row.shape, row.nbytes, named.created, named.expires, row.whole
    )
