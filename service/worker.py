"""The worker process, owner of the device: receives batches over the link, hands on their outcomes.

One thread reads the link, answers pings and drives the device. Where that works by itself, the thread waits for
neither while there is something to do for the other. A device that computes in the calling thread holds it up: then
another reads (service.inbox). Questions that take their time have a thread too. Tensors are in the arena, which both
map.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import NoReturn

from kernels.problem import Unsupported
from kernels.reference import has_torch
from service import logs
from service.arena import Arena
from service.awake import Awake
from service.drivers.base import CannotStart, Driver, Queue
from service.handle import EXIT_CANNOT_START, EXIT_NEEDS_PERSON
from service.inbox import Inbox
from service.link import WorkerLink, receive_descriptor
from service.memory import Memory
from service.messages import (
    Answer,
    Ask,
    Batch,
    Drain,
    Failed,
    Fetch,
    Forget,
    Hung,
    Map,
    Ping,
    Pong,
    Ready,
    Settled,
    ToWorker,
    Unmap,
)
from service.version import version

log = logging.getLogger("gemm.worker")

ToDevice = Batch | Forget | Settled | Map | Unmap

#: What is not over after a while is looked at again after this share of that while; and at least so many seconds.
NAP_SHARE = 0.05
NAP_SECONDS = 50e-6

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Run a worker on descriptors that the supervisor passed. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    logs.setup(arguments.log_format, arguments.log_level)
    _die_with_parent()
    # Threads hand each other single messages; the default of 5 ms would let one that computes in Python hold up an
    # answer for longer than the product takes.
    sys.setswitchinterval(0.0005)
    # The front decides when this process ends; a Ctrl-C in a terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = WorkerLink(socket.socket(fileno=arguments.link))
    memory = Memory(Arena(arguments.arena, arguments.arena_bytes))
    try:
        driver = (
            open_rank(arguments, memory)
            if arguments.ranks
            else open_driver(arguments.device, arguments.backend, arguments.index, memory)
        )
        driver.start(link.send)
    except CannotStart as reason:
        log.error("can't start on %s: %s", arguments.device, reason)
        link.send(Failed(str(reason)))
        return EXIT_NEEDS_PERSON if reason.needs_person else EXIT_CANNOT_START
    link.send(Ready(os.getpid(), asdict(driver.device), _versions(driver), driver.stacking))
    descriptors = socket.socket(fileno=arguments.descriptors)
    return Worker(link, driver, descriptors, arguments.awake_seconds).run()


def open_driver(device: str, backend: str, index: int, memory: Memory) -> Driver:
    """The driver of `device`; "auto" takes a GPU where torch sees one, else the CPU. Raises CannotStart."""
    if device == "cuda" or (device == "auto" and _gpus()):
        from service.drivers.cuda import CudaDriver

        return CudaDriver(memory, index)
    if device in ("auto", "cpu"):
        from service.drivers.cpu import CpuDriver

        return CpuDriver(memory, backend)
    if device == "virtual":
        from service.drivers.virtual import VirtualDriver

        return VirtualDriver(memory, backend)
    raise CannotStart(f"device {device!r} has no driver in this build", needs_person=True)


def open_rank(arguments: argparse.Namespace, memory: Memory) -> Driver:
    """The driver of one rank of products over several devices, or of all of them in a Ray cluster."""
    if arguments.ray:
        from service.drivers.spread import Cluster, SpreadDriver

        cluster = Cluster(
            arguments.ray, arguments.ranks, arguments.device, arguments.backend, arguments.shard_bytes
        )
        return SpreadDriver(memory, cluster, arguments.rank_seconds)
    from service.drivers.shard import Rank, ShardDriver

    on_gpu = arguments.device == "cuda" or (arguments.device == "auto" and _gpus())
    gpu = arguments.index if on_gpu else None
    library = "auto" if on_gpu else arguments.backend
    rank = Rank(arguments.rank, arguments.ranks, arguments.rendezvous, gpu, library, arguments.shard_bytes)
    return ShardDriver(memory, rank, arguments.rank_seconds)


def _gpus() -> int:
    """GPUs that torch sees; loads torch only where the NVIDIA driver is."""
    if not Path("/dev/nvidiactl").exists() or not has_torch():
        return 0
    import torch

    return int(torch.cuda.device_count())


class Worker:
    """Loops over the link until it is drained or the front is gone."""

    def __init__(
        self, link: WorkerLink, driver: Driver, descriptors: socket.socket, awake_seconds: float = 0.0
    ) -> None:
        """`awake_seconds`: how long to wait for the next message without falling asleep (see service.awake)."""
        self._link = link
        self._driver = driver
        self._awake = Awake(awake_seconds)
        self._descriptors = descriptors
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()

    def run(self) -> int:
        """Drive the device until the front drains it. Returns the exit status."""
        threading.Thread(target=self._answer, name="asks", daemon=True).start()
        if isinstance(self._driver, Queue):
            self._drive(self._driver)
            self._driver.close()
            self._link.close()
        else:
            self._compute()
        return 0

    def _compute(self) -> None:
        """Message by message, in this thread."""

        def read(messages: list[ToWorker] | None) -> None:
            if messages is None:
                _leave()
            for message in messages:
                if isinstance(message, Drain):
                    inbox.put(message)
                else:
                    self._handle(message, inbox.put)

        inbox: Inbox[ToDevice | Drain] = Inbox(self._link, read)
        while not isinstance(message := inbox.next(), Drain):
            self._take(message)
        self._driver.close()
        inbox.close()

    def _drive(self, queue: Queue) -> None:
        """Turn by turn: what the front sent, then what the device has done. Waits where there is neither."""
        busy = False
        while True:
            messages = self._next(busy=busy)
            if messages is None:
                _leave()
            for message in messages:
                if isinstance(message, Drain):
                    return
                if isinstance(message, Batch):
                    busy = True
                    self._awake.began(time.monotonic())
                self._handle(message, self._take)
            was, busy = busy, queue.advance()
            if was and not busy:
                self._awake.ended(time.monotonic(), busy=False)

    def _next(self, *, busy: bool) -> list[ToWorker] | None:
        """Messages that are here now; `busy`: none may be, as the device is soon to be looked at again."""
        now = time.monotonic()
        if self._awake.stays(now):
            messages = self._link.poll()
            if messages == []:
                os.sched_yield()
            return messages
        if busy:
            return self._link.poll(max(NAP_SECONDS, NAP_SHARE * min(1.0, self._awake.waited(now))))
        return self._link.receive()

    def _take(self, message: ToDevice) -> None:
        match message:
            case Batch():
                self._driver.submit(message, self._link.send)
            case Forget():
                self._driver.forget(message.tensors)
            case Settled():
                self._driver.settled(message.tensors)
            case Map():
                self._map(message)
            case Unmap():
                self._driver.unmap(message.region)

    def _map(self, message: Map) -> None:
        """A region that can't be mapped stays unknown; what names it is refused."""
        descriptor = -1 if message.handle else receive_descriptor(self._descriptors)
        try:
            self._driver.map(message, descriptor)
        except (OSError, ValueError) as error:
            log.warning("a client's memory of %d bytes can't be mapped: %s", message.nbytes, error)

    def _handle(self, message: ToWorker, take: Callable[[ToDevice], None]) -> None:
        match message:
            case Ping():
                self._link.send(Pong(message.number))
            case Batch() | Forget() | Settled() | Map() | Unmap():
                take(message)
            case Fetch():
                self._fetch(message)
            case Ask():
                self._asks.put(message)
            case Hung():
                self._driver.hung()

    def _fetch(self, message: Fetch) -> None:
        def fetched(lost: str) -> None:
            self._link.send(Answer(message.id, code="lost" if lost else "", detail=lost))

        self._driver.fetch(message.operand, fetched)

    def _answer(self) -> None:
        while True:
            ask = self._asks.get()
            if ask is None:
                return
            self._link.send(self._answer_one(ask))

    def _answer_one(self, ask: Ask) -> Answer:
        try:
            return Answer(ask.id, self._driver.ask(ask.what, ask.args))
        except Unsupported as reason:
            return Answer(ask.id, code="unsupported", detail=reason.because)
        except ValueError as reason:
            return Answer(ask.id, code="invalid", detail=str(reason))


