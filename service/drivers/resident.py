"""Stored tensors in a GPU's memory: receives them by content, hands them on until they are dropped or forgotten.

Those that the arena has too leave when room is short, least recently used first. A product that is nowhere else
stays until the front has fetched it or needs it no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

#: Share of the budget that products may take which are nowhere else; what is beyond goes to the arena at once.
SOLE_SHARE = 0.5


class Cache:
    """Tensors by content, within `budget` bytes. Not safe for threads: its driver has a lock."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        #: Bytes of those that are nowhere else.
        self.sole_nbytes = 0
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._sole: set[str] = set()

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._kept

    def get(self, tensor: str) -> Any | None:
        """The device tensor, or None."""
        kept = self._kept.get(tensor)
        if kept is not None:
            self._kept.move_to_end(tensor)
        return kept

    def put(self, tensor: str, value: Any) -> None:
        """Keep a copy of what the arena has; what was used longest ago goes."""
        if value.nbytes <= self.budget - self.sole_nbytes and tensor not in self._kept:
            self._add(tensor, value)

    def takes(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes that are nowhere else."""
        return self.sole_nbytes + nbytes <= self.budget * SOLE_SHARE

    def keep(self, tensor: str, value: Any) -> None:
        """Keep the only copy of a product that `takes` allowed."""
        self.forget([tensor])
        self._sole.add(tensor)
        self.sole_nbytes += value.nbytes
        self._add(tensor, value)

    def settled(self, tensors: Iterable[str]) -> None:
        """The arena has these too now."""
        for tensor in tensors:
            if tensor in self._sole:
                self._sole.discard(tensor)
                self.sole_nbytes -= self._kept[tensor].nbytes

    def shrink(self, nbytes: int) -> None:
        """Drop tensors until at most `nbytes` are kept, or only those that are nowhere else."""
        if self.nbytes <= nbytes:
            return
        for tensor in [tensor for tensor in self._kept if tensor not in self._sole]:
            self.nbytes -= self._kept.pop(tensor).nbytes
            if self.nbytes <= nbytes:
                return

    def forget(self, tensors: Iterable[str]) -> None:
        """Drop these."""
        tensors = list(tensors)
        self.settled(tensors)
        for tensor in tensors:
            gone = self._kept.pop(tensor, None)
            if gone is not None:
                self.nbytes -= gone.nbytes

    def _add(self, tensor: str, value: Any) -> None:
        self._kept[tensor] = value
        self.nbytes += value.nbytes
        self.shrink(self.budget)
