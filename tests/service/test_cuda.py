"""The driver of a GPU over a stand-in of it: what waits keeps its operands, and keeps nobody waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from kernels import probe  # noqa: E402
from service import ipc  # noqa: E402
from service.drivers.cuda import LANES  # noqa: E402
from service.memory import Memory  # noqa: E402
from service.messages import ON_DEVICE, Batch, BatchDone, Item, Map, Operand, Params, Report  # noqa: E402
from tests.service import cuda_stand_in  # noqa: E402
from tests.service.cuda_stand_in import OWN, Arenas, StandIn  # noqa: E402

X = np.eye(8, dtype=np.float16)
Y = np.arange(64, dtype=np.float16).reshape(8, 8)


class Bench:
    """A driver that is opened, and what became of each batch. While `held`, nothing that was launched ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = False
        monkeypatch.setattr(cuda_stand_in.Event, "query", lambda event: not self.held)
        cuda_stand_in.undone(monkeypatch)
        self.memory = Arenas()
        self.driver = StandIn(Memory(self.memory.arena))
        self.driver.start(lambda report: None)
        self.done: dict[int, BatchDone] = {}
        self._b = self.memory.put(Y, "fp16")

    def submit(self, number: int, a: Operand | None = None, out: str = "") -> Operand:
        """A batch of one product; where its D goes."""
        d = self.memory.room((8, 8), "fp16", 128)
        d = Operand(d.offset, d.nbytes, d.dtype, d.shape, out)
        a = self.memory.put(X, "fp16") if a is None else a
        item = Item(number, a, self._b, d, Params("fp16"))
        self.driver.submit(Batch(number, (item,)), lambda done: self.done.__setitem__(done.id, done))
        return d

    def finish(self) -> None:
        self.held = False
        while self.driver.advance():
            pass


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    yield bench
    bench.finish()


def test_an_event_is_used_again_once_its_batch_was_told_of_and_not_before(bench: Bench) -> None:
    bench.held = True
    for number in range(LANES):
        bench.submit(number)
    taken = [event for flight in bench.driver._flights for event in flight.events]
    assert len(taken) == len({id(event) for event in taken}) >= 2 * LANES
    assert {id(run.ended) for flight in bench.driver._flights for run in flight.runs} < set(map(id, taken))
    bench.finish()
    bench.held = True
    for number in range(LANES):
        bench.submit(LANES + number)
    again = [event for flight in bench.driver._flights for event in flight.events]
    assert sorted(map(id, again)) == sorted(map(id, taken))


def test_a_batch_takes_no_event_of_one_that_is_told_of_now(bench: Bench) -> None:
    """A front may send the next batch as soon as it hears, which is before the worker is done with the last."""
    seen: list[list[Any]] = []

    def told(done: BatchDone) -> None:
        bench.submit(9)
        seen.append([event for flight in bench.driver._flights for event in flight.events])

    d = bench.memory.room((8, 8), "fp16", 128)
    item = Item(1, bench.memory.put(X, "fp16"), bench._b, d, Params("fp16"))
    bench.driver.submit(Batch(1, (item,)), told)
    (flight,) = bench.driver._flights
    own = list(map(id, flight.events))
    bench.finish()
    assert seen[0]
    assert not set(map(id, seen[0])) & set(own)
    assert bench.done[9].items[0].code == ""


def test_tensors_of_clients_memory_go_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same product again, over memory that is another's now under the same number."""
    other = X[::-1].copy()
    d = np.zeros((8, 8), np.float16)
    memory = {bytes([n]) * 64: x for n, x in enumerate((X, Y, d, other))}
    monkeypatch.setattr(ipc, "open_handle", lambda handle: (memory[handle].ctypes.data, 128))
    monkeypatch.setattr(ipc, "close_handle", lambda pointer: None)
    bench.driver._lent._index = None  # type: ignore[assignment]  # as torch has it for the CPU
    for region, handle in enumerate(list(memory)[:3], 1):
        bench.driver.map(Map(region, 128, handle), -1)
    a, b, out = (Operand(0, 128, "fp16", (8, 8), "", region) for region in (1, 2, 3))

    def multiply(number: int) -> None:
        batch = Batch(number, (Item(number, a, b, out, Params("fp16")),))
        bench.driver.submit(batch, lambda done: bench.done.__setitem__(done.id, done))
        bench.finish()
        assert bench.done[number].items[0].code == ""

    for number in range(2):
        multiply(number)
        assert np.array_equal(d, Y)
        d[:] = 0
    bench.driver.unmap(1)
    bench.driver.map(Map(1, 128, list(memory)[3]), -1)
    multiply(2)
    assert np.array_equal(d, Y[::-1])


class Untested(StandIn):
    """The self-test of its own variant is still to come."""

    def _admit(self, runtime: Any, *_: Any, on_known: Callable[[], None], **__: Any) -> None:
        runtime.bar(OWN, probe.WAITING)
        on_known()


def test_the_front_hears_what_is_untested_before_the_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_stand_in.undone(monkeypatch)
    reports: list[Report] = []
    driver = Untested(Memory(Arenas().arena))
    driver.start(reports.append)
    assert reports[0].quarantined == {OWN: "untested"}
    driver.close()


def test_submit_returns_at_once_and_batches_end_in_order(bench: Bench) -> None:
    bench.held = True
    for number in range(2 * LANES):
        bench.submit(number)
    assert bench.driver.advance()
    assert not bench.done
    bench.finish()
    assert list(bench.done) == list(range(2 * LANES))
    assert all(done.host >= 0 for done in bench.done.values())


@pytest.mark.parametrize("change", ["forget", "settled"])
def test_what_a_waiting_batch_names_is_there_when_its_turn_comes(bench: Bench, change: str) -> None:
    kept = bench.submit(0, out="o/d@1")
    bench.finish()
    assert bench.done[0].items[0].kept
    bench.held = True
    for number in range(1, LANES + 1):
        bench.submit(number)
    only = Operand(kept.offset, kept.nbytes, kept.dtype, kept.shape, "o/d@1", ON_DEVICE)
    d = bench.submit(9, a=only)
    getattr(bench.driver, change)(["o/d@1"])
    bench.driver._cache.shrink(0)  # as when memory is short
    bench.finish()
    assert bench.done[9].items[0].code == ""
    assert np.array_equal(bench.memory.get(d), (Y.astype(np.float64) @ Y).astype(np.float16))
    assert ("o/d@1" in bench.driver._cache) == (change == "settled")


def test_a_result_is_fetched_while_batches_wait(bench: Bench) -> None:
    kept = bench.submit(0, out="o/d@1")
    bench.finish()
    bench.held = True
    for number in range(1, LANES + 3):
        bench.submit(number)
    told: list[str] = []
    bench.driver.fetch(kept, told.append)
    bench.driver.fetch(Operand(0, 128, "fp16", (8, 8), "o/unknown@1"), told.append)
    assert told == ["the device doesn't have it"]
    bench.finish()
    assert told[1:] == [""]
    assert np.array_equal(bench.memory.get(kept), Y)
