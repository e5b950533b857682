"""One worker process as the front sees it: receives batches and questions, hands on answers, or the news of its end.

Constructors build; `run` loops: start, ready, ping, end, back off, start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from service.arena import Arena
from service.batch import Work
from service.errors import ServiceError
from service.gpus import Place
from service.link import FrontLink, descriptor_pair, send_descriptor
from service.messages import (
    Answer,
    Ask,
    Batch,
    BatchDone,
    Drain,
    Failed,
    Fetch,
    Forget,
    Hung,
    Map,
    Operand,
    Ping,
    Pong,
    Ready,
    Report,
    Settled,
    ToFront,
    ToWorker,
    Unmap,
)
from service.place import Residency
from service.regions import Regions

log = logging.getLogger("gemm.supervisor")

#: What a worker that hangs has to note what is to blame for it.
LAST_WORDS_SECONDS = 1.0

#: Converting and moving operands on a busy computer; a batch that takes this long for its bytes doesn't hang.
SLOWEST_BYTES_PER_SECOND = 1e8

#: What a device may drop is told with the next message; by itself after so many seconds. A message wakes the worker,
#: which on some machines takes the front as long as the rest of a reply.
FORGET_SECONDS = 0.01

#: Share of a GPU's memory that its cache of stored tensors takes, as service.drivers.cuda has it.
CACHE_SHARE = 0.5

#: Exit statuses of the worker. A start that failed is tried again with back-off; a device that needs a person
#: (driver mismatch, Xid) keeps the worker down.
EXIT_CANNOT_START = 3
EXIT_NEEDS_PERSON = 4


class State(StrEnum):
    """Life of a worker."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Times:
    """Limits in seconds: for start, between pings, without an answer, and the first and longest back-off."""

    start: float = 120.0
    ping: float = 1.0
    hang: float = 10.0
    backoff_first: float = 0.1
    backoff_most: float = 10.0


@dataclass(slots=True)
class Flight:
    """A batch that the worker has. `limit` is when it counts as hung (CLOCK_MONOTONIC seconds)."""

    batch: Batch
    works: tuple[Work, ...]
    sent: float
    limit: float


