"""The supervisor with a real worker process, without HTTP: slots, retries, cancelling, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from service.admit import Bounds
from service.arena import Arena, Slots
from service.batch import Limits, Work
from service.begun import Begun
from service.errors import ServiceError
from service.estimate import Estimate
from service.handle import Flight, Handle, State, Times
from service.messages import Operand, Params
from service.metrics import Metrics
from service.outcome import Outcome
from service.supervisor import Options, Supervisor

OPTIONS = Options(
    Limits(), Bounds(1000, 1 << 40), Times(ping=0.1, hang=60.0), ("--backend", "numpy"), patience=60
)


class Bench:
    """An arena, a supervisor with one worker, and works over them."""

    def __init__(self, options: Options = OPTIONS) -> None:
        self.arena = Arena.create(256 << 20)
        self.slots = Slots(self.arena)
        self.metrics = Metrics()
        self.supervisor = Supervisor(self.arena, self.metrics, options)

    async def start(self) -> Bench:
        self.supervisor.start()
        await self.until(lambda: self.supervisor.ready)
        return self

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Workers stand still for the length of a block, however fast they are."""
        pids = [handle.pid for handle in self.supervisor.handles if handle.pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    async def until(self, true: object, seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not true():  # type: ignore[operator]
                await asyncio.sleep(0.01)

    def work(
        self, a: np.ndarray, b: np.ndarray, *, tensor: str = "", **fields: object
    ) -> tuple[Work, np.ndarray]:
        """A work over new slots, which go when it is done, and D's array (in a slot of the test's own).

        `tensor` names B where it counts as stored.
        """
        slots = [self.slots.allocate(x.nbytes) for x in (a, b)]
        for slot, x in zip(slots, (a, b), strict=True):
            slot.view(x.nbytes)[:] = x.tobytes()
        shape = (a.shape[0], b.shape[1])
        nbytes = shape[0] * shape[1] * a.itemsize
        out = self.slots.allocate(nbytes, state="reply")
        kind = {4: "fp32", 8: "fp64"}[a.itemsize]

        def release() -> None:
            for slot in slots:
                slot.release()

        work = Work(
            id=self.supervisor.work_id(),
            a=Operand(slots[0].offset, a.nbytes, kind, a.shape),
            b=Operand(slots[1].offset, b.nbytes, kind, b.shape, tensor=tensor),
            out=Operand(out.offset, nbytes, kind, shape),
            params=Params(kind),
            release=release,
            **fields,  # type: ignore[arg-type]
        )
        return work, np.frombuffer(out.view(nbytes), a.dtype).reshape(shape)

    async def gemm(self, a: np.ndarray, b: np.ndarray, **fields: object) -> Outcome:
        """Submit, check D, and tell the outcome."""
        work, d = self.work(a, b, **fields)
        outcome = await self.supervisor.submit(work)
        np.testing.assert_allclose(d, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
        return outcome


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    one = await Bench().start()
    yield one
    await one.supervisor.drain(10)
    assert one.slots.bytes_by_state["request"] == 0
    one.arena.close()


A = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((7, 9)).astype(np.float32)
HEAVY = np.random.default_rng(3).standard_normal((1200, 1200))


async def test_an_outcome_tells_what_ran_and_how_long(bench: Bench) -> None:
    outcome = await bench.gemm(A, B)
    assert outcome.variant == "reference-numpy"
    assert outcome.why
    assert outcome.compute_seconds > 0
    assert bench.slots.bytes_by_state["request"] == 0


async def test_a_workers_idle_blas_threads_leave_the_cores_to_others(bench: Bench) -> None:
    environ = Path(f"/proc/{bench.supervisor.handles[0].pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_WAIT_POLICY=" + os.environ.get("OMP_WAIT_POLICY", "PASSIVE").encode() in environ


async def test_many_at_once_are_batched_and_right(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(bench.gemm(A * n, B) for n in range(100)))
    assert max(outcome.batched for outcome in outcomes) > 1


async def test_work_of_a_dead_worker_runs_once_more(bench: Bench) -> None:
    with bench.standing():
        tasks = [asyncio.ensure_future(bench.gemm(HEAVY, HEAVY)) for _ in range(2)]
        await bench.until(lambda: bench.supervisor.handles[0].flights)
        os.kill(bench.supervisor.handles[0].pid or 0, signal.SIGKILL)
    await asyncio.gather(*tasks)


async def test_work_that_two_workers_died_with_fails_clearly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, deaths = Handle.send, []

    def deadly(handle: Handle, flight: Flight) -> None:
        send(handle, flight)
        assert handle.pid is not None
        os.kill(handle.pid, signal.SIGKILL)
        deaths.append(handle.pid)

    work, _ = bench.work(HEAVY, HEAVY)
    with monkeypatch.context() as patch:
        patch.setattr(Handle, "send", deadly)
        with pytest.raises(ServiceError, match="two workers ended") as caught:
            await bench.supervisor.submit(work)
    assert (caught.value.code, caught.value.status) == ("no_worker", 503)
    assert len(deaths) == 2
    await bench.until(lambda: bench.supervisor.ready)
    await bench.gemm(A, B)


async def test_ten_deaths_in_a_row_are_backed_off_ever_longer_and_survived() -> None:
    times = Times(ping=0.1, backoff_first=0.1, backoff_most=0.4)
    bench = await Bench(replace(OPTIONS, times=times)).start()
    (handle,) = bench.supervisor.handles
    told = []
    for death in range(1, 11):
        await bench.until(lambda: handle.pid is not None)
        os.kill(handle.pid or 0, signal.SIGKILL)
        await bench.until(lambda death=death: handle.failures == death)
        told.append(handle.detail)
    delays = [min(0.1 * 2**n, 0.4) for n in range(10)]
    assert [text.partition(", ")[2] for text in told] == [f"starts again in {d:.1f} s" for d in delays]
    await bench.until(lambda: bench.supervisor.ready)
    await bench.gemm(A, B)
    assert handle.failures == 0, "a product done ends the row"
    await bench.supervisor.drain(10)
    bench.arena.close()


async def test_cancelling_drops_queued_work_and_outlives_running_work(bench: Bench) -> None:
    with bench.standing():
        running = asyncio.ensure_future(bench.gemm(HEAVY, HEAVY))
        await bench.until(lambda: bench.supervisor.handles[0].flights)
        kept, queued = (asyncio.ensure_future(bench.gemm(A, B)) for _ in range(2))
        await bench.until(lambda: bench.supervisor.queue.depth == 2)
        queued.cancel()
        running.cancel()
        await bench.until(lambda: queued.done() and running.done())
        assert bench.supervisor.queue.depth == 1
    results = await asyncio.gather(queued, running, kept, return_exceptions=True)
    assert [type(r) for r in results[:2]] == [asyncio.CancelledError, asyncio.CancelledError]
    assert isinstance(results[2], Outcome)
    assert bench.supervisor.queue.depth == 0
    await bench.until(lambda: bench.slots.bytes_by_state["request"] == 0)


async def test_who_is_no_task_is_told_once_and_may_leave(bench: Bench) -> None:
    """Left while it is queued, left while a worker has it, computed, and refused."""
    told: dict[str, list[object]] = {"queued": [], "running": [], "computed": [], "refused": []}
    x = np.random.default_rng(5).random((64, 64), np.float32)

    def begin(name: str, work: Work) -> Begun:
        return bench.supervisor.begin(work, lambda *became: told[name].append(became))

    held = 2 * x.nbytes
    with bench.standing():
        products = [bench.work(x, x) for _ in range(4)]
        begun = [begin("running" if number == 0 else "queued", products[number][0]) for number in range(4)]
        assert bench.supervisor.queue.depth > 0
        for each in begun:
            each.cancel()
            each.cancel()
        assert all(each.done() for each in begun)
        assert bench.supervisor.queue.depth == 0
        assert bench.slots.bytes_by_state["request"] in (held, 2 * held)  # what the worker has
    assert told["running"] == [(None, None)]
    assert told["queued"] == 3 * [(None, None)]
    work, d = bench.work(x, x)
    done = begin("computed", work)
    await bench.until(done.done)
    done.cancel()
    ((outcome, error),) = told["computed"]  # type: ignore[misc]
    assert isinstance(outcome, Outcome)
    assert error is None
    np.testing.assert_allclose(d, x.astype(np.float64) @ x, rtol=1e-5)
    begin("refused", replace_params(bench.work(x, x)[0], variant="step9-none"))
    await bench.until(lambda: told["refused"])
    ((outcome, error),) = told["refused"]  # type: ignore[misc]
    assert outcome is None
    assert isinstance(error, ServiceError)
    assert error.code == "unsupported"
    await bench.until(lambda: bench.slots.bytes_by_state["request"] == 0)


async def test_who_is_told_may_leave_another_product_and_each_is_released_once() -> None:
    """As a session does whose client is gone when it is to be told; here for want of a worker."""
    bench = Bench(replace(OPTIONS, patience=0.0))
    bench.supervisor.start()
    x = np.ones((8, 8), np.float32)
    released: list[int] = []
    told: list[Exception | None] = []
    products: list[Begun] = []

    def tell(outcome: Outcome | None, error: Exception | None) -> None:
        told.append(error)
        for each in products:
            each.cancel()

    for _ in range(3):
        work, _ = bench.work(x, x)
        work.release = lambda number=work.id: released.append(number)  # type: ignore[misc]
        products.append(bench.supervisor.begin(work, tell))
    await bench.until(lambda: len(told) == 3)
    assert isinstance(told[0], ServiceError)
    assert told[0].code == "no_worker"
    assert told[1:] == [None, None]
    assert len(set(released)) == len(released) == 3
    assert bench.supervisor.queue.depth == 0
    await bench.supervisor.drain(10)
    bench.arena.close()


async def test_a_cpu_with_work_is_sent_no_more_so_that_stacks_grow(bench: Bench) -> None:
    bench.supervisor.tally.estimate = Estimate({"fp32": 1e9}, 1e9)  # a product takes longer than the link
    with bench.standing():
        tasks = [asyncio.ensure_future(bench.gemm(HEAVY, HEAVY)) for _ in range(3)]
        await bench.until(lambda: bench.supervisor.handles[0].flights)
        await bench.until(lambda: bench.supervisor.queue.depth >= 2)
        assert (len(bench.supervisor.handles[0].flights), bench.supervisor.queue.depth) == (1, 2)
    await asyncio.gather(*tasks)


async def test_a_question_is_answered_or_refused(bench: Bench) -> None:
    answer = await bench.supervisor.ask("variants")
    assert answer["variants"][0]["name"] == "reference-numpy"
    with pytest.raises(ServiceError, match="can't answer") as caught:
        await bench.supervisor.ask("tea")
    assert caught.value.code == "invalid"


async def test_a_variant_that_does_not_exist_is_422(bench: Bench) -> None:
    work, _ = bench.work(A, B)
    with pytest.raises(ServiceError, match="does not exist") as caught:
        await bench.supervisor.submit(replace_params(work, variant="step10"))
    assert (caught.value.code, caught.value.status, caught.value.field) == ("unsupported", 422, "variant")


def replace_params(work: Work, **changes: str) -> Work:
    params = Params(work.params.out_dtype, **changes)  # type: ignore[arg-type]
    return Work(work.id, work.a, work.b, work.out, params, release=work.release)


async def test_a_device_that_needs_a_person_keeps_the_worker_down_and_says_so() -> None:
    bench = Bench(replace(OPTIONS, arguments=("--device", "cuda-of-another-world")))
    bench.supervisor.start()
    queued = asyncio.ensure_future(bench.gemm(A, B))
    with pytest.raises(ServiceError, match="no worker") as caught:
        await queued
    assert caught.value.status == 503
    assert bench.supervisor.handles[0].state is State.DOWN
    with pytest.raises(ServiceError, match=r"needs a person: .*cuda-of-another-world"):
        await bench.gemm(A, B)
    with pytest.raises(ServiceError, match=r"needs a person: .*cuda-of-another-world"):
        await bench.supervisor.ask("variants")
    assert bench.supervisor.handles[0].failures == 1
    assert bench.slots.bytes_by_state["request"] == 0
    await bench.supervisor.drain(1)
    bench.arena.close()


async def test_draining_refuses_new_work_and_finishes_the_rest(bench: Bench) -> None:
    with bench.standing():
        running = asyncio.ensure_future(bench.gemm(HEAVY, HEAVY))
        await bench.until(lambda: bench.supervisor.handles[0].flights)
        draining = asyncio.ensure_future(bench.supervisor.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as caught:
            await bench.gemm(A, B)
        assert caught.value.code == "draining"
        assert not running.done()
    await running
    await draining
    assert bench.supervisor.handles[0].pid is None


async def test_what_outlives_the_grace_is_told_so_and_may_be_asked_elsewhere(bench: Bench) -> None:
    with bench.standing():
        running = asyncio.ensure_future(bench.gemm(HEAVY, HEAVY))
        await bench.until(lambda: bench.supervisor.handles[0].flights)
        queued = [asyncio.ensure_future(bench.gemm(A, B)) for _ in range(2)]
        await bench.until(lambda: bench.supervisor.queue.depth == 2)
        await bench.supervisor.drain(0.2)
    for each in (running, *queued):
        with pytest.raises(ServiceError, match="shut down before") as caught:
            await each
        assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("draining", 503, 1.0)
    assert bench.slots.bytes_by_state["request"] == 0


async def test_two_workers_share_the_work_and_one_that_dies_takes_only_itself_out() -> None:
    bench = await Bench(replace(OPTIONS, workers=2)).start()
    await bench.until(lambda: all(handle.state is State.READY for handle in bench.supervisor.handles))
    with bench.standing():
        tasks = [asyncio.ensure_future(bench.gemm(HEAVY, HEAVY)) for _ in range(4)]
        await bench.until(lambda: all(handle.flights for handle in bench.supervisor.handles))
        os.kill(bench.supervisor.handles[0].pid or 0, signal.SIGKILL)
        await bench.until(lambda: bench.supervisor.handles[0].state is not State.READY)
        assert bench.supervisor.ready
    await asyncio.gather(*tasks)
    text = bench.metrics.exposition()[0].decode()
    assert 'gemm_placements_total{reason="least_queued",worker="0"}' in text
    assert 'worker="1"' in text
    await bench.supervisor.drain(10)
    bench.arena.close()


async def test_what_can_stack_and_arrives_in_one_turn_of_the_loop_is_one_batch(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(bench.gemm(A, B, tensor="w@1", deadline=None) for _ in range(30)))
    assert {outcome.batched for outcome in outcomes} == {30}


async def test_what_cannot_stack_waits_for_no_company(bench: Bench) -> None:
    outcomes = await asyncio.gather(*(bench.gemm(A, B, deadline=None) for _ in range(30)))
    assert outcomes[0].batched == 1
    assert sum(1 / outcome.batched for outcome in outcomes) < 30  # the rest went together
