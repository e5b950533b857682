"""What a traced Step 9 tells: receives its marks, hands on lanes as the virtual GPU names them, and measures.

The same marks come from the hardware and from the virtual GPU, so that one can be held against the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.hopper.marks import CONSUMER, MARKS, Mark
from kernels.perfetto import Span

Array = np.ndarray[Any, np.dtype[Any]]
CONSUMERS = 2
NEAR = 256  # cycles that the warp that watches may see a barrier flip late: 131 on an H200
BLOCK = 1024  # cycles that the tensor cores take for a block of K at 128×256


@dataclass(frozen=True, slots=True)
class Timeline:
    """One cluster's marks, in cycles since it was assembled.

    `cycles` int64 [tile, rank, k, MARKS]: tiles in the order in which this cluster computed them; on each SM from
    its own zero. `clock_hz` as counted against the nanoseconds that the device told.
    """

    cycles: Array
    clock_hz: float
    sms: tuple[int, ...]

    @staticmethod
    def of(marks: Array, clusters: int, clock_hz: float | None = None) -> Timeline:
        """The first cluster's of int64 [tiles, ranks, k, MARKS]; ValueError where a mark is missing."""
        own = np.asarray(marks, np.int64)[::clusters]
        if own.shape[-1] != MARKS:
            raise ValueError(f"{own.shape[-1]} marks a place, not {MARKS}")
        used = [
            *range(Mark.MMA_DONE + 1),
            *(Mark(m) + CONSUMER for m in range(Mark.MMA_WAITS, Mark.MMA_DONE + 1)),
        ]
        whole = [
            Mark.LAST_DONE,
            Mark.WRITTEN,
            Mark.LAST_DONE + CONSUMER,
            Mark.WRITTEN + CONSUMER,
            Mark.STARTED,
        ]
        if not (own[..., used].all() and own[:, :, 0][..., whole].all()):
            raise ValueError("some role left no mark")
        start = own[0, :, 0, Mark.STARTED]
        if clock_hz is None:
            passed = own[-1, 0, 0, Mark.ENDED] - start[0]
            told = own[-1, 0, 0, Mark.NANOSECONDS_AT_END] - own[0, 0, 0, Mark.NANOSECONDS_AT_START]
            clock_hz = float(passed) / float(told) * 1e9
        sms = tuple(int(sm) for sm in own[0, :, 0, Mark.SM])
        return Timeline(own - start[None, :, None, None], clock_hz, sms)

    @property
    def ranks(self) -> int:
        """CTAs of the cluster, each on an SM."""
        return int(self.cycles.shape[1])

    def blocks(self, rank: int) -> Array:
        """int64 [tile · k, MARKS]: every block of K that this CTA met, in order."""
        return self.cycles[:, rank].reshape(-1, MARKS)

    def products(self, rank: int, consumer: int) -> Array:
        """int64 [tile · k, 2]: from when a consumer's wgmma group could run to when it was seen complete."""
        shift = consumer * CONSUMER
        tiles = []
        for tile in self.cycles[:, rank]:
            done = np.append(tile[1:, Mark.MMA_DONE + shift], tile[0, Mark.LAST_DONE + shift])
            may = tile[:, Mark.MMA_MAY + shift].copy()
            may[1:] = np.maximum(may[1:], done[:-1])
            tiles.append(np.stack([may, done], 1))
        return np.concatenate(tiles)

    def busy(self, rank: int = 0) -> float:
        """Share of the time, from the first load to the last store, in which some wgmma group was under way."""
        spans = np.concatenate([self.products(rank, c) for c in range(CONSUMERS)])
        begin = self.blocks(rank)[0, Mark.LOAD_ASKED]
        written = self.cycles[-1, rank, 0, [Mark.WRITTEN, Mark.WRITTEN + CONSUMER]]
        return _covered(spans) / float(written.max() - begin)

    def steady(self, rank: int = 0) -> float:
        """The same from the first product to the last of the first tile: neither fill nor write-back."""
        k = self.cycles.shape[2]
        spans = np.concatenate([self.products(rank, c)[:k] for c in range(CONSUMERS)])
        return _covered(spans) / float(spans[:, 1].max() - spans[:, 0].min())

    def events(self, rank: int = 0) -> dict[tuple[str, int], float]:
        """When each handoff of each block of K happened, by name and number."""
        found: dict[tuple[str, int], float] = {}
        for number, row in enumerate(self.blocks(rank)):
            found["load asked", number] = float(row[Mark.LOAD_ASKED])
            found["loaded", number] = float(row[Mark.LOADED])
        for consumer in range(CONSUMERS):
            for number, (_, done) in enumerate(self.products(rank, consumer)):
                may = self.blocks(rank)[number, Mark.MMA_MAY + consumer * CONSUMER]
                found[f"consumer {consumer} goes on", number] = float(may)
                found[f"product {consumer} done", number] = float(done)
        return found

    def spans(self) -> list[Span]:
        """Lanes as the virtual GPU names them: warps that matter, TMA, tensor core."""
        return [span for rank in range(self.ranks) for span in self._of_sm(rank)]

    def _of_sm(self, rank: int) -> Iterator[Span]:
        warp = f"CTA {rank},0,0 warp"
        rows = self.blocks(rank)
        for row in rows:
            yield Span(rank, f"{warp} 0", "waits for mma2tma", row[Mark.LOAD_WAITS], row[Mark.LOAD_MAY])
            yield Span(rank, f"{warp} 0", "runs", row[Mark.LOAD_MAY], row[Mark.LOAD_ASKED])
        free = 0.0
        for row in rows:  # each from when the one before has landed: one lane draws one at a time
            begin = max(float(row[Mark.LOAD_ASKED]), free)
            free = max(float(row[Mark.LOADED]), begin)
            yield Span(rank, "TMA", "load", begin, free)
        both = np.concatenate([self.products(rank, c) for c in range(CONSUMERS)])
        free = 0.0
        for may, done in both[np.argsort(both[:, 1], kind="stable")]:
            begin = max(float(may), free)
            free = max(float(done), begin)
            yield Span(rank, "tensor core", "wgmma", begin, free)
        for consumer in range(CONSUMERS):
            yield from self._of_consumer(rank, consumer, f"{warp} {4 * (1 + consumer)}")

    def _of_consumer(self, rank: int, consumer: int, lane: str) -> Iterator[Span]:
        shift = consumer * CONSUMER
        for tile in self.cycles[:, rank]:
            first, last = tile[0], tile[-1]
            for k, row in enumerate(tile):
                yield Span(
                    rank, lane, "waits for tma2mma", row[Mark.MMA_WAITS + shift], row[Mark.MMA_MAY + shift]
                )
                yield Span(rank, lane, "runs", row[Mark.MMA_MAY + shift], row[Mark.MMA_ASKED + shift])
                if k:
                    until = row[Mark.MMA_DONE + shift]
                    yield Span(rank, lane, "waits for the tensor core", row[Mark.MMA_ASKED + shift], until)
            done = first[Mark.LAST_DONE + shift]
            yield Span(rank, lane, "waits for the tensor core", last[Mark.MMA_DONE + shift], done)
            yield Span(rank, lane, "writes back", done, first[Mark.WRITTEN + shift])