def _leave() -> NoReturn:
    """The front is gone, and with it every reader of results."""
    os._exit(0)


def _versions(driver: Driver) -> dict[str, str]:
    found = {"service": version(), "python": sys.version.split()[0], "backend": driver.backend}
    for package in ("numpy", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = installed(package)
    return found


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the front dies, even while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m service.worker", description="Started by the front, not by hand."
    )
    parser.add_argument("--link", type=int, required=True, help="descriptor of the socket to the front")
    parser.add_argument(
        "--descriptors", type=int, required=True, help="descriptor of the socket that brings clients' memory"
    )
    parser.add_argument("--arena", type=int, required=True, help="descriptor of the arena's memfd")
    parser.add_argument("--arena-bytes", type=int, required=True)
    parser.add_argument("--index", type=int, default=0, help="which of the visible GPUs")
    parser.add_argument("--ranks", type=int, default=0, help="of how many ranks this is one; 0: a worker")
    parser.add_argument("--rank", type=int, default=0, help="which of them")
    parser.add_argument("--rendezvous", default="", help="file by which ranks find each other")
    parser.add_argument("--rank-seconds", type=float, default=120.0, help="how long they may take for that")
    parser.add_argument("--shard-bytes", type=int, default=0, help="what a rank keeps between products")
    parser.add_argument("--ray", default="", help="the Ray cluster that places all ranks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--awake-seconds", type=float, default=0.0, help="longest wait without sleep")
    parser.add_argument("--log-format", default="auto")
    parser.add_argument("--log-level", default="info")
    return parser


if __name__ == "__main__":
    sys.exit(main())
