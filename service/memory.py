"""What operands lie in, as the worker sees it: receives the arena and clients' regions, hands on their bytes.

A region is a sealed memfd of a client on this machine. Its seals keep it from shrinking, so reading it can't
raise SIGBUS; what the client writes meanwhile changes its own result and nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from service.arena import Arena
from service.messages import Item, ItemDone, Map, Operand


class Memory:
    """The arena, and the regions that are mapped now."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._regions: dict[int, memoryview] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def map(self, message: Map, descriptor: int) -> memoryview:
        """Map a region, whose descriptor is closed here. Raises OSError or ValueError where that can't be done."""
        try:
            made = mmap.mmap(descriptor, message.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self._maps[message.region] = made
        self._regions[message.region] = memoryview(made)
        return self._regions[message.region]

    def unmap(self, region: int) -> None:
        """Let a region go; arrays that still refer to it keep the mapping until they are gone."""
        view = self._regions.pop(region, None)
        if view is not None:
            with contextlib.suppress(BufferError):
                view.release()
                self._maps[region].close()
            del self._maps[region]

    def holds(self, region: int) -> bool:
        """Whether operands in this region can be read."""
        return region == 0 or region in self._regions

    def view(self, operand: Operand) -> memoryview:
        """An operand's bytes."""
        if operand.region == 0:
            return self.arena.view(operand.offset, operand.nbytes)
        whole = self._regions[operand.region]
        if operand.offset < 0 or operand.nbytes < 0 or operand.offset + operand.nbytes > len(whole):
            raise ValueError(f"an operand lies outside its region of {len(whole)} bytes")
        return whole[operand.offset : operand.offset + operand.nbytes]


def operands_of(item: Item) -> list[Operand]:
    """All tensors of an item, D among them."""
    return [x for x in (item.a, item.b, item.out, item.c, item.bias) if x is not None]


def unmapped(item: Item) -> ItemDone:
    """The outcome of an item whose memory this worker has not."""
    return ItemDone(item.id, "no_room", "the worker can't map the memory that holds an operand")
