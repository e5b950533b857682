"""Who reads the link of a device that computes in the calling thread, with products that last as long as they are told.

Tests of a front's death run a worker in a process of its own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels.device import describe_cpu
from service.drivers.base import Queue
from service.inbox import PATIENCE
from service.link import WorkerLink, _Encoder, _Frames
from service.messages import (
    Batch,
    BatchDone,
    Drain,
    Fetch,
    Forget,
    Operand,
    Ping,
    Pong,
    Settled,
    ToFront,
    ToWorker,
    Unmap,
)
from service.worker import Worker
from tests.service.front_end import FrontEnd

ROOT = Path(__file__).resolve().parents[2]


class Computer:
    """Keeps the thread that submits a batch: short products for none, odd ones until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.computing = threading.Event()
        self.seen: list[Any] = []
        self.threads: set[int] = set()
        self.closed = False

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        self.threads.add(threading.get_ident())
        if batch.id % 2:
            self.computing.set()
            assert self.go.wait(60)
        self.seen.append(batch.id)
        done(BatchDone(batch.id, (), {}, {}, {}))

    def forget(self, tensors: tuple[str, ...]) -> None:
        self.seen.append(Forget(tensors))

    def settled(self, tensors: tuple[str, ...]) -> None:
        self.seen.append(Settled(tensors))

    def unmap(self, region: int) -> None:
        self.seen.append(Unmap(region))

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        fetched("a CPU keeps no results")

    def close(self) -> None:
        self.closed = True

    def nothing(self, *_: Any) -> None: ...

    start = ask = hung = map = nothing
    device, stacking, backend = describe_cpu(), True, "none"


