"""How long products will take: receives what batches took, hands on estimates, in seconds.

Pure: what was measured is an argument. A product takes an overhead, and then the longer of two times: that of its
FLOPs, and that of the bytes of its operands and result. What each of these costs is learnt apart, so small products,
which are all overhead, say nothing of large ones, nor one type of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.batch import Work

#: Seconds of work that a cost remembers: later ones outweigh what was before them.
MEMORY_SECONDS = 1.0
#: What a product costs at least, until one was seen: rather too much, or small ones would make rates look slow.
FIRST_OVERHEAD = 2e-4
#: Seconds of work that what the device promises of its rates stands for, until more was seen.
PROMISED_SECONDS = 1e-3
#: A batch counts as at most this factor away from what was expected: what is further was held up by something else.
MOST_RATIO = 16.0
#: FLOP/s of a type of which the device tells nothing.
UNKNOWN_FLOPS = 1e11


@dataclass(slots=True, eq=False)
class _Cost:
    """Seconds of one product, FLOP or byte; `seen`: the seconds of work, up to MEMORY_SECONDS, that say so."""

    seconds: float
    seen: float

    def learn(self, ratio: float, expected: float) -> None:
        """Work that was expected to cost `expected` seconds of this was in a batch that took `ratio` times as long.

        A mean of logarithms, weighted by what was expected: a pause of the machine in a short batch hardly counts.
        """
        bounded = min(max(ratio, 1 / MOST_RATIO), MOST_RATIO)
        self.seconds *= bounded ** (expected / (self.seen + expected))
        self.seen = min(self.seen + expected, MEMORY_SECONDS)


def _promised(rate: float) -> _Cost:
    return _Cost(1 / rate, PROMISED_SECONDS)


class Estimate:
    """Seconds that a product will take. Starts from the device's peaks: FLOP/s by type, and bytes a second."""

    def __init__(
        self, flops_per_second: Mapping[str, float] | None = None, bytes_per_second: float = 1e10
    ) -> None:
        self._overhead = _Cost(FIRST_OVERHEAD, FIRST_OVERHEAD)
        self._byte = _promised(bytes_per_second)
        peaks = flops_per_second or {}
        self._flop = defaultdict(
            lambda: _promised(UNKNOWN_FLOPS), {kind: _promised(peak) for kind, peak in peaks.items()}
        )

    def seconds(self, work: Work) -> float:
        """Estimated seconds on the device."""
        return self._overhead.seconds + self._bound(work)[1]

    def learn(self, works: Iterable[Work], seconds: float) -> None:
        """A batch of these took `seconds`, above 0. What it was expected to spend most on takes the blame."""
        expected: defaultdict[_Cost, float] = defaultdict(float)
        for work in works:
            cost, spent = self._bound(work)
            expected[cost] += spent
            expected[self._overhead] += self._overhead.seconds
        most = max(expected, key=expected.__getitem__)
        most.learn(seconds / sum(expected.values()), expected[most])

    def _bound(self, work: Work) -> tuple[_Cost, float]:
        """What bounds it beside the overhead, FLOPs or bytes, and for how many seconds."""
        flop = self._flop[work.kind]
        computing, reading = work.flops * flop.seconds, work.nbytes * self._byte.seconds
        return (flop, computing) if computing >= reading else (self._byte, reading)
