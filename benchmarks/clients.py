"""Many clients on few cores: receives one request, hands on how often it was answered, and how fast.

Processes share the connections, a thread each, so that the load is not what bounds a service: the next request
leaves as soon as its answer is there.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.transfers import Peer

#: Seconds for the processes to start and connect.
START_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Seen:
    """Answers of a window: their number, its seconds, latencies at the median and the 99th percentile."""

    answers: int
    seconds: float
    p50_seconds: float
    p99_seconds: float


class Clients:
    """`count` closed loops over `processes` processes; each client posts to `target`, its number in place of {}."""

    def __init__(
        self, port: int, count: int, target: str, body: bytes = b"", *, processes: int = 8, accept: str = ""
    ) -> None:
        context = multiprocessing.get_context("spawn")
        processes = min(processes, count)
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for index in range(processes):
            ours, theirs = context.Pipe()
            numbers = range(index, count, processes)
            process = context.Process(
                target=_run,
                args=(theirs, port, [target.format(n) for n in numbers], body, accept),
                daemon=True,
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            if not pipe.poll(START_SECONDS) or pipe.recv() != "connected":
                raise RuntimeError("clients can't connect")
        for pipe in self._pipes:
            pipe.send("go")

    def window(self, seconds: float) -> Seen:
        """What is answered in the next `seconds`; raises where any request failed."""
        self._ask("begin")
        began = time.perf_counter()
        time.sleep(seconds)
        answers = self._ask("end")
        spent = time.perf_counter() - began
        latencies = sorted(latency for seen, _ in answers for latency in seen)
        failures = [failure for _, failed in answers for failure in failed]
        if failures:
            raise RuntimeError(f"{len(failures)} requests failed, the first: {failures[0]}")
        if not latencies:
            raise RuntimeError(f"no request was answered within {seconds:g} s")
        p99 = latencies[int(len(latencies) * 0.99)]
        return Seen(len(latencies), spent, statistics.median(latencies), p99)

    def _ask(self, what: str) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]

    def stop(self) -> None:
        """End them."""
        for pipe in self._pipes:
            pipe.send("stop")
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


class _Loop:
    """One client."""

    def __init__(self, port: int, target: str, body: bytes, accept: str) -> None:
        self._port = port
        self._ask = (target, body, accept or "application/octet-stream")
        self._peer = Peer(port)
        self.latencies: list[float] = []
        self.failures: list[str] = []
        self.stopped = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        target, body, accept = self._ask
        while not self.stopped:
            try:
                latency = self._peer.exchange("POST", target, body, accept=accept)
                self.latencies.append(latency)  # looked up now: the list may have been swapped meanwhile
            except (RuntimeError, OSError) as error:
                self.failures.append(str(error)[:300])
                time.sleep(0.01)
                self._peer = Peer(self._port)
        self._peer.close()


def _run(pipe: Connection[Any, Any], port: int, targets: list[str], body: bytes, accept: str) -> None:
    loops = [_Loop(port, target, body, accept) for target in targets]
    pipe.send("connected")
    while True:
        order = pipe.recv()
        if order == "go":
            for loop in loops:
                loop.thread.start()
        elif order == "begin":
            for loop in loops:
                loop.latencies = []
            pipe.send(None)
        elif order == "end":
            # Lists are swapped whole, so that no answer is counted twice.
            seen = []
            failed = []
            for loop in loops:
                latencies, loop.latencies = loop.latencies, []
                failures, loop.failures = loop.failures, []
                seen += latencies
                failed += failures
            pipe.send((seen, failed))
        else:
            break
    for loop in loops:
        loop.stopped = True
    for loop in loops:
        loop.thread.join(10)
