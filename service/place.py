"""Which worker runs a batch: receives its work and what each worker has, hands on the cheapest place, and why.

Pure. A place costs the seconds queued there plus the seconds to bring the stored tensors that it lacks. So work
goes where its handles are, until waiting there would take longer than a copy; then they are replicated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from service.batch import Work
from service.messages import Operand

#: Bytes a second from the page-locked arena into a GPU: PCIe 5 ×16, as measured on an H200.
TRANSFER = 5e10


class Why(StrEnum):
    """Reasons of a placement: a closed set, for gemm_placements_total."""

    ONLY = "only"  # no other worker had room
    RESIDENT = "resident"  # its handles are there
    LEAST_QUEUED = "least_queued"  # no handles, or nowhere resident
    REPLICATED = "replicated"  # its handles are elsewhere, but waiting there would take longer than a copy


class Residency:
    """Stored tensors that a worker's device is taken to hold, least recently used first out."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.nbytes = 0
        self._held: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._held

    def note(self, operand: Operand) -> None:
        """The device was sent this tensor."""
        if operand.tensor in self._held:
            self._held.move_to_end(operand.tensor)
            return
        if operand.nbytes > self.budget:
            return
        self._held[operand.tensor] = operand.nbytes
        self.nbytes += operand.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self._held.popitem(last=False)[1]

    def forget(self, tensors: Iterable[str]) -> None:
        """These are gone."""
        for tensor in tensors:
            self.nbytes -= self._held.pop(tensor, 0)


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker with room for a batch. `residency` None: it computes where the arena is, so nothing is moved."""

    index: int
    queued_seconds: float
    residency: Residency | None = None


def missing(work: Work, residency: Residency | None) -> int:
    """Bytes of stored operands that a device lacks."""
    return 0 if residency is None else sum(x.nbytes for x in work.stored if x.tensor not in residency)


def place(work: Work, seats: Sequence[Seat]) -> tuple[int, Why]:
    """The cheapest seat's index, and why it. `seats` are those with room, at least one."""
    if len(seats) == 1:
        return seats[0].index, Why.ONLY
    costs = [seat.queued_seconds + missing(work, seat.residency) / TRANSFER for seat in seats]
    best = seats[costs.index(min(costs))]
    if not work.stored or all(missing(work, seat.residency) for seat in seats):
        return best.index, Why.LEAST_QUEUED
    return best.index, Why.REPLICATED if missing(work, best.residency) else Why.RESIDENT
