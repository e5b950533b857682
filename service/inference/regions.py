"""Memory of clients that is named rather than sent: receives registrations, hands on the use of their bytes.

A registration is a lease: it belongs to the owner whose key made it, and ends when it is unregistered, when it
has not been used for `lease` seconds, or when that key is no longer in force. While a request uses a region it
stays; to unregister it waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from service.decode import Bound
from service.errors import ServiceError
from service.inference.request import Place
from service.keys import Principal

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Registrations of one owner; each may hold a descriptor.
MOST_REGIONS = 256
#: Seconds that unregistering waits for requests that use the region.
_PATIENCE = 5.0
#: Seconds between looks for leases that ended.
_SWEEP = 1.0


class Memory(Protocol):
    """The bytes behind a registration. Offsets count from its beginning and are within its `nbytes`."""

    kind: str
    nbytes: int

    def told(self) -> dict[str, Any]:
        """What its status tells beside the name."""

    async def read(self, offset: int, target: Bound) -> None:
        """Fill the operand from here. Ends only when nothing writes to it any more, even if cancelled."""

    async def write(self, offset: int, source: Bound) -> None:
        """Copy the result to here. Ends only when nothing reads it any more, even if cancelled."""

    async def close(self) -> None:
        """Let it go."""


@dataclass(slots=True, eq=False)
class Region:
    """One registration."""

    name: str
    owner: str
    key_id: str
    memory: Memory
    expires: float
    uses: int = 0
    ending: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Use:
    """A part of a region, while a request uses it."""

    memory: Memory
    offset: int
    nbytes: int

    async def read(self, target: Bound) -> None:
        """Fill the operand from here."""
        await self.memory.read(self.offset, target)

    async def write(self, source: Bound) -> None:
        """Copy the result to here."""
        await self.memory.write(self.offset, source)


class Regions:
    """All registrations of one front, for its event loop's thread."""

    def __init__(
        self,
        lease: float,
        in_force: Callable[[str], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._in_force = in_force
        self._clock = clock
        self._regions: dict[tuple[str, str], Region] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def register(
        self, principal: Principal, name: str, opening: Callable[[], Awaitable[Memory]]
    ) -> None:
        """Register what `opening` opens under a name of the principal's owner."""
        if not _NAME.fullmatch(name):
            raise _wrong(
                "a region's name is 1 to 128 letters, digits, dots, dashes and underscores", field="name"
            )
        await self._sweep()
        self._check_free(principal.owner, name)
        memory = await opening()
        try:
            self._check_free(principal.owner, name)
        except ServiceError:
            await memory.close()
            raise
        region = Region(name, principal.owner, principal.key_id, memory, self._clock() + self._lease)
        self._regions[principal.owner, name] = region
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.ensure_future(self._keep_sweeping())

    def status(self, owner: str, kind: str, name: str = "") -> list[dict[str, Any]]:
        """The owner's regions of a kind, or one of them; not_found where that isn't there."""
        found = [
            {"name": one.name, **one.memory.told()}
            for one in self._regions.values()
            if one.owner == owner and one.memory.kind == kind and name in ("", one.name) and self._lives(one)
        ]
        if name and not found:
            raise ServiceError("not_found", f"there is no {kind} shared memory region {name[:128]!r}")
        return found

    async def unregister(self, owner: str, kind: str, name: str = "") -> None:
        """End the owner's regions of a kind, or one; one that isn't there has ended already."""
        chosen = [
            one
            for one in self._regions.values()
            if one.owner == owner and one.memory.kind == kind and name in ("", one.name)
        ]
        for region in chosen:
            await self._end(region)

    @contextlib.contextmanager
    def use(self, owner: str, place: Place) -> Iterator[Use]:
        """A part of a region for the length of a block."""
        region = self._regions.get((owner, place.region))
        if region is None or not self._lives(region):
            raise _wrong(
                f"there is no shared memory region {place.region[:128]!r}", field="shared_memory_region"
            )
        memory = region.memory
        if place.offset > memory.nbytes or place.nbytes > memory.nbytes - place.offset:
            raise _wrong(
                f"{place.nbytes} bytes at offset {place.offset} pass the end of region {place.region},"
                f" which has {memory.nbytes}",
                field="shared_memory_byte_size",
            )
        region.uses += 1
        try:
            yield Use(memory, place.offset, place.nbytes)
        finally:
            region.expires = self._clock() + self._lease
            region.uses -= 1
            if not region.uses:
                region.unused.set()

    async def close(self) -> None:
        """End all, when no request is left."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for region in list(self._regions.values()):
            await self._let_go(region)

    # -- inner ----------------------------------------------------------------------------------------------------

    def _check_free(self, owner: str, name: str) -> None:
        if (owner, name) in self._regions:
            raise _wrong(f"region {name!r} is registered already", field="name")
        if sum(one.owner == owner for one in self._regions.values()) >= MOST_REGIONS:
            raise ServiceError("no_room", "as many regions are registered as may be", limit=MOST_REGIONS)

    def _lives(self, region: Region) -> bool:
        """Whether it can be used: not being ended, its time not up, its key in force."""
        return not region.ending and region.expires > self._clock() and self._in_force(region.key_id)

    async def _end(self, region: Region) -> None:
        region.ending = True
        try:
            async with asyncio.timeout(_PATIENCE):
                while region.uses:
                    region.unused.clear()
                    await region.unused.wait()
        except TimeoutError:
            raise ServiceError("conflict", f"region {region.name!r} is in use") from None
        finally:
            region.ending = False
        await self._let_go(region)

    async def _let_go(self, region: Region) -> None:
        if self._regions.get((region.owner, region.name)) is region:
            del self._regions[region.owner, region.name]
            await region.memory.close()

    async def _sweep(self) -> None:
        for region in list(self._regions.values()):
            if not region.uses and not region.ending and not self._lives(region):
                await self._let_go(region)

    async def _keep_sweeping(self) -> None:
        while self._regions:
            await asyncio.sleep(min(_SWEEP, self._lease))
            await self._sweep()


async def to_end(work: Callable[[], None]) -> None:
    """Run `work` in a thread, and don't return before it has, even if cancelled: it touches memory of a slot."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        task.exception()  # looked at, so that it isn't reported as lost
        raise cancelled
    task.result()


def _wrong(detail: str, *, field: str) -> ServiceError:
    return ServiceError("invalid", detail, field=field)
