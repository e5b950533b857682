"""Jobs of fronts that share a journal: receives bodies, hands on jobs, wherever they run.

The front that accepts a job runs it. One that dies or leaves loses its jobs to the others. What another front
runs is shown as the journal has it, looked at while somebody watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any
from weakref import WeakValueDictionary

from service.errors import ServiceError
from service.jobs.decode import Draft
from service.jobs.jobs import Jobs, Services
from service.jobs.leases import LeasedJournal
from service.jobs.model import QUEUED, RUNNING, Job
from service.journal import JobRow, Key
from service.store.shared import SharedStore

logger = logging.getLogger(__name__)

#: Seconds between looks at the journal: how long news from another front takes.
LOOK_SECONDS = 0.5
#: Most seconds that a cancellation waits for the front that runs the job.
CANCEL_SECONDS = 20.0


class SharedJobs(Jobs):
    """See the module."""

    journal: LeasedJournal

    def __init__(
        self, services: Services, store: SharedStore, *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(services, LeasedJournal(store.transactions, store.fronts), clock=clock)
        self._looking: asyncio.Task[None] | None = None
        #: Jobs of other fronts that somebody here looks at.
        self._mirrors: WeakValueDictionary[str, Job] = WeakValueDictionary()
        self._accepting: set[str] = set()
        self._failed: set[str] = set()
        self._cancelling: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    # Life

    async def start(self) -> None:
        """Look at the journal from now on."""
        await super().start()
        self._looking = asyncio.create_task(self._look_often())

    async def close(self) -> None:
        """As ever; then the jobs that haven't ended are for others."""
        if self._looking is not None:
            self._looking.cancel()
        await super().close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except ServiceError as error:
                logger.debug("the journal will be looked at again: %s", error.detail)

    async def look(self) -> None:
        """Do what the journal asks for: run, give up, cancel; and show what others have done."""
        before = set(self._runs)
        survey = await self.journal.survey()
        for id_ in before - survey.held:
            if run := self._runs.get(id_):
                run[0].abandon()
        for id_ in survey.cancel - self._cancelling:
            self._spawn(self._cancel_here(id_))
        await self._take_up(survey.held - survey.cancel - self._accepting - self._failed - set(self._runs))
        if survey.free and not self.pausing and self._parts.supervisor.ready:
            self._launch_all(await self.journal.claim())
        await self._reflect()

    async def _take_up(self, ids: Collection[str]) -> None:
        """Run what this front has and doesn't run: accepted, though the answer never came."""
        if ids and not self.pausing:
            self._launch_all(await self.journal.jobs(ids, held=True))

    def _launch_all(self, rows: Collection[JobRow]) -> None:
        for row in rows:
            if row.finished is None and row.id not in self._runs and row.id not in self._accepting:
                logger.info("job %s goes on here", row.id)
                job = self._mirrors.pop(row.id, None) or Job.of(row)
                job.update(row)
                self._launch(job)

    async def _cancel_here(self, id_: str) -> None:
        """Cancel a job that this front has, whether it runs or not."""
        self._cancelling.add(id_)
        try:
            for row in await self.journal.jobs([id_], held=True):
                await super().cancel(self._shown(row))
        except ServiceError as error:  # its lease still asks for it, so the next look tries again
            logger.warning("job %s can't be cancelled yet: %s", id_, error.detail)
        finally:
            self._cancelling.discard(id_)

    async def _reflect(self) -> None:
        """Let who watches see what other fronts have recorded."""
        ids = [job.id for job in self._mirrors.values() if not job.ended and job.id not in self._runs]
        if not ids:
            return
        for row in await self.journal.jobs(ids):
            job = self._mirrors.get(row.id)
            if job is not None and row.id not in self._runs:
                before = [step.state for step in job.steps.values()], job.state
                _show(job, row)
                if before != ([step.state for step in job.steps.values()], job.state):
                    job.change()

    # What differs where others run jobs too

    async def _accepted(self, row: JobRow, draft: Draft, key: Key | None) -> Job:
        self._accepting.add(row.id)
        try:
            return await super()._accepted(row, draft, key)
        finally:
            self._accepting.discard(row.id)

    def _launch(self, job: Job) -> None:
        if not self.pausing:  # else another front will
            super()._launch(job)

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        super()._ended(job, task)
        if job.ended or job.id in self._runs:
            return
        del self._jobs[job.id]
        self._mirrors[job.id] = job
        if self.pausing:
            self._spawn(self._release(job.id))
        elif task.cancelled() or task.exception() is not None:
            self._failed.add(job.id)

    async def _release(self, job: str) -> None:
        with contextlib.suppress(ServiceError):  # else its lease lapses
            await self.journal.release(job)

    def _shown(self, row: JobRow) -> Job:
        if row.id in self._jobs or row.finished is not None:
            return super()._shown(row)
        job = self._mirrors.get(row.id)
        if job is None:
            job = self._mirrors[row.id] = Job.of(row)
        _show(job, row)
        return job

    async def cancel(self, job: Job) -> None:
        """End it, wherever it runs; waits for that front as long as is sensible."""
        if job.id in self._runs:
            await super().cancel(job)
        if not job.ended and await self.journal.ask_cancel(job.id):
            await self.wait(job, CANCEL_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _show(job: Job, row: JobRow) -> None:
    """As the front shows it that runs it: what can start has been started."""
    job.update(row)
    for step in list(job.startable()):
        step.state = RUNNING
    if job.state == QUEUED:
        job.state = RUNNING
