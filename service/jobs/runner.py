"""Runs one job: receives its steps, hands each that can start to the supervisor, and records how they end.

A step goes the way of a request: operands pinned in the arena, one Work, one result; the result is on disk
before the step counts as done. What passes (no worker yet, a full queue, no room now) is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from service import audit
from service.admit import Rates
from service.arena import Slot, Slots
from service.batch import DEFAULT_PRIORITY, Work
from service.errors import ServiceError
from service.formats import Tensor
from service.jobs.line import Line
from service.jobs.model import CANCELLED, DONE, FAILED, QUEUED, RUNNING, SKIPPED, Job, Spec, Step
from service.journal import Journal, LeaseLost, Progress, StepRow
from service.messages import Operand
from service.outcome import Outcome
from service.store import Binding, Hold, Pin, TensorStore

logger = logging.getLogger(__name__)

#: Seconds between tries: doubled from the first to the last.
FIRST_DELAY, LAST_DELAY = 0.05, 5.0
#: Seconds that a step waits for room (arena or disk) before it fails.
ROOM_PATIENCE = 300.0
#: Times that a step may end with its worker: each time the supervisor has tried twice.
WORKER_TRIES = 3
#: Seconds between looks for a worker.
WORKER_POLL = 0.2


class Supervisor(Protocol):
    """What computes."""

    @property
    def ready(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def rates(self) -> Rates: ...
    def work_id(self) -> int: ...
    async def submit(self, work: Work) -> Outcome: ...


@dataclass(slots=True)
class Parts:
    """What a runner works with. `permits` bounds the steps that hold memory at once, over all jobs; in `line` steps
    wait for their keys' quotas.
    """

    store: TensorStore
    slots: Slots
    supervisor: Supervisor
    journal: Journal
    permits: asyncio.Semaphore
    line: Line
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ended, not yet recorded. `hold` keeps its result."""

    step: Step
    row: StepRow
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a step was tried, and for how many seconds."""

    count: int
    seconds: float

    def delay(self, code: str) -> float | None:
        """Seconds until the next try after a refusal with `code`; None where another can't help."""
        delay = min(FIRST_DELAY * 2.0 ** min(self.count, 10), LAST_DELAY)
        if code in {"queue_full", "unavailable"}:
            return delay
        if code in {"no_room", "read_only"}:
            return delay if self.seconds < ROOM_PATIENCE else None
        if code == "no_worker":
            return delay if self.count < WORKER_TRIES else None
        return None


class Paused(Exception):
    """The service is shutting down: the step stays queued, for the next start."""


