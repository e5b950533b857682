"""A job in memory: receives specifications and journal rows, hands on states, what may start, and documents.

Pure: the time is an argument, nothing here waits or computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from service.batch import Rate
from service.journal import JobRow, StepRow
from service.messages import Params

QUEUED, RUNNING, DONE, FAILED, CANCELLED, SKIPPED = (
    *("queued", "running", "done", "failed", "cancelled", "skipped"),
)
ENDED = frozenset({DONE, FAILED, CANCELLED, SKIPPED})


class Input(msgspec.Struct, frozen=True):
    """An operand: a stored content by its id, or the result of an earlier step."""

    content: str = ""
    step: str = ""


class Spec(msgspec.Struct, frozen=True):
    """What a step computes. `inputs` by operand name; the result of `dtype` and `shape` goes to `handle`.

    `deadline` is seconds of the epoch: it holds across a restart, as `rate` does, the quota of the key that handed the
    job in, from which its `flops` are taken.
    """

    id: str
    inputs: dict[str, Input]
    params: Params
    dtype: str
    shape: tuple[int, ...]
    handle: str | None = None
    ttl_seconds: float | None = None
    deadline: float | None = None
    priority: int = 0
    rate: Rate | None = None
    flops: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        """Earlier steps whose results it reads."""
        return frozenset(operand.step for operand in self.inputs.values() if operand.step)


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Spec).decode


@dataclass(slots=True, eq=False)
class Step:
    """A step and how far it is."""

    spec: Spec
    row: StepRow
    state: str = QUEUED

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED

    def document(self) -> dict[str, Any]:
        """What is told of it."""
        row = self.row
        told: dict[str, Any] = {"id": self.spec.id, "state": self.state}
        if self.state == DONE:
            told |= {"dtype": self.spec.dtype, "shape": self.spec.shape, "variant": row.variant}
            told |= {"reason": row.reason, "why": row.why, "queue_seconds": row.queue_seconds}
            told["compute_seconds"] = row.compute_seconds
            if self.spec.handle is not None:
                told["out"] = {"handle": self.spec.handle}
        if row.code:
            told |= {"code": row.code, "detail": row.detail}
        return told


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """A job and its steps in their order. `changed` is set, and replaced, at each change."""

    id: str
    owner: str
    accepted: float
    steps: dict[str, Step]
    state: str = QUEUED
    finished: float | None = None
    expired: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, row: JobRow) -> Job:
        """From the journal."""
        steps = [Step(_decode(step.spec), step, step.state) for step in row.steps]
        by_id = {step.spec.id: step for step in steps}
        return cls(row.id, row.owner, row.accepted, by_id, row.state, row.finished, row.expired)

    def update(self, row: JobRow) -> None:
        """Stand as the journal has it now."""
        for step, recorded in zip(self.steps.values(), row.steps, strict=True):
            step.row, step.state = recorded, recorded.state
        self.state, self.finished, self.expired = row.state, row.finished, row.expired

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ENDED

    def change(self) -> None:
        """Wake who watches."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def startable(self) -> Iterator[Step]:
        """Queued steps whose inputs are there."""
        for step in self.steps.values():
            if step.state == QUEUED and all(self.steps[id_].state == DONE for id_ in step.spec.needs):
                yield step

    def dependents(self, failed: Iterable[Step]) -> list[Step]:
        """Steps that can't be computed any more because these failed, directly or through others."""
        gone = {step.spec.id for step in failed}
        skipped = []
        for step in self.steps.values():  # a step names earlier ones only, so one pass finds all
            if step.state == QUEUED and step.spec.needs & gone:
                gone.add(step.spec.id)
                skipped.append(step)
        return skipped

    def inputs(self) -> set[str]:
        """Stored contents that its steps read."""
        return {
            operand.content
            for step in self.steps.values()
            for operand in step.spec.inputs.values()
            if operand.content
        }

    def end(self, states: Iterable[str]) -> str:
        """Its own state once its steps' are `states`; "" while one goes on."""
        known = set(states)
        if not known <= ENDED:
            return ""
        return CANCELLED if CANCELLED in known else FAILED if FAILED in known else DONE

    def document(self, ttl: float) -> dict[str, Any]:
        """What is told of it, its steps included."""
        return self.summary(ttl) | {"steps": [step.document() for step in self.steps.values()]}

    def summary(self, ttl: float) -> dict[str, Any]:
        """What a list tells of it. Results are there until `expires`."""
        counts: dict[str, int] = {}
        for step in self.steps.values():
            counts[step.state] = counts.get(step.state, 0) + 1
        expires = None if self.finished is None else self.finished + ttl
        return {
            "id": self.id,
            "state": self.state,
            "accepted": self.accepted,
            "finished": self.finished,
            "expires": expires,
            "counts": counts,
        }


def rows_of(specs: Iterable[Spec]) -> tuple[StepRow, ...]:
    """Rows of new steps."""
    return tuple(StepRow(position, _encode(spec)) for position, spec in enumerate(specs))
