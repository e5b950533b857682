"""Drills: ten thousand connections that do nothing, and a thousand that are as slow as they can be."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.drills.frame import Failed, check, drill
from benchmarks.drills.overload import quantile, resident
from benchmarks.drills.traffic import WEIGHT, matrix, same
from tests.service.real import Service, result, running

IDLE, SLOW = 10_000, 1_000
#: Limits of the service that slow clients meet, seconds.
PATIENCE = 3.0
LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def descriptors(wanted: int) -> None:
    """Lift this process's limit, which the service inherits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        raise Failed(f"the limit of open files is {hard}; {wanted} are needed (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def latencies(service: Service, seconds: float) -> list[float]:
    """Seconds of small products, one after the other."""
    a, took, end = matrix(5, 8), [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        same(result(service.gemm(a, WEIGHT)), a @ WEIGHT)
        took.append(time.monotonic() - began)
    return took


def connected(service: Service) -> socket.socket:
    place = urlsplit(service.url)
    return socket.create_connection((place.hostname, place.port), timeout=30)


def alive(sock: socket.socket) -> None:
    """One request on the connection. AssertionError unless it is answered with 200."""
    sock.sendall(LIVE)
    head = sock.recv(4096)
    assert head.startswith(b"HTTP/1.1 200"), head


@drill("idle-connections", seconds=240)
def idle() -> str:
    """They cost some memory each and nobody any time, and each is answered when it asks again."""
    descriptors(IDLE + 200)
    flags = ("--keep-alive-seconds", "600", "--log-level", "warning", "--arena-bytes", "64MiB")
    with (
        tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder,
        running(Path(folder), *flags) as service,
    ):
        service.ready()
        usual, before = quantile(latencies(service, 3), 0.5), resident(service)
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(IDLE):
                sock = stack.enter_context(connected(service))
                alive(sock)
                opened.append(sock)
            each = (resident(service) - before) / IDLE
            took = latencies(service, 5)
            for sock in opened[:: IDLE // 100]:
                alive(sock)
            held = psutil.Process(service.process.pid).num_fds()
            check(held >= IDLE, f"the service holds {held} descriptors")
        median, worst = quantile(took, 0.5), quantile(took, 0.99)
        # The sweep that keeps connections' times looks at all of them.
        check(
            median <= 2 * usual + 0.005, f"a product takes {median * 1e3:.1f} ms, {usual * 1e3:.1f} ms alone"
        )
        check(each <= 65536, f"{each / 1024:.0f} KiB a connection")
        process = psutil.Process(service.process.pid)
        service.until(lambda: process.num_fds() < 200, 30, "descriptors are given back")
        return (
            f"{IDLE} idle connections: {each / 1024:.1f} KiB each; a product {median * 1e3:.1f} ms (p99"
            f" {worst * 1e3:.1f}), alone {usual * 1e3:.1f} ms; a hundred of them asked again were answered"
        )


class Slow:
    """A connection that does the least it can, tick by tick, until the service has enough."""

    def __init__(self, service: Service, kind: str) -> None:
        self.kind = kind
        self.ended = ""
        self._sock = connected(service)
        self._tick: Callable[[], object]
        if kind == "headers":
            self._sock.sendall(b"POST /gemm HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            self._tick = lambda: self._sock.send(b"x")
        elif kind == "body":
            self._sock.sendall(
                b"POST /gemm?a_shape=64x64&b_shape=64x64&dtype=fp32 HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/octet-stream\r\nContent-Length: 32768\r\n\r\n"
            )
            self._tick = lambda: self._sock.send(b"\0")
        else:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            self._sock.sendall(
                b"POST /gemm?a=handle:column&b=handle:row HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/octet-stream\r\nContent-Length: 0\r\n\r\n"
            )
            self._tick = self._look
        self._sock.setblocking(False)

    def tick(self) -> None:
        """Do a little; notice the end."""
        try:
            self._tick()
            if self.kind != "reader":
                said = self._sock.recv(4096)
                self.ended = "408" if b" 408 " in said[:16] else f"closed {said[:40]!r}"
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = type(error).__name__

    def _look(self) -> None:
        """Whether the connection was reset, without reading what came."""
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "the connection ended")

    def close(self) -> None:
        """Let go."""
        self._sock.close()


@drill("slow-connections", seconds=180)
def slow() -> str:
    """Each is cut off within its limit, and nobody else waits for them."""
    descriptors(SLOW + 200)
    flags = ("--header-seconds", f"{PATIENCE:g}", "--write-stall-seconds", f"{PATIENCE:g}")
    quiet = ("--log-level", "warning", "--arena-bytes", "1GiB")
    with (
        tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder,
        running(Path(folder), *flags, *quiet) as service,
    ):
        service.ready()
        for name, shape in (("column", (2048, 1)), ("row", (1, 1024))):
            service.put(name, np.ones(shape, np.float32)).raise_for_status()
        usual = quantile(latencies(service, 2), 0.5)
        # A reply of 8 MiB is more than the kernel takes off our hands.
        kinds = [*["reader"] * 50, *["headers"] * (SLOW // 2), *["body"] * (SLOW // 2 - 50)]
        began = time.monotonic()
        slow_ones = [Slow(service, kind) for kind in kinds]
        took: list[float] = []
        for _ in itertools.count():
            left = [one for one in slow_ones if not one.ended]
            if not left or time.monotonic() - began > 60:
                break
            for one in left:
                one.tick()
            took += latencies(service, 0.3)
        ends = Counter(f"{one.kind}: {one.ended or 'never'}" for one in slow_ones)
        for one in slow_ones:
            one.close()
        check(not any("never" in end for end in ends), f"some were never cut off: {ends}")
        lasted = time.monotonic() - began
        median = quantile(took, 0.5)
        check(
            median <= 2 * usual + 0.01, f"a product takes {median * 1e3:.1f} ms, {usual * 1e3:.1f} ms alone"
        )
        service.until(
            lambda: not service.metric("gemm_arena_bytes", state="reply"), 20, "the arena is free again"
        )
        told = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
        return (
            f"{SLOW} slow connections gone after {lasted:.1f} s ({told}); meanwhile a product took"
            f" {median * 1e3:.1f} ms (p99 {quantile(took, 0.99) * 1e3:.1f}), alone {usual * 1e3:.1f} ms"
        )