def _covered(spans: Array) -> float:
    """Length of the union of [begin, end]."""
    length, until = 0.0, -np.inf
    for begin, end in spans[np.argsort(spans[:, 0], kind="stable")]:
        length += max(0.0, float(end - max(begin, until)))
        until = max(until, end)
    return length


def out_of_turn(timeline: Timeline, depth: int, rank: int = 0) -> list[str]:
    """What the barriers forbid and the marks show nevertheless: nothing, if both are right.

    A consumer may see a stage filled up to NEAR cycles before the warp that watches does.
    """
    at, count = timeline.events(rank), len(timeline.blocks(rank))
    wrong = []
    for n in range(count):
        rules = [("load asked", n, "loaded", n, 0)]
        for c in range(CONSUMERS):
            rules += [
                ("loaded", n, f"consumer {c} goes on", n, NEAR),
                (f"consumer {c} goes on", n, f"product {c} done", n, 0),
            ]
            if n + depth < count:
                rules.append((f"product {c} done", n, "load asked", n + depth, 0))
        wrong += [f"{b} {j} before {a} {i}" for a, i, b, j, slack in rules if at[b, j] + slack < at[a, i]]
    return wrong


def same_order(one: Timeline, other: Timeline, depth: int, rank: int = 0) -> float:
    """Share of the pairs of events, one to two laps of the ring apart in `one`, that `other` has in the same order.

    Within a lap of `depth` stages a role may run ahead as far as it can, so there only what `out_of_turn` holds
    has an order; beyond a lap everything has.
    """
    a, b = one.events(rank), other.events(rank)
    if a.keys() != b.keys():
        raise ValueError("the timelines are of different problems")
    x, y = np.array(list(a.values())), np.array([b[key] for key in a])
    apart = x[None, :] - x[:, None]
    near = (apart > depth * BLOCK) & (apart < 2 * depth * BLOCK)
    return float(np.mean((y[None, :] - y[:, None])[near] > 0))
