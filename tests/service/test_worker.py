"""The worker's loops over a link, with devices that are told what to do: who answers pings, and when it sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernels.device import describe_cpu
from service.drivers.base import Queue
from service.drivers.cpu import CpuDriver
from service.link import WorkerLink
from service.messages import Batch, BatchDone, Drain, Fetch, Operand, Ping, Pong
from service.worker import Worker
from tests.service.front_end import FrontEnd


class Device:
    """Batches are over when `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.waiting: list[tuple[Batch, Callable[[BatchDone], None]]] = []
        self.threads: set[int] = set()
        self.looked = 0
        self.closed = False

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        self.threads.add(threading.get_ident())
        self.waiting.append((batch, done))

    def advance(self) -> bool:
        self.looked += 1
        while self.waiting and self.go.is_set():
            batch, done = self.waiting.pop(0)
            done(BatchDone(batch.id, (), {}, {}, {}))
        return bool(self.waiting)

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        fetched("the device doesn't have it")

    def close(self) -> None:
        self.closed = True

    def nothing(self, *_: Any) -> None: ...

    start = ask = forget = settled = hung = map = unmap = nothing
    device, stacking, backend = describe_cpu(), True, "none"


class Front(FrontEnd):
    """The front's end."""

    def __init__(self, device: Any, awake: float = 0.0) -> None:
        super().__init__()
        worker = Worker(WorkerLink(self.theirs), device, self._descriptors[0], awake)
        self.thread = threading.Thread(target=worker.run)
        self.thread.start()

    def drain(self) -> None:
        self.send(Drain())
        self.thread.join(10)
        for end in (self.end, *self._descriptors):
            end.close()


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.go.set()


def test_a_device_that_works_by_itself_is_known_by_its_methods(device: Device) -> None:
    assert isinstance(device, Queue)
    assert not hasattr(CpuDriver, "advance")


@pytest.mark.parametrize("awake", [0.0, 0.002])
def test_pings_are_answered_whatever_number_of_batches_waits(device: Device, awake: float) -> None:
    front = Front(device, awake)
    front.send(*(Batch(n, ()) for n in range(500)), Ping(1))
    assert front.next(1) == [Pong(1)]
    front.send(Ping(2), Fetch(7, Operand(0, 4, "fp32", (1, 1), "o/d@1")))
    pong, answer = front.next(2)
    assert pong == Pong(2)
    assert answer.code == "lost"  # type: ignore[union-attr]
    device.go.set()
    assert [done.id for done in front.next(500)] == list(range(500))  # type: ignore[union-attr]
    front.drain()
    assert device.closed
    assert device.threads == {front.thread.ident}


def test_an_idle_worker_sleeps_and_a_busy_one_looks_less_often_the_longer_it_takes(device: Device) -> None:
    front = Front(device, 0.002)
    time.sleep(0.1)
    assert device.looked == 0
    front.send(Batch(1, ()))
    end = time.monotonic() + 10
    while device.looked < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert device.looked > 3
    time.sleep(0.3)
    looked = device.looked
    time.sleep(0.3)
    # Every twentieth of the time since it began, at most: 14 looks double it.
    assert device.looked - looked < 60
    device.go.set()
    front.next(1)
    front.drain()
