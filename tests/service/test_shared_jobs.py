"""Jobs of two fronts over one journal: seen, awaited, cancelled from either; run by one; taken over from the dead."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.arena import Arena, Slots
from service.errors import ServiceError
from service.jobs import Job
from service.jobs import shared as shared_jobs
from service.jobs.shared import SharedJobs
from service.store.cluster import open_store
from service.store.shared import SharedStore
from tests.service import shared
from tests.service.computing import Computer
from tests.service.storing import MIB, Clock, get, put
from tests.service.storing import Settings as Local
from tests.service.test_jobs import ONE, TWO, A, B, body, refused, result, run, states

pytestmark = pytest.mark.ci


@dataclass
class Settings(Local):
    """What shared jobs and their store read."""

    store: str = ""
    journal: str = ""
    shared_seconds: float = 3.0
    lease_seconds: float = 1.0


@dataclass
class Front:
    """A front's parts."""

    jobs: SharedJobs
    store: SharedStore
    computer: Computer
    clock: Clock

    def vanish(self) -> None:
        """As kill -9: no more signs of life, nothing recorded, nothing said."""

        async def never(*_: Any, **__: Any) -> Any:
            await asyncio.sleep(3600)

        assert self.store.fronts._beating is not None
        assert self.jobs._looking is not None
        self.store.fronts._beating.cancel()
        self.store.fronts._beating = None
        self.jobs._looking.cancel()
        for runner, task in self.jobs._runs.values():
            task.cancel()
            runner.stop.set()


@contextlib.asynccontextmanager
async def open_front(settings: Settings, clock: Clock | None = None) -> AsyncIterator[Front]:
    arena = Arena.create(8 * MIB)
    slots = Slots(arena)
    clock = clock or Clock()
    store = open_store(settings, slots, lambda *tensors: None, clock=clock)
    computer = Computer(slots)
    parts = SimpleNamespace(settings=settings, slots=slots, store=store, supervisor=computer)
    jobs = SharedJobs(parts, store, clock=clock)
    await store.start()
    await jobs.start()
    try:
        yield Front(jobs, store, computer, clock)
    finally:
        computer.draining = True
        computer.gate.set()
        await jobs.close()
        await store.close()
        arena.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_jobs, "LOOK_SECONDS", 0.1)


@pytest.fixture
def settings(postgres: shared.Postgres, tmp_path: Path) -> Settings:
    return Settings(tmp_path, store=f"file://{tmp_path}/shared", journal=postgres.database())


@pytest.fixture
async def both(settings: Settings) -> AsyncIterator[tuple[Front, Front]]:
    async with open_front(settings) as a, open_front(settings) as b:
        yield a, b


async def until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "in vain"
        await asyncio.sleep(0.02)


Both = tuple[Front, Front]


