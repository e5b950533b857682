"""A batch on a GPU: receives what is launched for it, hands on its `BatchDone` once its last copy has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels import cublas
from kernels.operands import Operands
from kernels.runtime import Repeated
from kernels.selector import Choice
from service.messages import Batch, BatchDone, Item, ItemDone


@dataclass(slots=True)
class Run:
    """Items that one launch computes, their FLOPs, and the events around it."""

    items: Sequence[Item]
    choice: Choice
    flops: int
    begun: Any
    ended: Any


@dataclass(slots=True)
class Stay:
    """Operands that stay where they are, in clients' device memory, and the product that was computed of them last."""

    operands: Operands
    product: Repeated | None = None


@dataclass(slots=True)
class Moved:
    """Items of one launch and their operands in device memory; `stay` where these weren't moved there."""

    items: Sequence[Item]
    operands: Operands
    stay: Stay | None = None


@dataclass(slots=True)
class Flight:
    """A batch in the lanes. `taken` is when the worker got it (CLOCK_MONOTONIC seconds).

    `held` keeps device memory until the last copy is done; `kept` are items whose D stays; `marks` are events: begun
    and arrived around copies in (absent where all operands were there), computed, left. `events` are all that it uses,
    which are others' once it was told of.
    """

    batch: Batch
    done: Callable[[BatchDone], None]
    taken: float = field(default_factory=time.monotonic)
    ended: dict[int, ItemDone] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    marks: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    _items: tuple[ItemDone, ...] = ()

    def refuse(self, items: Iterable[Item], code: str, detail: str) -> None:
        """These items end without a product."""
        for item in items:
            self.ended[item.id] = ItemDone(item.id, code, detail)

    @property
    def over(self) -> bool:
        """Whether its last copy has ended. RuntimeError after a device error."""
        return bool(self.marks["left"].query())

    @property
    def suspects(self) -> set[str]:
        """Own variants that it runs."""
        return {run.choice.variant for run in self.runs} - {cublas.NAME}

    @property
    def stuck(self) -> str:
        """Variant of its first launch that has not ended."""
        return next((run.choice.variant for run in self.runs if not run.ended.query()), cublas.NAME)

    def launched(self) -> None:
        """All is queued: word what doesn't hang on how long it takes, while the device computes."""
        for run in self.runs:
            choice = run.choice
            variant, reason, why = choice.variant, choice.reason.value, choice.why
            for item in run.items:
                if item.id not in self.ended:
                    kept = item.id in self.kept
                    self.ended[item.id] = ItemDone(item.id, "", "", variant, reason, why, kept)
        self._items = tuple(self.ended[item.id] for item in self.batch.items)

    def outcome(self) -> BatchDone:
        """How it went; to be asked once it is over."""
        marks = self.marks
        flops: dict[str, float] = {}
        busy: dict[str, float] = {}
        for run in self.runs:
            variant = run.choice.variant
            flops[variant] = flops.get(variant, 0.0) + run.flops
            busy[variant] = busy.get(variant, 0.0) + run.begun.elapsed_time(run.ended) / 1e3
        seconds = {
            "copy_in": marks["begun"].elapsed_time(marks["arrived"]) / 1e3 if "begun" in marks else 0.0,
            "kernel": sum(busy.values()),
            "copy_out": (
                0.0
                if marks["left"] is marks["computed"]
                else marks["computed"].elapsed_time(marks["left"]) / 1e3
            ),
        }
        host = max(0.0, time.monotonic() - self.taken - sum(seconds.values()))
        return BatchDone(self.batch.id, self._items, seconds, flops, busy, host)
