"""All jobs of a front: receives bodies, hands on jobs: accepted durably, run, watched, cancelled, expired.

An accepted job ends right whatever happens to the process: what isn't recorded as ended runs (again) after
the next start. One that has ended is in the journal alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from service.arena import Slots
from service.batch import Rate
from service.errors import ServiceError
from service.jobs.decode import Draft, Limits, Owner, decode
from service.jobs.line import Line
from service.jobs.model import DONE, Job, rows_of
from service.jobs.runner import Parts, Runner, Supervisor
from service.journal import JobRow, Journal, Key, KeySeen
from service.store import Hold, TensorStore
from service.turns import LARGE_JSON, parsing

logger = logging.getLogger(__name__)

#: Steps that compute, or wait for it, at once: enough for a full batch.
ACTIVE_STEPS = 64
SWEEP_SECONDS = 30.0


class Services(Protocol):
    """The parts that jobs use."""

    @property
    def settings(self) -> Limits: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def store(self) -> TensorStore: ...
    @property
    def supervisor(self) -> Supervisor: ...


class Jobs:
    """See the module."""

    def __init__(
        self, services: Services, journal: Journal | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.limits = services.settings
        self.store = services.store
        self.journal = journal or Journal(services.store.transactions)
        self.clock = clock
        self.pausing = False
        self._parts = Parts(
            services.store,
            services.slots,
            services.supervisor,
            self.journal,
            asyncio.Semaphore(ACTIVE_STEPS),
            Line(services.supervisor.rates),
            clock,
        )
        self._jobs: dict[str, Job] = {}
        self._runs: dict[str, tuple[Runner, asyncio.Task[None]]] = {}
        self._arriving: set[tuple[str, str]] = set()
        self._sweeper: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Run what was accepted before; where the folder can't be written, only show it."""
        unfinished = await self.journal.start()
        for row in unfinished:
            self._launch(Job.of(row))
        if not self.store.writable:
            return
        if unfinished:
            logger.info("%d jobs go on", len(unfinished))
        self._sweeper = asyncio.create_task(self._sweep_often())

    async def pause(self) -> None:
        """Begin no more steps and accept no more jobs; who watches is let go."""
        self.pausing = True
        for runner, _ in self._runs.values():
            runner.stop.set()
        for job in self._jobs.values():
            job.change()

    async def close(self) -> None:
        """Record what the running steps brought. The supervisor has been drained before."""
        await self.pause()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if tasks := [task for _, task in self._runs.values()]:
            await asyncio.wait(tasks)

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep(self.clock())
            except ServiceError as error:
                logger.warning("the jobs' sweep will try again: %s", error.detail)

    async def sweep(self, now: float) -> None:
        """Let go of results whose time is over."""
        self.store.unkept(await self.journal.expire(now, self.limits.result_ttl_seconds))

    # In

    @contextmanager
    def arriving(self, owner: str, key: str | None) -> Iterator[None]:
        """While a body with this Idempotency-Key arrives, another with it is refused: conflict."""
        if self.pausing:
            raise ServiceError("draining", "the service is shutting down", retry_after=1.0)
        if key is None:
            yield
            return
        if (owner, key) in self._arriving:
            raise ServiceError(
                "conflict",
                "the first request with this Idempotency-Key is still arriving",
                field="Idempotency-Key",
                retry_after=1.0,
            )
        self._arriving.add((owner, key))
        try:
            yield
        finally:
            self._arriving.discard((owner, key))

    async def accept(
        self,
        owner: str,
        body: bytes | bytearray | memoryview,
        key: str | None,
        *,
        share: int | None = None,
        writes: bool = True,
        rate: Rate | None = None,
    ) -> Job:
        """The job of this body: a new one once it is durable, or that which the key made before.

        `share` bounds the bytes of tensors and results that the owner keeps; results get names where it `writes`.
        Its steps wait until `rate` permits their FLOPs.
        """
        now = self.clock()
        known = None
        if key is not None:
            known = Key(owner, key, await _digest(body))
            earlier = await self.journal.replay(known, now)
            if earlier is not None:
                return await self.find(owner, earlier)
        who = Owner(owner, share, writes, rate)
        async with parsing(body) as document:
            draft = await decode(document, len(body), who, self.store, self.limits, now)
        try:
            return await asyncio.shield(asyncio.create_task(self._accept(draft, known, now)))
        except KeySeen:  # another front was faster
            assert known is not None
            earlier = await self.journal.replay(known, now)
            assert earlier is not None, "a key was seen and isn't there"
            return await self.find(owner, earlier)

    async def _accept(self, draft: Draft, key: Key | None, now: float) -> Job:
        """To the end, even if the client leaves: what is recorded is run."""
        try:
            row = JobRow(job_id(now), draft.owner, now, steps=rows_of(draft.specs))
            return await self._accepted(row, draft, key)
        finally:
            draft.release()

    async def _accepted(self, row: JobRow, draft: Draft, key: Key | None) -> Job:
        await self.journal.accept(row, [hold.content.row for hold in draft.holds.values()], key)
        self.store.kept(draft.holds.values())
        job = Job.of(row)
        self._launch(job)
        return job

    def _launch(self, job: Job) -> None:
        """Run it, unless that is for the next start."""
        self._jobs[job.id] = job
        if self.store.writable and not self.pausing:
            self._run(job)

    def _run(self, job: Job) -> tuple[Runner, asyncio.Task[None]]:
        runner = Runner(job, self._parts)
        task = asyncio.create_task(runner.run())
        self._jobs[job.id] = job
        self._runs[job.id] = (runner, task)
        task.add_done_callback(lambda task: self._ended(job, task))
        return runner, task

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._runs[job.id]
        error = None if task.cancelled() else task.exception()
        if isinstance(
            error, ServiceError
        ):  # its cancellation couldn't be recorded, as who asked for it is told
            self._launch(job)
        elif error is not None:
            logger.error("the run of job %s failed; it goes on after a restart", job.id, exc_info=error)
        if job.ended:
            del self._jobs[job.id]

    # Out

    async def find(self, owner: str, id_: str) -> Job:
        """The owner's job. ServiceError not_found."""
        job = self._jobs.get(id_)
        if job is not None and job.owner == owner:
            return job
        row = await self.journal.find(owner, id_, self.clock(), self.limits.result_ttl_seconds)
        if row is None:
            raise ServiceError("not_found", f"there is no job {id_[:64]!r}")
        # It may have ended, or begun, while the journal was asked.
        return self._shown(row)

    async def page(self, owner: str, before: str, limit: int) -> list[Job]:
        """Up to `limit` of the owner's jobs, newest first, older than `before`."""
        now, ttl = self.clock(), self.limits.result_ttl_seconds
        rows = await self.journal.page(owner, before, limit, now, ttl)
        found = []
        for row in rows:
            found.append(self._shown(row))
            await asyncio.sleep(
                0
            )  # a job of many steps takes a millisecond, a page has up to a thousand jobs
        return found

    def _shown(self, row: JobRow) -> Job:
        """A job of the journal, as it stands: what runs here is further than its record."""
        return self._jobs.get(row.id) or Job.of(row)

    async def wait(self, job: Job, seconds: float) -> None:
        """Until it has ended, for `seconds` at most."""
        try:
            async with asyncio.timeout(seconds):
                async for _ in self.watch(job):
                    pass
        except TimeoutError:
            return

    async def watch(self, job: Job) -> AsyncIterator[None]:
        """Now, and at each change, until it has ended or the service shuts down."""
        while True:
            changed = job.changed
            yield
            if job.ended or self.pausing:
                return
            await changed.wait()

    async def result(self, job: Job, step_id: str) -> Hold:
        """The result of a step. not_found, or conflict while it isn't there yet."""
        step = job.steps.get(step_id)
        if step is None:
            raise ServiceError("not_found", f"the job has no step {step_id[:64]!r}")
        if not step.ended:
            raise ServiceError("conflict", f"step {step_id!r} is {step.state}", retry_after=1.0)
        if step.state != DONE:
            raise ServiceError("not_found", f"step {step_id!r} is {step.state}, so it has no result")
        if step.row.result is None:
            raise ServiceError("not_found", f"the result of step {step_id!r} has expired")
        return await self.store.hold_content(step.row.result)

    async def cancel(self, job: Job) -> None:
        """End it, whether it runs or not: steps that haven't ended never will. One that has ended stays as it is.

        ServiceError (read_only, no_room, unavailable, draining) where that can't be recorded: the job goes on then.
        """
        if not job.ended and (run := self._runs.get(job.id)) is not None:
            await _cancelled(*run)
        if not job.ended:  # paused, failed or never begun: all that is left to run is its end
            await _cancelled(*self._run(job))


async def _cancelled(runner: Runner, task: asyncio.Task[None]) -> None:
    runner.cancel()
    await asyncio.wait([task])  # to the end, even if the client leaves
    task.result()


def job_id(now: float) -> str:
    """A new id, of unguessable bits, that sorts by time."""
    return f"{int(now * 1e3):012x}{secrets.token_hex(10)}"


async def _digest(body: bytes | bytearray | memoryview) -> str:
    made = hashlib.sha256(body) if len(body) <= LARGE_JSON else await asyncio.to_thread(hashlib.sha256, body)
    return made.hexdigest()
