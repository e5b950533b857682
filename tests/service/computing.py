"""A supervisor for tests of jobs: takes Work as the real one does, computes with numpy, fails as it is told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from service.admit import Rates
from service.arena import Slots
from service.batch import Work
from service.errors import ServiceError
from service.jobs import Jobs
from service.messages import Operand
from service.outcome import Outcome
from service.store import TensorStore
from tests.service.storing import Clock, Settings, open_store

DTYPES = {"fp32": np.float32, "fp64": np.float64, "fp16": np.float16}


@dataclass
class Computer:
    """`refusals` are raised first, one a submission; `gate` holds all products back while it is clear."""

    slots: Slots
    refusals: deque[str] = field(default_factory=deque)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = True
    draining: bool = False
    submitted: list[Work] = field(default_factory=list)
    computed: int = 0
    ids: int = 0
    rates: Rates = field(default_factory=Rates)

    def __post_init__(self) -> None:
        self.gate.set()

    def work_id(self) -> int:
        self.ids += 1
        return self.ids

    async def submit(self, work: Work) -> Outcome:
        self.submitted.append(work)
        try:
            if self.draining:
                raise ServiceError("draining", "shutting down")
            if self.refusals:
                raise ServiceError(self.refusals.popleft(), "as told")
            if work.params.variant == "none":
                raise ServiceError("unsupported", "there is no such variant")
            await self.gate.wait()
            self._compute(work)
        finally:
            work.release()
        self.computed += 1
        stages = {"admit": 0.0, "batch": 0.001, "kernel": 0.002}
        return Outcome("numpy", "reference", "because it is a test", 0.001, 0.002, 1, stages)

    def _compute(self, work: Work) -> None:
        a, b = self._array(work.a), self._array(work.b)
        params = work.params
        d = params.alpha * (a.swapaxes(-1, -2) if params.trans_a else a) @ (b.T if params.trans_b else b)
        if work.c is not None:
            d = d + params.beta * self._array(work.c)
        if work.bias is not None:
            d = d + self._array(work.bias)
        self._array(work.out)[...] = d

    def _array(self, operand: Operand) -> np.ndarray:
        view = self.slots.arena.view(operand.offset, operand.nbytes)
        return np.frombuffer(view, DTYPES[operand.dtype]).reshape(operand.shape)


@dataclass
class Front:
    """The parts that jobs work with."""

    jobs: Jobs
    store: TensorStore
    computer: Computer
    clock: Clock


@asynccontextmanager
async def open_front(
    settings: Settings, *, clock: Clock | None = None, computer: Computer | None = None
) -> AsyncIterator[Front]:
    """A started front; at its end it shuts down as the real one does."""
    clock = clock or Clock()
    async with open_store(settings, clock=clock) as store:
        computer = computer or Computer(store.contents.memory.slots)
        computer.slots = store.contents.memory.slots
        services = SimpleNamespace(settings=settings, slots=computer.slots, store=store, supervisor=computer)
        jobs = Jobs(services, clock=clock)
        await jobs.start()
        try:
            yield Front(jobs, store, computer, clock)
        finally:
            computer.draining = True
            computer.gate.set()
            await jobs.close()
