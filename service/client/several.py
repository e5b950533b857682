"""Several fronts of one service: receives calls, hands each to the front that its tensor is best asked of.

Rendezvous hashing: of all fronts the one with the highest hash of (handle, front) comes first, so a handle is
asked of the same front by every client, each front has its share of handles, and when one comes or goes only
its own handles move. Where a front can't be reached or refuses for now (503), the next in that order is asked.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache

from service.client.errors import ConnectionFailed, TimedOut
from service.client.transport import AsyncTransport, Transport
from service.client.wire import Call, Reply, affinity

#: Seconds for which a front that couldn't be reached is asked last.
AVOID_SECONDS = 2.0


@lru_cache(maxsize=4096)
def ranked(key: str, fronts: tuple[str, ...]) -> tuple[int, ...]:
    """Places of the fronts in the order in which to ask for `key`."""

    def weight(place: int) -> bytes:
        return hashlib.blake2b(f"{fronts[place]}\0{key}".encode(), digest_size=8).digest()

    return tuple(sorted(range(len(fronts)), key=weight, reverse=True))


class Order:
    """Which front is asked first, and which ones then."""

    def __init__(self, fronts: Sequence[str]) -> None:
        self.fronts = tuple(fronts)
        self._turn = itertools.count()
        self._avoid = [0.0] * len(self.fronts)

    def of(self, call: Call) -> list[int]:
        """Places in the order to ask: by its handle, or in turn where it has none; the unreachable last."""
        key = affinity(call.target)
        if key:
            places = ranked(key, self.fronts)
        else:
            first = next(self._turn) % len(self.fronts)
            places = (*range(first, len(self.fronts)), *range(first))
        now = time.monotonic()
        return sorted(places, key=lambda place: self._avoid[place] > now)

    def failed(self, place: int) -> None:
        """This one couldn't be reached."""
        self._avoid[place] = time.monotonic() + AVOID_SECONDS


def _next(order: Order, call: Call, place: int, error: ConnectionFailed, last: bool) -> None:
    """Go on to the next front after a failure, or raise it."""
    if isinstance(error, TimedOut):
        raise error
    order.failed(place)
    if last or (error.sent and not call.idempotent):
        raise error


def _asked(order: Order, call: Call) -> Iterator[tuple[int, bool]]:
    """Places, and whether each is the last."""
    places = order.of(call)
    return zip(places, [*[False] * (len(places) - 1), True], strict=True)


class SeveralTransport:
    """Calls to several fronts, for threads."""

    def __init__(self, order: Order, transports: Sequence[Transport]) -> None:
        self._order = order
        self._transports = tuple(transports)

    def send(self, call: Call, deadline: float) -> Reply:
        """See Transport."""
        for place, last in _asked(self._order, call):
            try:
                reply = self._transports[place].send(call, deadline)
            except ConnectionFailed as error:
                _next(self._order, call, place, error, last)
            else:
                if reply.status != 503 or last:
                    return reply
        raise AssertionError("no front was asked")

    def close(self) -> None:
        """See Transport."""
        for transport in self._transports:
            transport.close()


class AsyncSeveralTransport:
    """Calls to several fronts, for one event loop."""

    def __init__(self, order: Order, transports: Sequence[AsyncTransport]) -> None:
        self._order = order
        self._transports = tuple(transports)

    async def send(self, call: Call, deadline: float) -> Reply:
        """See AsyncTransport."""
        for place, last in _asked(self._order, call):
            try:
                reply = await self._transports[place].send(call, deadline)
            except ConnectionFailed as error:
                _next(self._order, call, place, error, last)
            else:
                if reply.status != 503 or last:
                    return reply
        raise AssertionError("no front was asked")

    async def close(self) -> None:
        """See AsyncTransport."""
        for transport in self._transports:
            await transport.close()
