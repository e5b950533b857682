"""Finds races: receives accesses and synchronization as they happen, hands on findings.

Happens-before is kept as sets of *nodes*. A node is a stretch of a warp between two releases, or one
asynchronous operation (each engine operation is a thread of its own). A warp's clock is the set of nodes
whose effects it may rely on, kept as the bits of a Python int: joining clocks is `|`. Each two bytes of
memory remember who wrote them last and who has read them since.

A warp counts as one thread: races between its own lanes are not seen. Memory is sequentially consistent here,
so what only a weaker memory model would show isn't seen either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.virtual.report import Finding

GRANULE = 2  # bytes: neighbouring 16-bit elements may belong to different warps
_MOST_FINDINGS = 16

Clock = tuple[int, int]  # (nodes seen, nodes whose generic writes the async proxy may see)
NOTHING: Clock = (0, 0)


def join(a: Clock, b: Clock) -> Clock:
    """What either has seen."""
    return (a[0] | b[0], a[1] | b[1])


@dataclass(frozen=True, slots=True)
class Access:
    """Who touched memory: the node, and for the report the place in the kernel."""

    node: int
    generic: bool
    who: str
    where: str


class Shadow:
    """What the detector knows of one memory: access numbers of the last writer and the readers since."""

    def __init__(self, name: str, nbytes: int, base: int) -> None:
        self.name = name
        self.base = base  # address of the first byte, for reports
        granules = -(-nbytes // GRANULE)
        self.writer: np.ndarray = np.zeros(granules, np.int32)
        self.readers: np.ndarray = np.zeros(granules, np.int32)  # number of a set of readers

    def locate(self, granule: int) -> str:
        """A place, for reports."""
        return f"column {granule}" if self.writer.ndim == 2 else hex(self.base + granule * GRANULE)

    def fold(self, columns: int) -> None:
        """Make it two-dimensional: tensor memory, a column a word."""
        self.writer = self.writer.reshape(-1, columns)
        self.readers = self.readers.reshape(-1, columns)


Place = Any  # slice or index array, in granules


class Detector:
    """Tables of nodes, accesses and reader sets."""

    def __init__(self) -> None:
        self.nodes = 1
        self.accesses: list[Access | None] = [None]
        self.numbers: dict[tuple[int, int, bool, str], int] = {}
        self.sets: list[frozenset[int]] = [frozenset()]
        self.set_numbers: dict[frozenset[int], int] = {frozenset(): 0}
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def node(self) -> int:
        """Number of a new node."""
        self.nodes += 1
        return self.nodes - 1

    def access(self, node: int, at: int, generic: bool, who: str, where: str) -> int:
        """Number of an access; the same for all that one instruction does within one node."""
        key = (node, at, generic, who)
        number = self.numbers.get(key)
        if number is None:
            number = self.numbers[key] = len(self.accesses)
            self.accesses.append(Access(node, generic, who, where))
        return number

    # A place may name a granule several times; what is stored is the same for all.

    def read(
        self, shadow: Shadow, place: Place, number: int, clock: Clock, *, fence: str = "fence.proxy.async"
    ) -> None:
        """A read: the last writer must be known to the reader. `fence`: what another proxy needs besides."""
        for writer in _distinct(shadow.writer[place]):
            if writer:
                self._ordered(shadow, place, writer, number, clock, "writes", "reads", fence)
        before = shadow.readers[place]
        old = _distinct(before)
        if len(old) == 1:
            shadow.readers[place] = self._with_reader(old[0], number, clock)
        else:
            new = np.empty_like(before)
            for each in old:
                new[before == each] = self._with_reader(each, number, clock)
            shadow.readers[place] = new

    def write(self, shadow: Shadow, place: Place, number: int, clock: Clock, *, same: bool = False) -> bool:
        """A write: the last writer and all readers since must be known to the writer.

        `same`: it leaves what was there; the same instruction of another warp may have written that without an
        order (true is handed back).
        """
        again = False
        for writer in _distinct(shadow.writer[place]):
            if writer and writer != number:
                if same and not self._known(writer, clock[0]) and self._alike(writer, number):
                    again = True
                    continue
                self._ordered(shadow, place, writer, number, clock, "writes", "writes")
        for each in _distinct(shadow.readers[place]):
            for reader in self.sets[each]:
                self._ordered(shadow, place, reader, number, clock, "reads", "writes")
        shadow.writer[place] = number
        shadow.readers[place] = 0
        return again

    def _alike(self, first: int, second: int) -> bool:
        a, b = self.accesses[first], self.accesses[second]
        return a is not None and b is not None and a.where == b.where

    def users(self, shadow: Shadow, place: Place) -> list[int]:
        """Numbers of the accesses that memory remembers."""
        numbers = {w for w in _distinct(shadow.writer[place]) if w}
        return sorted(numbers.union(*(self.sets[each] for each in _distinct(shadow.readers[place]))))

    def known(self, number: int, clock: Clock) -> bool:
        """Whether an access is known to be over."""
        return self._known(number, clock[0])

    def _with_reader(self, old: int, number: int, clock: Clock) -> int:
        """The set with one reader more, without those that the new one follows."""
        if number in self.sets[old]:
            return old
        seen = clock[0]
        kept = [r for r in self.sets[old] if not self._known(r, seen)]
        members = frozenset([*kept, number])
        found = self.set_numbers.get(members)
        if found is None:
            found = self.set_numbers[members] = len(self.sets)
            self.sets.append(members)
        return found

    def _known(self, number: int, seen: int) -> bool:
        access = self.accesses[number]
        assert access is not None
        return bool(seen >> access.node & 1)

    def _ordered(
        self, shadow: Shadow, place: Place, first: int, second: int, clock: Clock, did: str, does: str,
        fence: str = "fence.proxy.async",
    ) -> None:  # fmt: skip
        a, b = self.accesses[first], self.accesses[second]
        assert a is not None
        assert b is not None
        if not clock[0] >> a.node & 1:
            self._find("race", shadow, place, a, b, did, does, "nothing orders the first before the second")
        elif a.generic and not b.generic and did == "writes" and not clock[1] >> a.node & 1:
            missing = f"ordered, but no {fence} between the generic write and the asynchronous access"
            self._find("proxy fence", shadow, place, a, b, did, does, missing)

    def _find(
        self, kind: str, shadow: Shadow, place: Place, a: Access, b: Access, did: str, does: str, missing: str
    ) -> None:
        key = (kind, a.where, b.where)
        if key in self.findings or len(self.findings) >= _MOST_FINDINGS:
            return
        where = place[-1] if isinstance(place, tuple) else place
        granule = where.start if isinstance(where, slice) else int(np.min(where))
        text = (
            f"{shadow.name} at {shadow.locate(granule)}: {a.who} {did} at {a.where}, "
            f"then {b.who} {does} at {b.where}; missing edge: {missing}"
        )
        self.findings[key] = Finding(kind, text)


def _distinct(values: np.ndarray) -> list[int]:
    """The different values, quickly where there is one."""
    if values.size == 0:
        return []
    first = values.flat[0]
    if (values == first).all():
        return [int(first)]
    return np.unique(values).tolist()  # type: ignore[no-any-return]
