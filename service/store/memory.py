"""The memory tier: receives arena slots that hold stored tensors, frees them, least recently used first.

A tensor in use stays; one that isn't on disk yet stays as long as its write can still succeed. The tier is
for the front's loop alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from service.arena import Slot, Slots
from service.errors import ServiceError


class Backing(Enum):
    """What the disk has of a resident: its file; its file soon; nothing, for it refused the write."""

    WRITTEN = 0
    WRITING = 1
    REFUSED = 2


@dataclass(slots=True)
class Resident:
    """A tensor's bytes in the arena. `users` are the requests that compute with it."""

    slot: Slot
    users: int = 0
    backing: Backing = Backing.WRITTEN


class Memory:
    """Residents by content id within `budget` bytes; more only while they are in use, and until the next one comes.

    `lost` is called with a content whose only copy had to go because the arena was short.
    """

    def __init__(self, slots: Slots, budget: int, lost: Callable[[str], None]) -> None:
        self.slots = slots
        self.budget = budget
        self.nbytes = 0
        self._lost = lost
        self._residents: OrderedDict[str, Resident] = OrderedDict()

    def get(self, content: str) -> Resident | None:
        """The resident, now the most recently used."""
        resident = self._residents.get(content)
        if resident is not None:
            self._residents.move_to_end(content)
        return resident

    def peek(self, content: str) -> Resident | None:
        """The resident, its place in the order unchanged."""
        return self._residents.get(content)

    def allocate(self, nbytes: int) -> Slot:
        """A slot of state "tensor"; evicts what it must. ServiceError no_room where all is in use."""
        self.reclaim(nbytes)
        return self.slots.allocate(nbytes, state="tensor")

    def add(self, content: str, slot: Slot, backing: Backing = Backing.WRITTEN) -> Resident:
        """Take over a reference of the slot."""
        resident = self._residents[content] = Resident(slot, backing=backing)
        self.nbytes += slot.capacity
        return resident

    def remove(self, content: str) -> None:
        """Free the content's memory, if it has any."""
        resident = self._residents.pop(content, None)
        if resident is not None:
            self.nbytes -= resident.slot.capacity
            resident.slot.release()

    def trim(self) -> None:
        """Evict down to the budget what the disk has."""
        while self.nbytes > self.budget and self._evict(Backing.WRITTEN):
            pass

    def reclaim(self, nbytes: int) -> int:
        """Evict until the arena has a piece of `nbytes`, unless all is too little; returns bytes freed."""
        before = self.nbytes
        if self._fits(nbytes):
            return 0
        evictable = sum(
            resident.slot.capacity
            for resident in self._residents.values()
            if resident.users == 0 and resident.backing is not Backing.WRITING
        )
        while nbytes <= self.slots.free + evictable and not self._fits(nbytes):
            if not self._evict(Backing.WRITTEN) and not self._evict(Backing.REFUSED):
                break
        return before - self.nbytes

    def _fits(self, nbytes: int) -> bool:
        try:
            self.slots.allocate(nbytes, state="tensor").release()
        except ServiceError:
            return False
        return True

    def _evict(self, backing: Backing) -> bool:
        for content, resident in self._residents.items():
            if resident.users == 0 and resident.backing is backing:
                self.remove(content)
                if backing is Backing.REFUSED:
                    self._lost(content)
                return True
        return False