@dataclass(slots=True)
class Handle:
    """One worker. `on_done`, `on_ready`, `on_end` and `on_report` are the supervisor's; all run on the loop."""

    index: int
    place: Place
    arena: Arena
    regions: Regions
    arguments: list[str]
    times: Times
    on_ready: Callable[[Handle, Ready], None]
    on_done: Callable[[Handle, Flight, BatchDone], None]
    on_end: Callable[[Handle, str, list[Flight]], None]
    on_report: Callable[[Handle, Report], None]
    state: State = State.STOPPED
    detail: str = ""
    #: Why the last one that wasn't ready left, in its own words.
    failure: str = ""
    ready: Ready | None = None
    flights: dict[int, Flight] = field(default_factory=dict)
    residency: Residency | None = None
    failures: int = 0
    _link: FrontLink | None = None
    _descriptors: socket.socket | None = None
    _mapped: set[int] = field(default_factory=set)
    #: Stored tensors that its device may have, and those of them that it may drop, which it doesn't know yet.
    _named: set[str] = field(default_factory=set)
    _gone: list[str] = field(default_factory=list)
    _gone_by: float = 0.0
    _telling: asyncio.TimerHandle | None = None
    _process: subprocess.Popen[bytes] | None = None
    _asked: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _ask_number: int = 0
    _pinged: int = 0
    _ponged: float = 0.0
    _stopping: bool = False
    _reason: str = "crash"

    @property
    def queued_seconds(self) -> float:
        """Estimated seconds of the work that it has."""
        return sum([work.seconds for flight in self.flights.values() for work in flight.works])

    @property
    def pid(self) -> int | None:
        """Process id while one runs."""
        return self._process.pid if self._process is not None else None

    @property
    def uuid(self) -> str:
        """The device's; "" while none is ready."""
        return "" if self.ready is None else str(self.ready.device["uuid"])

    async def run(self) -> None:
        """Keep a worker alive until `drain` or `kill_for_good`."""
        while not self._stopping:
            self.state = State.STARTING
            status = await self._life()
            if self._stopping:
                break
            self.failures += 1
            if status == EXIT_NEEDS_PERSON:
                why = self.failure or "see the worker's log"
                self.state, self.detail = State.DOWN, f"the device needs a person: {why}"
                log.error("worker %d stays down: %s", self.index, self.detail)
                return
            delay = min(self.times.backoff_first * 2 ** (self.failures - 1), self.times.backoff_most)
            why = f" ({self.failure})" if self.failure else ""
            self.state = State.BACKOFF
            self.detail = f"ended with status {status}{why}, starts again in {delay:.1f} s"
            log.warning("worker %d %s", self.index, self.detail)
            await asyncio.sleep(delay)
        self.state = State.STOPPED

    async def _life(self) -> int:
        """One process from start to end; returns its exit status (negative: the signal)."""
        self._reason, self.failure = "start_failed", ""
        try:
            process, ours, pidfd = self._spawn()
        except OSError as error:
            # No descriptor, process or memory is to be had now; soon there may be.
            log.error("worker %d can't be started: %s", self.index, error)
            self._end(EXIT_CANNOT_START)
            return EXIT_CANNOT_START
        self._process = process
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, ended.set)
        link = self._link = FrontLink(self._received, lambda: None)
        try:
            await link.open(ours)
            await self._watch(ended)
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            status = await asyncio.to_thread(process.wait)
            link.close()
            self._end(status)
        return status

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
        """A process, our end of the link to it, and a descriptor that tells its end. OSError leaves nothing behind."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            undo.callback(ours.close)
            with theirs:
                self._descriptors, their_descriptors = descriptor_pair()
                with their_descriptors:
                    process = self._popen(theirs.fileno(), their_descriptors.fileno())
            undo.callback(process.wait)
            undo.callback(process.kill)
            pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        return process, ours, pidfd

    def _popen(self, link: int, descriptors: int) -> subprocess.Popen[bytes]:
        command = [
            *[sys.executable, "-P", "-m", "service.worker", "--link", str(link)],
            *["--descriptors", str(descriptors)],
            *["--arena", str(self.arena.fd), "--arena-bytes", str(self.arena.size)],
            *["--index", str(self.place.index), *self.arguments],
        ]
        return subprocess.Popen(
            command,
            pass_fds=(link, descriptors, self.arena.fd),
            env={**_environment(), **dict(self.place.environ)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _watch(self, ended: asyncio.Event) -> None:
        """Ping until the process ends; kill it when it doesn't answer or a batch outlasts its limit."""
        started = self._ponged = time.monotonic()
        while not ended.is_set():
            try:
                await asyncio.wait_for(ended.wait(), self.times.ping)
            except TimeoutError:
                pass
            else:
                return
            now = time.monotonic()
            if self.state is State.STARTING:
                if now - started > self.times.start:
                    log.error("worker %d did not start within %.0f s", self.index, self.times.start)
                    return
                continue
            hung = [flight for flight in self.flights.values() if now > flight.limit]
            if hung or now - self._ponged > self.times.hang:
                self._reason = "hang"
                what = f"batch {hung[0].batch.id} outlasted its limit" if hung else "pings are not answered"
                log.error("worker %d (pid %s) hangs: %s", self.index, self.pid, what)
                if hung:
                    self._send(Hung())
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(ended.wait(), LAST_WORDS_SECONDS)
                return
            self._pinged += 1
            self._send(Ping(self._pinged))

    def _end(self, status: int) -> None:
        flights = list(self.flights.values())
        self.flights.clear()
        self._process = self._link = self.ready = self.residency = None
        if self._descriptors is not None:
            self._descriptors.close()
            self._descriptors = None
        self._mapped.clear()
        self._named.clear()
        self._gone.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ServiceError("no_worker", "the worker ended before it answered"))
        self._asked.clear()
        self.state = State.STOPPED if self._stopping else State.BACKOFF
        reason = {EXIT_CANNOT_START: "start_failed", EXIT_NEEDS_PERSON: "device"}.get(status, self._reason)
        self.on_end(self, reason, flights)

    def _received(self, message: ToFront) -> None:
        match message:
            case BatchDone():
                flight = self.flights.pop(message.id, None)
                if flight is not None:
                    self.failures = 0
                    for work, item in zip(flight.works, message.items, strict=True):
                        if not item.kept:
                            self._named.discard(work.out.tensor)
                    self.on_done(self, flight, message)
            case Pong():
                self._ponged = time.monotonic()
            case Answer():
                self._answered(message)
            case Report():
                self.on_report(self, message)
            case Failed():
                self.failure = message.why
            case Ready():
                self.ready, self.state, self.detail = message, State.READY, ""
                self._reason, self._ponged = "crash", time.monotonic()
                if message.device["arch"] != "cpu" and not message.device["virtual"]:
                    self.residency = Residency(message.device["memory_bytes"] * CACHE_SHARE)
                self.on_ready(self, message)

    def _answered(self, answer: Answer) -> None:
        future = self._asked.pop(answer.id, None)
        if future is None or future.done():
            return
        if answer.code:
            future.set_exception(ServiceError(answer.code, answer.detail))
        else:
            future.set_result(answer.value)

    def _send(self, message: ToWorker) -> None:
        if self._link is None:
            return
        if self._gone:
            self._link.send(Forget(tuple(self._gone)), message)
            self._gone.clear()
        else:
            self._link.send(message)

    def send(self, flight: Flight) -> None:
        """Hand a batch over."""
        self.flights[flight.batch.id] = flight
        if self.residency is not None:
            for work in flight.works:
                for operand in work.stored:
                    self.residency.note(operand)
        for work in flight.works:
            self._map(work)
            self._named.update([operand.tensor for operand in (*work.stored, work.out) if operand.tensor])
        self._send(flight.batch)

    def _map(self, work: Work) -> None:
        """Let the worker map what of clients' memory it hasn't yet. Without it, it refuses the item."""
        for number in work.regions - self._mapped:
            region = self.regions[number]
            if self._descriptors is None:
                return
            try:
                if not region.handle:
                    send_descriptor(self._descriptors, region.descriptor)
            except OSError as error:
                log.warning("a client's memory can't be handed to worker %d: %s", self.index, error)
                continue
            self._mapped.add(number)
            self._send(Map(number, region.nbytes, region.handle))

    def unmap(self, number: int) -> None:
        """A region is gone."""
        if number in self._mapped:
            self._mapped.discard(number)
            self._send(Unmap(number))

    def forget(self, tensors: tuple[str, ...]) -> None:
        """Tell a device cache soon what was deleted or replaced, if it may be there."""
        if self.residency is not None:
            self.residency.forget(tensors)
        gone = self._named.intersection(tensors)
        if not gone:
            return
        loop = asyncio.get_running_loop()
        if not self._gone:
            self._gone_by = loop.time() + FORGET_SECONDS
        self._named -= gone
        self._gone += gone
        if self._telling is None:
            self._telling = loop.call_at(self._gone_by, self._tell_of_gone)

    def _tell_of_gone(self) -> None:
        self._telling = None
        if not self._gone or self._link is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._gone_by:  # those that it was set for went along with a message
            self._telling = loop.call_at(self._gone_by, self._tell_of_gone)
            return
        self._link.send(Forget(tuple(self._gone)))
        self._gone.clear()

    async def ask(self, what: str, args: dict[str, Any], timeout: float) -> Any:
        """Ask the kernels side; raises ServiceError where it refuses, ends or takes longer than `timeout` s."""
        return await self._answer(lambda number: Ask(number, what, args), timeout)

    async def fetch(self, operand: Operand) -> None:
        """Have the worker write what only its device has to its place in the arena.

        Raises ServiceError where it ends instead. Returns when nothing will be written there any more: a worker
        that doesn't come to it is hung, and killed.
        """
        limit = self.times.hang + operand.nbytes / SLOWEST_BYTES_PER_SECOND
        life = self._process
        try:
            await self._answer(lambda number: Fetch(number, operand), limit)
        except ServiceError as error:
            if error.code == "no_worker" and life is not None and life.poll() is None:
                log.error("worker %d (pid %d) hangs: a tensor isn't copied out", self.index, life.pid)
                self._reason = "hang"
                life.kill()
                await asyncio.to_thread(life.wait)
            raise
        self._send(Settled((operand.tensor,)))

    async def _answer(self, question: Callable[[int], ToWorker], timeout: float) -> Any:
        self._ask_number += 1
        number = self._ask_number
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._send(question(number))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise ServiceError("no_worker", f"the worker did not answer within {timeout:g} s") from None
        finally:
            self._asked.pop(number, None)

    def drain(self) -> None:
        """Let the worker finish what it has and leave."""
        self._stopping = True
        self._send(Drain())

    def kill_for_good(self) -> None:
        """End it now and don't start another."""
        self._stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def _environment() -> dict[str, str]:
    """The worker's: this very package is imported, whatever lies in the folder where the front was started."""
    home = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    found = f"{home}{os.pathsep}{path}" if path else home
    # Threads of a BLAS that spin between products take the cores that the front and its clients need.
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": found}
