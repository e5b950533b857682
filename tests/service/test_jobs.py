"""Jobs: what is accepted ends right, once; dependencies, failures, cancelling, keys, limits, restarts."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.admit import Rates
from service.batch import Rate
from service.errors import ServiceError
from service.formats import numbers
from service.jobs import Job, jobs, runner
from service.jobs.line import Line
from service.jobs.model import Input, Spec, rows_of
from service.journal import JobRow, StepRow
from service.messages import Params
from service.store import files
from tests.service.computing import Front, open_front
from tests.service.storing import MIB, Clock, Settings, get, put, tensor


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "data")


def refused(code: str, field: str | None = None) -> pytest.RaisesExc[ServiceError]:
    return pytest.RaisesExc(
        ServiceError, check=lambda error: error.code == code and (field is None or error.field == field)
    )


def b64(array: np.ndarray) -> dict[str, Any]:
    return {"b64": base64.b64encode(array.tobytes()).decode(), "dtype": "fp32", "shape": list(array.shape)}


def body(*steps: dict[str, Any]) -> bytes:
    return json.dumps({"steps": steps}).encode()


A, B = tensor(3, 4), tensor(4, 5, seed=1)
ONE = {"id": "one", "a": b64(A), "b": b64(B)}
TWO = {"id": "two", "a": {"step": "one"}, "b": b64(tensor(5, 2, seed=2)), "trans_b": False}


async def run(front: Front, *steps: dict[str, Any], owner: str = "ann", key: str | None = None) -> Job:
    job = await front.jobs.accept(owner, body(*steps), key)
    await front.jobs.wait(job, 60)
    assert job.ended
    return job


async def result(front: Front, job: Job, step: str) -> np.ndarray:
    hold = await front.jobs.result(job, step)
    data = await front.store.contents.read(hold, 0, hold.content.row.nbytes)
    hold.release()
    return np.frombuffer(data, np.float32).reshape(hold.content.row.shape)


def states(job: Job) -> dict[str, str]:
    return {step.spec.id: step.state for step in job.steps.values()}


class TestRun:
    async def test_steps_that_depend_on_one_another(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await run(front, ONE, TWO)
            assert job.state == "done"
            np.testing.assert_array_equal(await result(front, job, "one"), A @ B)
            np.testing.assert_array_equal(await result(front, job, "two"), (A @ B) @ tensor(5, 2, seed=2))

    async def test_numbers_handles_c_and_bias(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await put(front.store, "ann", "w", B)
            step = {
                "id": "s",
                "a": A.tolist(),
                "b": {"handle": "w"},
                "c": np.ones((3, 5)).tolist(),
                "bias": [1, 2, 3, 4, 5],
            }
            job = await run(front, step)
            want = A @ B + np.ones((3, 5), np.float32) + np.arange(1, 6, dtype=np.float32)
            np.testing.assert_array_equal(await result(front, job, "s"), want)
            # A resident B can be shared by a stack.
            assert front.computer.submitted[0].b.tensor.startswith("ann/w@")

    async def test_large_documents_are_read_one_at_a_time(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each is many times its text's size on the heap."""
        reading: list[int] = []
        most: list[int] = []
        whole = numbers.loads

        def loads(text: Any) -> Any:
            reading.append(1)
            most.append(len(reading))
            time.sleep(0.05)
            try:
                return whole(text)
            finally:
                reading.pop()

        monkeypatch.setattr(numbers, "loads", loads)
        big = tensor(400, 400)
        text = body({"id": "big", "a": big.tolist(), "b": big.tolist()})
        assert len(text) > 1 << 20
        async with open_front(settings) as front:
            jobs = await asyncio.gather(*(front.jobs.accept("ann", text, None) for _ in range(4)))
            for job in jobs:
                await front.jobs.wait(job, 60)
                np.testing.assert_array_equal(await result(front, job, "big"), big @ big)
        assert most == [1, 1, 1, 1]

    async def test_independent_steps_are_submitted_together(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(*({**ONE, "id": f"s{n}"} for n in range(8))), None)
            while len(front.computer.submitted) < 8:
                await asyncio.sleep(0.001)
            assert set(states(job).values()) == {"running"}
            front.computer.gate.set()
            await front.jobs.wait(job, 60)
            assert job.state == "done"

    async def test_a_failure_skips_its_dependents_only(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            other = {**ONE, "id": "other"}
            three = {"id": "three", "a": {"step": "two"}, "b": b64(tensor(2, 2))}
            job = await run(front, {**ONE, "variant": "none"}, TWO, three, other)
            assert states(job) == {"one": "failed", "two": "skipped", "three": "skipped", "other": "done"}
            assert job.state == "failed"
            document = job.document(60.0)
            assert document["steps"][0]["code"] == "unsupported"
            assert document["counts"] == {"failed": 1, "skipped": 2, "done": 1}
            with refused("not_found"):
                await front.jobs.result(job, "two")

    @pytest.mark.parametrize("code", ["queue_full", "no_worker", "no_room"])
    async def test_what_passes_is_tried_again(self, settings: Settings, code: str) -> None:
        async with open_front(settings) as front:
            front.computer.refusals.extend([code] * 2)
            assert (await run(front, ONE)).state == "done"
            assert len(front.computer.submitted) == 3

    async def test_what_kills_workers_is_given_up(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "FIRST_DELAY", 0.001)
        async with open_front(settings) as front:
            front.computer.refusals.extend(["no_worker"] * 99)
            job = await run(front, ONE)
            assert states(job) == {"one": "failed"}
            assert job.steps["one"].row.code == "no_worker"
            assert len(front.computer.submitted) == 1 + runner.WORKER_TRIES

    async def test_waits_for_a_worker_however_long(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "WORKER_POLL", 0.001)
        async with open_front(settings) as front:
            front.computer.refusals.append("no_worker")
            front.computer.ready = False
            job = await front.jobs.accept("ann", body(ONE), None)
            await front.jobs.wait(job, 0.2)
            assert states(job) == {"one": "running"}
            front.computer.ready = True
            await front.jobs.wait(job, 60)
            assert job.state == "done"

    async def test_result_into_a_handle(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await run(front, {**ONE, "out": {"handle": "d"}, "ttl_seconds": 50})
            np.testing.assert_array_equal(await get(front.store, "ann", "d"), A @ B)
            assert (await front.store.head("ann", "d")).expires == front.clock.now + 50
            np.testing.assert_array_equal(await result(front, job, "one"), A @ B)
        async with open_front(settings) as front:
            np.testing.assert_array_equal(await get(front.store, "ann", "d"), A @ B)

    async def test_deadline_goes_with_the_step(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.refusals.append("deadline")
            job = await run(front, {**ONE, "deadline_ms": 1})
            assert job.steps["one"].row.code == "deadline"
            assert front.computer.submitted[0].deadline is not None
            assert len(front.computer.submitted) == 1

    async def test_an_operand_is_the_version_at_acceptance(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await put(front.store, "ann", "w", B)
            front.computer.gate.clear()
            job = await front.jobs.accept(
                "ann", body(ONE, {"id": "s", "a": b64(A), "b": {"handle": "w"}}), None
            )
            await put(front.store, "ann", "w", -B)
            await front.store.delete("ann", "w")
            front.computer.gate.set()
            await front.jobs.wait(job, 60)
            np.testing.assert_array_equal(await result(front, job, "s"), A @ B)

    async def test_more_steps_than_the_arena_holds(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            big = tensor(512, 512)
            for name in ("a", "b", "c"):
                await put(front.store, "ann", name, big)
            steps = [
                {"id": f"s{n}", "a": {"handle": "abc"[n % 3]}, "b": {"handle": "abc"[n % 2]}}
                for n in range(12)
            ]
            job = await run(front, *steps)
            assert set(states(job).values()) == {"done"}
            np.testing.assert_array_equal(await result(front, job, "s11"), big @ big)

    async def test_nothing_is_left_but_the_results(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await run(front, ONE, TWO)
            await front.store.effects.settle()
            assert len(list((settings.data / "tensors").iterdir())) == 2
            slots = front.store.contents.memory.slots
            assert slots.bytes_by_state["tensor"] == front.store.contents.memory.nbytes == 2 * 4096

    async def test_disk_that_refuses_a_result(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runner, "FIRST_DELAY", 0.001)
        write, calls = files.write, []

        def refuse_twice(*args: Any) -> str:
            calls.append(args)
            if len(calls) in {3, 4}:  # after the two operands
                raise OSError(28, "full")
            return write(*args)

        monkeypatch.setattr(files, "write", refuse_twice)
        async with open_front(settings) as front:
            job = await run(front, ONE)
            np.testing.assert_array_equal(await result(front, job, "one"), A @ B)
            assert len(calls) == 5


class TestRefused:
    @pytest.mark.parametrize(
        ("steps", "field"),
        [
            ([], "steps"),
            ([TWO], "steps.0.a"),
            ([ONE, {**ONE, "a": {"step": "one"}, "id": "one"}], "steps.1.id"),
            ([ONE, {**TWO, "b": b64(tensor(9, 9))}], "steps.1.b"),
            ([{**ONE, "b": {"handle": "x/y"}}], None),
            ([{**ONE, "speed": "fast"}], "steps.0.speed"),
            ([{**ONE, "out": {"handle": "d"}}, {**ONE, "id": "b", "out": {"handle": "d"}}], "steps.1.out"),
            ([{**ONE, "id": f"s{n}"} for n in range(17)], "steps"),
            ([{**ONE, "a": [[1, 2], [3]]}], "steps.0.a"),
        ],
    )
    async def test_invalid(self, settings: Settings, steps: list[dict[str, Any]], field: str | None) -> None:
        async with open_front(settings) as front:
            with refused("invalid", field):
                await front.jobs.accept("ann", body(*steps), None)
            await self.nothing_left(front)

    async def test_unknown_handle(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await put(front.store, "bob", "w", B)
            with refused("not_found", "steps.1.b"):
                await front.jobs.accept("ann", body(ONE, {**ONE, "id": "x", "b": {"handle": "w"}}), None)
            await front.store.delete("bob", "w")
            await self.nothing_left(front)

    async def test_bytes(self, settings: Settings) -> None:
        settings.job_bytes = 1000
        async with open_front(settings) as front:
            with refused("too_large"):
                await front.jobs.accept("ann", body(*({**ONE, "id": f"s{n}"} for n in range(8))), None)
            await self.nothing_left(front)

    async def test_disk_full(self, settings: Settings) -> None:
        settings.store_disk_bytes = 6000
        step = {"id": "s", "a": b64(tensor(20, 20)), "b": b64(tensor(20, 20))}
        async with open_front(settings) as front:
            await put(front.store, "bob", "w", tensor(30, 30))
            with refused("no_room"):
                await front.jobs.accept("ann", body(step), None)
            assert await front.jobs.page("ann", "", 9) == []
            await front.store.delete("bob", "w")
            await self.nothing_left(front)

    async def test_what_can_never_be_computed_or_kept(self, settings: Settings) -> None:
        settings.store_disk_bytes = 12 * MIB
        settings.key_bytes = 5 * MIB
        wide = {"a": b64(tensor(1200, 1)), "b": b64(tensor(1, 1200))}
        async with open_front(settings) as front:
            await put(front.store, "ann", "w", tensor(900, 900))
            for steps, field, limit in (
                (
                    [{**wide, "id": "s"}],
                    "steps.0.out",
                    5 * MIB,
                ),  # more than one owner's requests hold at once
                (
                    [ONE, {"id": "s", "a": {"handle": "w"}, "b": b64(tensor(900, 1300))}],
                    "steps.1.out",
                    8 * MIB,
                ),
                (
                    [{"id": f"s{n}", "a": {"handle": "w"}, "b": {"handle": "w"}} for n in range(4)],
                    "steps.3",
                    12 * MIB,
                ),
            ):
                with pytest.raises(ServiceError) as error:
                    await front.jobs.accept("ann", body(*steps), None)
                assert (error.value.code, error.value.field, error.value.limit) == ("too_large", field, limit)
            await front.store.delete("ann", "w")
            await self.nothing_left(front)

    async def test_a_tensor_that_is_both_operands_counts_once(self, settings: Settings) -> None:
        square = tensor(1000, 1000)  # with D nearly the whole arena
        async with open_front(settings) as front:
            await put(front.store, "ann", "w", square)
            job = await run(front, {"id": "s", "a": {"handle": "w"}, "b": {"handle": "w"}})
            assert job.state == "done"

    @pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"steps": 1}', b'{"steps": [1]}', b"\xff"])
    async def test_malformed(self, settings: Settings, text: bytes) -> None:
        async with open_front(settings) as front:
            with pytest.raises(ServiceError) as error:
                await front.jobs.accept("ann", text, None)
            assert error.value.code in {"malformed", "invalid"}

    @staticmethod
    async def nothing_left(front: Front) -> None:
        await front.store.effects.settle()
        assert not list(front.store.folder.tensors.iterdir())
        assert front.store.contents.disk_bytes == 0
        assert not front.store.contents._contents


class TestIdempotency:
    async def test_same_body_gives_the_first_job(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            first = await run(front, ONE, key="k")
            second = await run(front, ONE, key="k")
            assert second.id == first.id
            assert front.computer.computed == 1
            assert (await run(front, ONE, key="other")).id != first.id
            assert (await run(front, ONE, owner="bob", key="k")).id != first.id

    async def test_other_body_is_refused(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await run(front, ONE, key="k")
            with refused("idempotency_mismatch"):
                await front.jobs.accept("ann", body({**ONE, "alpha": 2}), "k")

    async def test_holds_across_a_restart_for_a_day(self, settings: Settings) -> None:
        settings.result_ttl_seconds = 60
        clock = Clock()
        async with open_front(settings, clock=clock) as front:
            first = await run(front, ONE, key="k")
        clock.now += 23 * 3600
        async with open_front(settings, clock=clock) as front:
            await front.jobs.sweep(clock.now)
            again = await run(front, ONE, key="k")
            assert again.id == first.id
            assert again.state == "done"
            with refused("not_found"):  # its time is over, yet it isn't done again
                await front.jobs.result(again, "one")
            clock.now += 2 * 3600
            await front.jobs.sweep(clock.now)
            with refused("not_found"):
                await front.jobs.find("ann", first.id)
            assert (await run(front, ONE, key="k")).id != first.id

    async def test_while_the_first_is_arriving(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            with front.jobs.arriving("ann", "k"):
                with refused("conflict"), front.jobs.arriving("ann", "k"):
                    pass
                with front.jobs.arriving("bob", "k"), front.jobs.arriving("ann", "l"):
                    pass
            with front.jobs.arriving("ann", "k"):
                pass


class TestSee:
    async def test_another_owners_job_is_not_found(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE), None)
            with refused("not_found"):
                await front.jobs.find("bob", job.id)
            assert await front.jobs.page("bob", "", 9) == []

    async def test_pages_newest_first(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            ids = []
            for _ in range(3):
                ids.append((await run(front, ONE)).id)
                front.clock.now += 1
            page = await front.jobs.page("ann", "", 2)
            assert [job.id for job in page] == [ids[2], ids[1]]
            page = await front.jobs.page("ann", page[-1].id, 2)
            assert [job.id for job in page] == [ids[0]]

    async def test_a_long_page_lets_others_go_on(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_front(settings) as front:
            await run(front, ONE)
            (row,) = await front.jobs.journal.page("ann", "", 9, front.clock.now, 1e9)

            async def many(*_: Any) -> list[JobRow]:
                return [row] * 50

            monkeypatch.setattr(front.jobs.journal, "page", many)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            waiting = asyncio.create_task(other())
            assert len(await front.jobs.page("ann", "", 50)) == 50
            waiting.cancel()
            assert turns >= 49

    async def test_result_before_its_time(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE), None)
            with refused("conflict"):
                await front.jobs.result(job, "one")
            with refused("not_found"):
                await front.jobs.result(job, "none")

    async def test_watch_tells_each_change(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE, TWO), None)
            seen = []
            async for _ in front.jobs.watch(job):
                seen.append(tuple(states(job).values()))
                front.computer.gate.set()
            assert seen[-1] == ("done", "done")
            assert ("done", "running") in seen

    async def test_results_expire(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await run(front, ONE, {**TWO, "out": {"handle": "kept"}})
            assert job.summary(settings.result_ttl_seconds)["expires"] == front.clock.now + 3600
            front.clock.now += 3601
            await front.jobs.sweep(front.clock.now)
            with refused("not_found"):
                await front.jobs.find("ann", job.id)
            await front.store.effects.settle()
            assert len(list((settings.data / "tensors").iterdir())) == 1
            assert (await get(front.store, "ann", "kept")).shape == (3, 2)


class TestCancel:
    async def test_ends_what_has_not_ended(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await front.jobs.accept("ann", body(ONE, TWO, {**TWO, "id": "late"}), None)
            while job.steps["one"].state != "done":
                await asyncio.sleep(0)
                if front.computer.computed:
                    front.computer.gate.clear()
            await front.jobs.cancel(job)
            assert job.state == "cancelled"
            assert states(job) == {"one": "done", "two": "cancelled", "late": "cancelled"}
            assert job.id not in front.jobs._jobs
            found = await front.jobs.find("ann", job.id)
            assert states(found) == states(job)
            assert found.state == "cancelled"

    async def test_of_a_job_that_waits_for_a_worker(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.refusals.append("no_worker")
            front.computer.ready = False
            job = await front.jobs.accept("ann", body(ONE), None)
            await front.jobs.wait(job, 0.1)
            await front.jobs.cancel(job)
            assert states(job) == {"one": "cancelled"}

    async def test_of_one_that_ended_changes_nothing(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await run(front, ONE)
            await front.jobs.cancel(job)
            assert job.state == "done"

    async def test_of_one_that_was_paused_between_two_steps(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await paused_after_one(front)
            assert states(job) == {"one": "done", "two": "queued"}
            # Two who ask at once wait for one end: what the job needed is let go once.
            await asyncio.gather(front.jobs.cancel(job), front.jobs.cancel(job))
            assert states(job) == {"one": "done", "two": "cancelled"}
            assert front.jobs._jobs == {}
        await self.stays_cancelled(settings, job, results=1)

    async def test_while_it_pauses_for_a_step_that_runs(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE, TWO), None)
            while not front.computer.submitted:
                await asyncio.sleep(0)
            await front.jobs.pause()
            await asyncio.sleep(0.01)
            await front.jobs.cancel(job)  # not held up by the step
            assert set(states(job).values()) == {"cancelled"}
        await self.stays_cancelled(settings, job)

    async def test_of_one_accepted_while_pausing(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await front.jobs.pause()
            job = await front.jobs.accept("ann", body(ONE, TWO), None)
            await front.jobs.cancel(await front.jobs.find("ann", job.id))
            assert set(states(await front.jobs.find("ann", job.id)).values()) == {"cancelled"}
        await self.stays_cancelled(settings, job)

    async def test_of_one_whose_run_failed(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*_: Any) -> None:
            raise RuntimeError("nobody foresaw this")

        async with open_front(settings) as front:
            with monkeypatch.context() as patch:
                patch.setattr(front.jobs.journal, "record", fail)
                job = await front.jobs.accept("ann", body(ONE, TWO), None)
                while front.jobs._runs:
                    await asyncio.sleep(0)
            await front.jobs.cancel(job)
            assert set(states(job).values()) == {"cancelled"}
        await self.stays_cancelled(settings, job)

    async def test_that_cannot_be_recorded_is_refused_and_the_job_goes_on(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE, TWO), None)
            while not front.computer.submitted:
                await asyncio.sleep(0)
            with monkeypatch.context() as patch:
                patch.setattr(front.jobs.journal, "record", read_only)
                with pytest.raises(ServiceError, match="couldn't be kept, so the job goes on") as error:
                    await asyncio.wait_for(front.jobs.cancel(job), 30)
                assert error.value.code == "read_only"
            front.computer.gate.set()
            await front.jobs.wait(job, 60)
            assert job.state == "done"

    async def test_while_the_end_of_a_step_cannot_be_recorded(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = asyncio.Event()

        async def refuse(*_: Any) -> None:
            asked.set()
            await read_only()

        async with open_front(settings) as front:
            with monkeypatch.context() as patch:
                patch.setattr(front.jobs.journal, "record", refuse)
                job = await front.jobs.accept("ann", body(ONE, TWO), None)
                await asked.wait()
                with refused("read_only"):
                    await asyncio.wait_for(front.jobs.cancel(job), 30)
            await front.jobs.cancel(job)
            assert set(states(job).values()) == {"cancelled"}

    async def test_in_a_folder_that_cannot_be_written(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_front(settings) as front:
            job = await paused_after_one(front)
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            async with open_front(settings) as front:
                found = await front.jobs.find("ann", job.id)
                with refused("read_only"):
                    await front.jobs.cancel(found)
                assert states(found) == {"one": "done", "two": "queued"}
                assert front.computer.submitted == []
        async with open_front(settings) as front:
            found = await front.jobs.find("ann", job.id)
            await front.jobs.wait(found, 60)
            assert found.state == "done"

    @staticmethod
    async def stays_cancelled(settings: Settings, job: Job, results: int = 0) -> None:
        """After the next start too; of what it kept there are only the results."""
        async with open_front(settings) as front:
            found = await front.jobs.find("ann", job.id)
            assert (found.state, states(found)) == ("cancelled", states(job))
            await front.store.effects.settle()
            assert front.computer.submitted == []
            assert len(list((settings.data / "tensors").iterdir())) == results


async def paused_after_one(front: Front) -> Job:
    """A job of two steps whose first was recorded when the service began to shut down."""
    job = await front.jobs.accept("ann", body(ONE, TWO), None)
    while not job.steps["one"].ended:
        await asyncio.sleep(0)
        if front.computer.computed:
            front.computer.draining = True
    await front.jobs.pause()
    while front.jobs._runs:
        await asyncio.sleep(0)
    return job


async def read_only(*_: Any) -> None:
    raise ServiceError("read_only", "the data folder can't be written")


class TestQuota:
    """Steps take 120 FLOPs each."""

    MANY = tuple({**ONE, "id": f"s{n}"} for n in range(12))
    SLOW = Rate("1", 0.1)  # which one step owes for 20 minutes

    async def begin(self, front: Front, *steps: dict[str, Any], owner: str = "ann", **options: Any) -> Job:
        job = await front.jobs.accept(owner, body(*steps), None, **options)
        await front.jobs.wait(job, 0.1)
        return job

    async def test_steps_wait_until_it_permits_them(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            began = time.monotonic()
            job = await self.begin(front, *self.MANY, rate=Rate("1", 1200.0))
            await front.jobs.wait(job, 60)
            assert (job.state, len(front.computer.submitted)) == ("done", 12)
            assert time.monotonic() - began > 0.19

    async def test_each_has_its_turn(self) -> None:
        rate, stop, paid = Rate("1", 1e4), asyncio.Event(), []
        line = Line(Rates())

        async def pay(flops: float) -> None:
            await line.pay(rate, flops, stop)
            paid.append(flops)

        await asyncio.gather(*map(pay, (1e4, 2e3, 10.0)))
        assert paid == [1e4, 2e3, 10.0]

    async def test_who_waits_for_it_keeps_nobody_else(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "ACTIVE_STEPS", 1)
        async with open_front(settings) as front:
            job = await self.begin(front, *self.MANY, rate=self.SLOW)
            assert sorted(states(job).values()) == ["done"] + ["running"] * 11
            slots = front.store.contents.memory.slots
            assert slots.bytes_by_state["request"] == slots.bytes_by_state["reply"] == 0
            other = await self.begin(front, ONE, owner="bob", rate=Rate("2", 1e3))
            await front.jobs.wait(other, 20)
            assert other.state == "done"
            await front.jobs.cancel(job)
            assert job.state == "cancelled"

    async def test_outlives_a_restart_which_does_not_wait_for_it(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            job = await self.begin(front, *self.MANY[:3], rate=self.SLOW)
            began = time.monotonic()
        assert time.monotonic() - began < 5
        async with open_front(settings) as front:
            found = await front.jobs.find("ann", job.id)
            await front.jobs.wait(found, 0.1)
            assert sorted(states(found).values()) == ["done", "done", "running"]

    async def test_a_deadline_passes_meanwhile(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await self.begin(front, ONE, rate=self.SLOW)
            front.computer.refusals.append("deadline")
            job = await self.begin(front, {**ONE, "deadline_ms": 20}, rate=self.SLOW)
            await front.jobs.wait(job, 20)
            assert (job.state, job.steps["one"].row.code) == ("failed", "deadline")


class TestRestart:
    async def test_goes_on_where_it_was(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            await put(front.store, "ann", "w", tensor(5, 2, seed=2))
            two = {**TWO, "b": {"handle": "w"}}
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE, two), None)
            front.computer.gate.set()
            while states(job) != {"one": "done", "two": "running"}:
                await asyncio.sleep(0)
                if front.computer.computed:
                    front.computer.draining = True
            await front.store.delete("ann", "w")
        assert job.state != "done"
        async with open_front(settings) as front:
            found = await front.jobs.find("ann", job.id)
            await front.jobs.wait(found, 60)
            assert states(found) == {"one": "done", "two": "done"}
            assert front.computer.computed == 1  # step one had been recorded
            np.testing.assert_array_equal(await result(front, found, "two"), (A @ B) @ tensor(5, 2, seed=2))

    async def test_what_is_running_at_the_end_is_recorded(self, settings: Settings) -> None:
        async with open_front(settings) as front:
            front.computer.gate.clear()
            job = await front.jobs.accept("ann", body(ONE), None)
            while not front.computer.submitted:
                await asyncio.sleep(0)
            pausing = asyncio.create_task(front.jobs.pause())
            await pausing
            with refused("draining"), front.jobs.arriving("ann", None):
                pass
        assert job.state == "done"
        async with open_front(settings) as front:
            assert (await front.jobs.find("ann", job.id)).state == "done"
            assert front.computer.submitted == []


class TestModel:
    def spec(self, id_: str, *needs: str) -> StepRow:
        inputs = {name: Input(step=need) for name, need in zip("ab", needs, strict=False)}
        return rows_of([Spec(id_, inputs, Params("fp32"), "fp32", (1, 1))])[0]

    @pytest.fixture
    def job(self) -> Job:
        rows = (self.spec("a"), self.spec("b", "a"), self.spec("c", "b", "a"), self.spec("d"))
        return Job.of(JobRow("id", "ann", 0.0, steps=rows))

    def test_startable(self, job: Job) -> None:
        assert [step.spec.id for step in job.startable()] == ["a", "d"]
        job.steps["a"].state = "done"
        assert [step.spec.id for step in job.startable()] == ["b", "d"]

    def test_dependents_are_found_through_others(self, job: Job) -> None:
        assert [step.spec.id for step in job.dependents([job.steps["a"]])] == ["b", "c"]
        assert job.dependents([job.steps["d"]]) == []

    @pytest.mark.parametrize(
        ("states", "state"),
        [
            (["done", "done"], "done"),
            (["done", "running"], ""),
            (["done", "failed", "skipped"], "failed"),
            (["cancelled", "failed"], "cancelled"),
        ],
    )
    def test_end(self, job: Job, states: list[str], state: str) -> None:
        assert job.end(states) == state

    @pytest.mark.parametrize(
        ("code", "count", "seconds", "again"),
        [
            ("queue_full", 1000, 1e6, True),
            ("no_room", 5, 299.0, True),
            ("no_room", 5, 301.0, False),
            ("no_worker", runner.WORKER_TRIES, 0.0, False),
            ("deadline", 0, 0.0, False),
            ("unsupported", 0, 0.0, False),
        ],
    )
    def test_tries(self, code: str, count: int, seconds: float, again: bool) -> None:
        delay = runner.Tries(count, seconds).delay(code)
        assert (delay is not None) == again
        assert delay is None or 0 < delay <= runner.LAST_DELAY