class Runner:
    """One job's run. `stop` is set to pause it; `cancel` ends the job, `abandon` leaves it to another front."""

    def __init__(self, job: Job, parts: Parts) -> None:
        self.job = job
        self.parts = parts
        self.stop = asyncio.Event()
        self._running: dict[asyncio.Task[Ending], Step] = {}
        self._cancelling = False
        self._abandoned = False

    def cancel(self) -> None:
        """Let no step go on, and record that the job is cancelled, also where it was pausing or hasn't begun."""
        self._cancelling = True
        for task in self._running:
            task.cancel()
        self.stop.set()

    def abandon(self) -> None:
        """Let the job be another front's."""
        self._abandoned = True
        self.stop.set()

    async def run(self) -> None:
        """Until all steps have ended, or `stop`. ServiceError where a cancellation can't be recorded."""
        stopping = asyncio.create_task(self.stop.wait())
        running = self._running
        try:
            while not self.job.ended:
                if not self.stop.is_set():
                    for step in list(self.job.startable()):
                        self._show(step, RUNNING)
                        running[asyncio.create_task(self._step(step))] = step
                await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self.stop.is_set():
                    await self._stop()
                    return
                ended = [task for task in running if task.done()]
                steps = {task: running.pop(task) for task in ended}
                await self._collect(steps)
        except LeaseLost:
            logger.warning("job %s is run by another front now", self.job.id)
            await _cancel(running)
        finally:
            stopping.cancel()

    async def _collect(self, ended: dict[asyncio.Task[Ending], Step]) -> None:
        """Record what ended."""
        endings = []
        for task, step in ended.items():
            error = task.exception()
            if isinstance(error, Paused):
                self._show(step, QUEUED)
                self.stop.set()
            elif error is not None:
                logger.error("a step failed in a way that nobody foresaw", exc_info=error)
                endings.append(self._failure(step, "internal", "an error that the service didn't foresee"))
            else:
                endings.append(task.result())
        if endings:
            await self._record(endings)

    async def _stop(self) -> None:
        """Let go of queued work; keep what was finished meanwhile; cancel the rest of the job if asked to."""
        if self._abandoned:
            raise LeaseLost
        if self._running:
            await asyncio.wait(self._running)
        finished = {task: step for task, step in self._running.items() if not task.cancelled()}
        await self._collect(finished)
        for step in self.job.steps.values():
            if step.state == RUNNING:
                self._show(step, QUEUED)
        if self._cancelling and not self.job.ended:
            await self._cancel_rest()

    async def _cancel_rest(self) -> None:
        """Tried once, for somebody waits for the answer."""
        now = self.parts.clock()
        rest = [step for step in self.job.steps.values() if not step.ended]
        endings = [Ending(step, replace(step.row, state=CANCELLED, finished=now)) for step in rest]
        try:
            await self._commit(endings, now)
        except ServiceError as error:
            detail = f"the cancellation couldn't be kept, so the job goes on: {error.detail}"
            raise ServiceError(error.code, detail, retry_after=error.retry_after) from error

    # Recording

    async def _record(self, endings: Sequence[Ending]) -> None:
        """Commit the endings, the steps that they make impossible, and the job's own end; then show them.

        A disk that refuses is asked again until it takes them, or the run is stopped: then they are computed again.
        """
        now = self.parts.clock()
        failed = [ending.step for ending in endings if ending.row.state == FAILED]
        skipped = [
            Ending(step, replace(step.row, state=SKIPPED, finished=now))
            for step in self.job.dependents(failed)
        ]
        endings = [*endings, *skipped]
        try:
            tries = 0
            while True:
                try:
                    await self._commit(endings, now)
                except ServiceError as error:
                    logger.warning("job %s can't be recorded yet: %s", self.job.id, error.detail)
                    if await self._stopped_within(Tries(tries, 0.0).delay("queue_full") or LAST_DELAY):
                        return
                    tries += 1
                else:
                    return
        finally:
            for ending in endings:
                if ending.hold is not None:
                    ending.hold.release()

    async def _commit(self, endings: Sequence[Ending], now: float) -> None:
        job, store = self.job, self.parts.store
        after = {step.spec.id: step.state for step in job.steps.values()}
        after |= {ending.step.spec.id: ending.row.state for ending in endings}
        state = job.end(after.values())
        holds = [ending.hold for ending in endings if ending.hold is not None]
        bindings = [
            Binding(ending.step.spec.handle, ending.hold, ending.step.spec.ttl_seconds)
            for ending in endings
            if ending.hold is not None and ending.step.spec.handle is not None
        ]
        unneeded = job.inputs() if state else set()
        async with store.binding(job.owner, bindings) as names:
            await self.parts.journal.record(
                Progress(
                    job=job.id,
                    steps=[ending.row for ending in endings],
                    results=[hold.content.row for hold in holds],
                    names=names,
                    state=state,
                    finished=now if state else None,
                    unneeded=unneeded,
                )
            )
        for binding in bindings:
            audit.changed("store", binding.hold.content.row, binding.name)
        store.kept(holds)
        store.unkept(unneeded)
        for ending in endings:
            ending.step.row = ending.row
            ending.step.state = ending.row.state
        if state:
            job.state, job.finished = state, now
        job.change()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _show(self, step: Step, state: str) -> None:
        """A state that isn't recorded: after a restart the step is queued."""
        step.state = state
        if self.job.state == QUEUED and state == RUNNING:
            self.job.state = RUNNING
        self.job.change()

    def _failure(self, step: Step, code: str, detail: str) -> Ending:
        row = replace(step.row, state=FAILED, code=code, detail=detail, finished=self.parts.clock())
        return Ending(step, row)

    # Computing

    async def _step(self, step: Step) -> Ending:
        """Compute a step, trying again what may pass."""
        await self._pay(step.spec)
        async with self.parts.permits:
            began = time.monotonic()
            count = 0
            while True:
                if self.stop.is_set():
                    raise Paused
                try:
                    return await self._attempt(step)
                except ServiceError as error:
                    if error.code == "draining" or self.parts.supervisor.draining:
                        raise Paused from error
                    delay = Tries(count, time.monotonic() - began).delay(error.code)
                    if delay is None:
                        return self._failure(step, error.code, error.detail)
                    code = error.code
                await asyncio.sleep(delay)
                if code == "no_worker":
                    await self._worker()
                count += 1

    async def _pay(self, spec: Spec) -> None:
        """Wait until the key's quota permits the step's FLOPs: the job was accepted, so it isn't refused for them.

        A step whose deadline passes meanwhile takes none, for it is refused when it is admitted.
        """
        if spec.rate is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._remaining(spec)):
                await self.parts.line.pay(spec.rate, spec.flops, self.stop)

    def _remaining(self, spec: Spec) -> float | None:
        """Seconds until the step's deadline; None without one."""
        return None if spec.deadline is None else spec.deadline - self.parts.clock()

    async def _worker(self) -> None:
        """Wait for one, as long as it takes: the job was accepted."""
        supervisor = self.parts.supervisor
        while not (supervisor.ready or supervisor.draining or self.stop.is_set()):
            await asyncio.sleep(WORKER_POLL)

    async def _attempt(self, step: Step) -> Ending:
        parts, spec = self.parts, step.spec
        pins = await self._pin(step)
        try:
            nbytes = Tensor(spec.dtype, spec.shape).nbytes
            slot = self._allocate(nbytes)
        except BaseException:
            _release(pins.values())
            raise
        try:
            work = self._work(step, pins, Operand(slot.offset, nbytes, spec.dtype, spec.shape), slot.hold())
            outcome = await parts.supervisor.submit(work)
            hold = await parts.store.save(
                self.job.owner, slot, nbytes, spec.dtype, spec.shape, name=spec.handle or ""
            )
        finally:
            slot.release()
        row = replace(
            step.row,
            state=DONE,
            finished=parts.clock(),
            variant=outcome.variant,
            reason=outcome.reason,
            why=outcome.why,
            queue_seconds=outcome.queue_seconds,
            compute_seconds=outcome.compute_seconds,
            result=hold.content.row.id,
        )
        return Ending(step, row, hold)

    async def _pin(self, step: Step) -> dict[str, Pin]:
        """Operands in the arena."""
        pins: dict[str, Pin] = {}
        try:
            for name, operand in step.spec.inputs.items():
                content = operand.content or self.job.steps[operand.step].row.result
                assert content is not None, "a step began before its input was there"
                hold = await self.parts.store.hold_content(content)
                try:
                    pins[name] = await self.parts.store.contents.load(hold)
                finally:
                    hold.release()
        except BaseException:
            _release(pins.values())
            raise
        return pins

    def _allocate(self, nbytes: int) -> Slot:
        self.parts.store.reclaim(nbytes)
        return self.parts.slots.allocate(nbytes, owner=self.job.owner, state="reply")

    def _work(self, step: Step, pins: dict[str, Pin], out: Operand, held: Slot) -> Work:
        """The request. Whoever runs it lets go of the operands and its share of the slot."""

        def release() -> None:
            _release(pins.values())
            held.release()

        spec = step.spec
        remaining = self._remaining(spec)
        operands: dict[str, Any] = {name: pin.operand for name, pin in pins.items()}
        return Work(
            id=self.parts.supervisor.work_id(),
            out=out,
            params=spec.params,
            owner=self.job.owner,
            priority=spec.priority or DEFAULT_PRIORITY,
            deadline=None if remaining is None else time.monotonic() + remaining,
            release=release,
            **operands,
        )


async def _cancel(tasks: Collection[asyncio.Task[Ending]]) -> None:
    """End them, and let go of what those have that had ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None and (hold := task.result().hold) is not None:
            hold.release()


def _release(pins: Iterable[Pin]) -> None:
    for pin in pins:
        pin.release()
