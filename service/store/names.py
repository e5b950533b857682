"""Names of stored tensors: receives owners and names, hands on what they mean, in pages, and what expired.

Each owner has a namespace of its own. Pure: the time is an argument.
"""

from __future__ import annotations

import bisect
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def valid(name: str) -> bool:
    """Whether a tensor may be called so."""
    return NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Named(Generic[C]):
    """What a name means. Times are seconds of the epoch; `expires` None never does."""

    owner: str
    name: str
    content: C
    created: float
    expires: float | None

    def live(self, now: float) -> bool:
        """Whether its time hasn't come."""
        return self.expires is None or now < self.expires


class Names(Generic[C]):
    """All names, by owner and in order."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], Named[C]] = {}
        self._order: dict[str, list[str]] = {}
        self._expiring: list[tuple[float, str, str]] = []

    def get(self, owner: str, name: str, now: float | None = None) -> Named[C] | None:
        """What the name means, unless it expired by `now`."""
        named = self._named.get((owner, name))
        return named if named is not None and (now is None or named.live(now)) else None

    def set(self, named: Named[C]) -> C | None:
        """Let it mean this; returns what it meant before."""
        key = (named.owner, named.name)
        before = self._named.get(key)
        if before is None:
            bisect.insort(self._order.setdefault(named.owner, []), named.name)
        self._named[key] = named
        if named.expires is not None:
            heapq.heappush(self._expiring, (named.expires, *key))
        return None if before is None else before.content

    def remove(self, named: Named[C]) -> bool:
        """Forget it, if it is still what the name means."""
        key = (named.owner, named.name)
        if self._named.get(key) is not named:
            return False
        del self._named[key]
        order = self._order[named.owner]
        del order[bisect.bisect_left(order, named.name)]
        if not order:
            del self._order[named.owner]
        return True

    def page(self, owner: str, after: str, limit: int, now: float) -> tuple[list[Named[C]], str | None]:
        """Up to `limit` of the owner's names that follow `after`; and what to pass for the next page."""
        order = self._order.get(owner, [])
        found: list[Named[C]] = []
        for name in order[bisect.bisect_right(order, after) :]:
            named = self._named[owner, name]
            if not named.live(now):
                continue
            if len(found) == limit:
                return found, found[-1].name
            found.append(named)
        return found, None

    def expired(self, now: float) -> Iterator[Named[C]]:
        """Names whose time has come, each once."""
        while self._expiring and self._expiring[0][0] <= now:
            _, owner, name = heapq.heappop(self._expiring)
            named = self._named.get((owner, name))
            if named is not None and not named.live(now):
                yield named