class TestSeenFromEither:
    async def test_accepted_by_one_awaited_and_read_at_the_other(self, both: Both) -> None:
        a, b = both
        a.computer.gate.clear()
        job = await a.jobs.accept("ann", body(ONE, TWO), None)
        there = await b.jobs.find("ann", job.id)
        assert (there.state, states(there)) == ("running", {"one": "running", "two": "queued"})
        assert [one.id for one in await b.jobs.page("ann", "", 9)] == [job.id]
        with refused("conflict"):
            await b.jobs.result(there, "one")
        a.computer.gate.set()
        await b.jobs.wait(there, 60)
        assert there.state == "done"
        np.testing.assert_array_equal(await result(b, there, "one"), A @ B)  # type: ignore[arg-type]
        assert b.computer.submitted == []
        with refused("not_found"):
            await b.jobs.find("bob", job.id)

    async def test_each_change_is_told_at_the_other(self, both: Both) -> None:
        a, b = both
        a.computer.gate.clear()
        job = await a.jobs.accept("ann", body(ONE, TWO), None)
        there = await b.jobs.find("ann", job.id)
        seen = []

        async def watch() -> None:
            async for _ in b.jobs.watch(there):
                seen.append((there.state, *states(there).values()))

        watching = asyncio.create_task(watch())
        await until(lambda: seen)
        a.computer.gate.set()
        await asyncio.wait_for(watching, 60)
        assert seen[0] == ("running", "running", "queued")
        assert seen[-1] == ("done", "done", "done")

    async def test_handles_and_results_cross(self, both: Both) -> None:
        a, b = both
        await put(b.store, "ann", "w", B)
        job = await run(a, {**ONE, "b": {"handle": "w"}, "out": {"handle": "d"}})  # type: ignore[arg-type]
        assert job.state == "done"
        np.testing.assert_array_equal(await get(b.store, "ann", "d"), A @ B)
        await put(b.store, "ann", "w", 2 * B)
        await b.store.delete("ann", "d")
        np.testing.assert_array_equal(await result(b, job, "one"), A @ B)  # type: ignore[arg-type]

    async def test_an_input_that_another_front_still_writes_is_waited_for(self, both: Both) -> None:
        a, b = both
        await put(b.store, "ann", "w", B, durable=False)
        job = await run(a, {**ONE, "b": {"handle": "w"}})  # type: ignore[arg-type]
        np.testing.assert_array_equal(await result(a, job, "one"), A @ B)  # type: ignore[arg-type]

    async def test_cancelled_from_the_other(self, both: Both) -> None:
        a, b = both
        a.computer.gate.clear()
        job = await a.jobs.accept("ann", body(ONE, TWO), None)
        there = await b.jobs.find("ann", job.id)
        await b.jobs.cancel(there)
        assert (there.state, job.state) == ("cancelled", "cancelled")
        assert set(states(there).values()) == {"cancelled"}
        await b.jobs.cancel(there)

    async def test_cancelled_though_its_run_failed(self, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = both

        async def fail(*_: Any) -> None:
            raise RuntimeError("nobody foresaw this")

        with monkeypatch.context() as patch:
            patch.setattr(a.jobs.journal, "record", fail)
            job = await a.jobs.accept("ann", body(ONE, TWO), None)
            await until(lambda: not a.jobs._runs)
        await b.jobs.cancel(await b.jobs.find("ann", job.id))
        assert set(states(job).values()) == {"cancelled"}

    async def test_cancelled_though_accepted_by_one_that_leaves(self, both: Both) -> None:
        a, b = both
        await a.jobs.pause()
        job = await a.jobs.accept("ann", body(ONE, TWO), None)
        there = await b.jobs.find("ann", job.id)
        await b.jobs.cancel(there)
        assert set(states(there).values()) == {"cancelled"}
        assert a.computer.submitted == b.computer.submitted == []

    async def test_results_expire_for_both(self, both: Both) -> None:
        a, b = both
        job = await run(a, ONE)  # type: ignore[arg-type]
        a.clock.now += 4000
        await a.jobs.sweep(a.clock.now)
        there = await b.jobs.page("ann", "", 9)
        assert there == []
        with refused("not_found"):
            await b.jobs.find("ann", job.id)


class TestKeys:
    async def test_make_one_job_whichever_front_sees_them(self, both: Both) -> None:
        a, b = both
        for n in range(4):
            accepts = [front.jobs.accept("ann", body(ONE), f"k{n}") for front in (a, b, a, b)]
            jobs = await asyncio.gather(*accepts, return_exceptions=True)
            assert len({job.id for job in jobs if isinstance(job, Job)}) == 1, jobs
        assert len(await b.jobs.page("ann", "", 99)) == 4
        with refused("idempotency_mismatch"):
            await b.jobs.accept("ann", body(TWO | {"a": ONE["a"]}), "k0")


class TestFrontsThatGo:
    async def test_the_dead_ones_jobs_go_on_elsewhere_once(self, settings: Settings) -> None:
        clock = Clock()
        async with open_front(settings, clock) as b, open_front(settings, clock) as a:
            first = await run(a, {**ONE, "out": {"handle": "first"}})  # type: ignore[arg-type]
            a.computer.gate.clear()
            accepted = [await a.jobs.accept("ann", body(ONE, TWO), f"k{n}") for n in range(20)]
            there = await b.jobs.find("ann", accepted[0].id)
            a.vanish()
            began = time.monotonic()
            await b.jobs.wait(there, 60)
            assert there.state == "done"
            assert time.monotonic() - began > 0.5, "taken before the lease had lapsed"
            for job in accepted:
                found = await b.jobs.find("ann", job.id)
                await b.jobs.wait(found, 60)
                assert states(found) == {"one": "done", "two": "done"}
                np.testing.assert_array_equal(await result(b, found, "one"), A @ B)  # type: ignore[arg-type]
            assert b.computer.computed == 40
            assert (await b.jobs.find("ann", first.id)).state == "done"
            assert len(await b.jobs.page("ann", "", 99)) == 21

    async def test_one_that_leaves_hands_over_at_once(self, settings: Settings) -> None:
        settings.lease_seconds = 60.0
        clock = Clock()
        async with open_front(settings, clock) as b:
            b.computer.ready = False
            async with open_front(settings, clock) as a:
                a.computer.refusals.extend(["draining"] * 99)
                job = await a.jobs.accept("ann", body(ONE, TWO), None)
                await a.jobs.pause()
            b.computer.ready = True
            there = await b.jobs.find("ann", job.id)
            await b.jobs.wait(there, 60)
            assert there.state == "done"

    async def test_cancelled_at_one_that_leaves_is_never_begun_by_another(self, settings: Settings) -> None:
        settings.lease_seconds = 60.0
        clock = Clock()
        async with open_front(settings, clock) as b:
            b.computer.ready = False
            async with open_front(settings, clock) as a:
                a.computer.refusals.extend(["draining"] * 99)
                job = await a.jobs.accept("ann", body(ONE, TWO), None)
                await a.jobs.pause()
                await until(lambda: not a.jobs._runs)
                await a.jobs.cancel(job)
            b.computer.ready = True
            there = await b.jobs.find("ann", job.id)
            await b.jobs.wait(there, 60)
            assert set(states(there).values()) == {"cancelled"}
            assert b.computer.submitted == []

    async def test_one_that_was_cut_off_records_nothing_that_another_ran(self, settings: Settings) -> None:
        """Front A can't reach the database for longer than its lease; B runs its job; A comes back with a result."""
        async with open_front(settings) as b, open_front(settings) as a:
            a.computer.gate.clear()
            job = await a.jobs.accept("ann", body(ONE, TWO | {"out": {"handle": "d"}}), None)
            await until(lambda: a.computer.submitted)
            beat = a.store.fronts._beat
            a.store.fronts._beat = lambda db: None  # type: ignore[method-assign]
            a.jobs._looking.cancel()  # type: ignore[union-attr]
            there = await b.jobs.find("ann", job.id)
            await b.jobs.wait(there, 60)
            assert there.state == "done"
            recorded = [step.row for step in there.steps.values()]
            a.store.fronts._beat = beat  # type: ignore[method-assign]
            a.computer.gate.set()
            await until(lambda: not a.jobs._runs)
            assert not job.ended
            await a.jobs.look()
            assert (job.state, [step.row for step in job.steps.values()]) == ("done", recorded)
            assert [step.row for step in (await b.jobs.find("ann", job.id)).steps.values()] == recorded

    async def test_a_lost_lease_ends_the_run(self, settings: Settings) -> None:
        async with open_front(settings) as b, open_front(settings) as a:
            a.computer.gate.clear()
            job = await a.jobs.accept("ann", body(ONE, TWO), None)
            await until(lambda: a.computer.submitted)
            await a.store.transactions.write(
                lambda db: db.execute("UPDATE leases SET front = ?", (b.store.fronts.id,))
            )
            await until(lambda: not a.jobs._runs)
            await a.jobs.wait(job, 60)
            assert job.state == "done"
            assert b.computer.computed == 2

    async def test_accepted_though_the_answer_got_lost_is_run(
        self, both: Both, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = both
        write = a.store.transactions.write

        async def commit_and_fail(work: Any, **options: bool) -> None:
            await write(work, **options)
            raise ServiceError("unavailable", "the answer got lost", retry_after=1.0)

        monkeypatch.setattr(a.jobs.journal.database, "write", commit_and_fail)
        with refused("unavailable"):
            await a.jobs.accept("ann", body({**ONE, "a": A.tolist(), "b": B.tolist()}), "k")
        monkeypatch.setattr(a.jobs.journal.database, "write", write)
        job = await b.jobs.accept("ann", body({**ONE, "a": A.tolist(), "b": B.tolist()}), "k")
        await b.jobs.wait(job, 60)
        assert job.state == "done"
        assert a.computer.computed + b.computer.computed == 1

    async def test_an_outage_of_the_database_delays_and_loses_nothing(
        self, settings: Settings, postgres: shared.Postgres
    ) -> None:
        with shared.cable(postgres.port) as cable:
            settings.journal = settings.journal.replace(f":{postgres.port}/", f":{cable.port}/")
            settings.shared_seconds = 0.5
            async with open_front(settings) as a:
                a.computer.gate.clear()
                job = await a.jobs.accept("ann", body(ONE, TWO), None)
                await until(lambda: a.computer.submitted)
                cable.cut("refuse")
                a.computer.gate.set()
                with refused("unavailable"):
                    await a.jobs.accept("ann", body(ONE), None)
                await asyncio.sleep(1.5)
                assert not job.ended
                cable.mend()
                await a.jobs.wait(job, 60)
                assert job.state == "done"
                np.testing.assert_array_equal(await result(a, job, "one"), A @ B)  # type: ignore[arg-type]
