"""Results that only a GPU has, on their way to the arena: receives what the front fetches, tells when each is there.

Copies are queued on a stream that no reply waits for, and end in the order in which they were asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from service.drivers.moves import Moves
from service.drivers.resident import Cache
from service.messages import Operand


@dataclass(slots=True)
class _Copy:
    """A copy that is queued: who is to be told, the event after it, and the tensor, which must stay so long."""

    fetched: Callable[[str], None]
    ended: Any
    source: Any


class Fetches:
    """Copies of one GPU's results; for one thread."""

    def __init__(self, torch: Any, stream: Any, cache: Cache, moves: Moves) -> None:
        self._torch = torch
        self._stream = stream
        self._cache = cache
        self._moves = moves
        self._copies: deque[_Copy] = deque()

    def begin(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """Queue a copy. `fetched` is told "" once it is there, or at once why it can't be."""
        source = self._cache.get(operand.tensor)
        if source is None:
            fetched("the device doesn't have it")
            return
        with self._torch.cuda.stream(self._stream):
            self._moves.here(operand).copy_(source, non_blocking=True)
            ended = self._torch.cuda.Event()
            ended.record(self._stream)
        self._copies.append(_Copy(fetched, ended, source))

    def advance(self) -> bool:
        """Tell of copies that have ended; whether others have not. RuntimeError after a device error."""
        while self._copies and self._copies[0].ended.query():
            self._copies.popleft().fetched("")
        return bool(self._copies)