class Link(WorkerLink):
    """Notes which threads read it, and which waits for more."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.readers: list[int] = []
        self.waiting = 0
        self.at_once = threading.Lock()

    def receive(self) -> list[ToWorker] | None:
        self.waiting = threading.get_ident()
        return super().receive()

    def receive_unless(self, bell: int) -> list[ToWorker] | None:
        self.waiting = threading.get_ident()
        return super().receive_unless(bell)

    def _receive(self, flags: int) -> list[ToWorker] | None:
        assert self.at_once.acquire(blocking=False), "two threads read the link"
        try:
            return super()._receive(flags)
        finally:
            self.readers.append(threading.get_ident())
            self.at_once.release()


class Front(FrontEnd):
    """The front's end, and a worker in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.computer = Computer()
        self.link = Link(self.theirs)
        before = set(threading.enumerate())
        worker = Worker(self.link, self.computer, self._descriptors[0])  # type: ignore[arg-type]
        self.thread = threading.Thread(target=worker.run)
        self.thread.start()
        self.send(Ping(0))
        assert self.next(1) == [Pong(0)]
        (self.deputy,) = (each for each in set(threading.enumerate()) - before if each.name == "link")

    def begin(self, number: int) -> None:
        """A product that lasts, and has lasted for so long that the deputy reads."""
        assert number % 2
        self.send(Batch(number, ()))
        assert self.computer.computing.wait(60)
        self.computer.computing.clear()
        self.until(lambda: self.link.waiting == self.deputy.ident)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end
            time.sleep(PATIENCE / 10)

    def drain(self) -> None:
        self.computer.go.set()
        self.send(Drain())
        self.join()

    def join(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.deputy.join(10)
        assert not self.deputy.is_alive()
        assert self.computer.closed
        for end in (self.end, *self._descriptors):
            end.close()


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    yield front
    front.computer.go.set()


def test_a_device_that_computes_in_the_calling_thread_is_no_queue() -> None:
    assert not isinstance(Computer(), Queue)


def test_short_products_and_all_between_them_are_read_by_the_thread_that_computes(front: Front) -> None:
    begun = len(front.link.readers)
    for number in range(0, 400, 2):
        front.send(Batch(number, ()), Ping(number))
        assert len(front.next(2)) == 2
    # But where this computer held a product up for longer than the deputy's patience.
    other = [reader for reader in front.link.readers[begun:] if reader != front.thread.ident]
    assert len(other) < 40
    assert front.computer.threads == {front.thread.ident}
    front.drain()


def test_amid_a_long_product_pings_and_fetches_are_answered(front: Front) -> None:
    front.begin(1)
    for number in range(5):
        front.send(Ping(number))
        assert front.next(1) == [Pong(number)]
    front.send(Fetch(7, Operand(0, 4, "fp32", (1, 1), "o/d@1")))
    (answer,) = front.next(1)
    assert answer.code == "lost"  # type: ignore[union-attr]
    assert front.link.readers[-1] == front.deputy.ident
    front.drain()


def test_pings_are_answered_whatever_number_of_batches_waits(front: Front) -> None:
    front.send(Batch(1, ()), *(Batch(2 * n, ()) for n in range(500)), Ping(1))
    assert front.next(1) == [Pong(1)]
    front.send(Ping(2))
    assert front.next(1) == [Pong(2)]
    front.computer.go.set()
    assert [done.id for done in front.next(501)] == [1, *range(0, 1000, 2)]  # type: ignore[union-attr]
    front.drain()


def test_messages_reach_the_device_in_their_order_whoever_read_them(front: Front) -> None:
    sent: list[Any] = [Batch(0, ()), Forget(("a",)), Batch(1, ()), Forget(("b",)), Batch(3, ())]
    front.send(*sent)
    front.until(lambda: front.link.waiting == front.deputy.ident)
    for more in ([Settled(("c",))], [Batch(2, ()), Forget(("d",))], [Batch(5, ()), Unmap(4)]):
        front.send(*more, Ping(9))
        while Pong(9) not in front.next(1):
            pass
        sent += more
    front.send(last := Forget(("e",)))
    front.drain()
    assert front.computer.seen == [each.id if isinstance(each, Batch) else each for each in [*sent, last]]


def test_after_a_long_product_the_thread_that_computes_reads_again(front: Front) -> None:
    for number in range(1, 21, 2):
        front.begin(number)
        front.send(Ping(number))
        assert front.next(1) == [Pong(number)]
        front.computer.go.set()
        front.next(1)
        front.computer.go.clear()
        front.until(lambda: front.link.waiting == front.thread.ident)
        front.send(Batch(2 * number, ()))
        front.next(1)
        assert front.link.readers[-1] == front.thread.ident
    front.drain()


def test_a_front_that_always_has_a_batch_ahead_keeps_no_deputy(front: Front) -> None:
    front.computer.go.set()
    long = front.computer.submit

    def submit(batch: Batch, done: Callable[[BatchDone], None]) -> None:
        time.sleep(5 * PATIENCE if batch.id < 2 else PATIENCE / 10)
        long(batch, done)

    front.computer.submit = submit  # type: ignore[method-assign]
    front.send(Batch(0, ()), Batch(1, ()), Batch(2, ()))
    for number in range(3, 200):
        front.next(1)
        front.send(Batch(number, ()))
    front.next(3)
    # On a busy machine the deputy may have its turns, but it gives way.
    assert front.thread.ident in front.link.readers[-150:]
    front.drain()


def test_products_as_long_as_the_deputys_patience_lose_and_swap_nothing(front: Front) -> None:
    """They end while it comes and goes."""
    front.computer.go.set()
    slow = front.computer.submit

    def submit(batch: Batch, done: Callable[[BatchDone], None]) -> None:
        time.sleep(PATIENCE * (0.9 + batch.id % 7 / 10))
        slow(batch, done)

    front.computer.submit = submit  # type: ignore[method-assign]
    for number in range(60):
        front.send(Batch(number, ()), Ping(number), Forget((str(number),)))
        time.sleep(PATIENCE * (number % 5) / 2)
    answers = front.next(120)
    assert [each.number for each in answers if isinstance(each, Pong)] == list(range(60))
    assert [each.id for each in answers if isinstance(each, BatchDone)] == list(range(60))
    front.drain()
    assert front.computer.seen == [x for n in range(60) for x in (n, Forget((str(n),)))]


def test_an_idle_workers_threads_sleep_and_come_back(front: Front) -> None:
    def switches() -> list[str]:
        text = Path(f"/proc/self/task/{front.deputy.native_id}/status").read_text()
        return [line for line in text.splitlines() if "ctxt_switches" in line]

    def sleeps() -> bool:
        """For as long as it would otherwise look ten times."""
        before = switches()
        time.sleep(10 * PATIENCE)
        return switches() == before

    front.send(Batch(0, ()))
    front.next(1)
    front.until(sleeps)
    front.begin(1)
    front.send(Ping(1))
    assert front.next(1) == [Pong(1)]
    front.drain()


def test_what_was_sent_before_a_drain_amid_a_product_is_done_first(front: Front) -> None:
    front.begin(1)
    front.send(Batch(2, ()), Forget(("a",)), Drain(), Ping(1))
    assert front.next(1) == [Pong(1)]
    assert front.thread.is_alive()
    front.computer.go.set()
    assert [done.id for done in front.next(2)] == [1, 2]  # type: ignore[union-attr]
    front.join()
    assert front.computer.seen == [1, 2, Forget(("a",))]


_ALONE = """
import socket, sys, time
from service.link import WorkerLink
from service.messages import Pong
from service.worker import Worker
from tests.service.test_inbox import Computer
link = WorkerLink(socket.socket(fileno=int(sys.argv[1])))
link.send(Pong(0))
Worker(link, Computer(), socket.socketpair()[0]).run()
"""


@pytest.mark.parametrize("amid", [True, False])
def test_a_worker_ends_with_the_front_amid_a_product_too(amid: bool) -> None:
    end, theirs = socket.socketpair()
    end.settimeout(60)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _ALONE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        frames: _Frames[ToFront] = _Frames(ToFront)
        assert frames.feed(end.recv(1 << 16)) == [Pong(0)]
        if amid:
            end.sendall(_Encoder().frame(Batch(1, ())))
            time.sleep(5 * PATIENCE)
        end.close()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
