"""Drill: more clients than the queue takes, for ten minutes: goodput, latency of accepted work and memory hold.

The peak is measured again between spells of overload, and each spell held against the peaks before and after it:
so a neighbour that takes cores for minutes isn't taken for a service that breaks down.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.drills.frame import check, drill
from tests.service.real import Service, result, running

#: Requests that may wait; this many more are under way at most.
QUEUE = 32
#: Clients that find the peak, and those that come in the overload.
USUAL, TOO_MANY = (4, 8, 16, 32), 4 * QUEUE
STEP_SECONDS = 5.0
#: Spells of overload, with the peak between them.
SPELLS = 10
MIB = 1 << 20


@dataclass
class Seen:
    """Answers by time of arrival (seconds from the beginning): seconds of accepted ones, number of refused ones."""

    accepted: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Accepted ones a second."""
        return sum(start <= at < end for at, _ in self.accepted) / (end - start)


async def client(url: str, request: bytes, want: bytes, began: float, end: float, seen: Seen) -> None:
    """One connection that asks again as soon as it is answered, and after Retry-After where it is refused."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=4 * MIB)
    try:
        while time.monotonic() < end:
            asked = time.monotonic()
            writer.write(request)
            status, pause, body = await answer(reader)
            now = time.monotonic()
            if status == 200:
                seen.accepted.append((now - began, now - asked))
                if body != want:
                    seen.wrong.append("a wrong product")
            elif status == 429:
                seen.refused += 1
                await asyncio.sleep(pause)
            else:
                seen.wrong.append(f"{status} {body[:200]!r}")
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, float, bytes]:
    """Status, seconds of Retry-After and body of a response."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().splitlines()
    headers = dict(line.split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(first.split()[1]), float(headers.get("retry-after", 0)), body


def load(url: str, request: bytes, want: bytes, clients: int, seconds: float) -> Seen:
    """All clients for `seconds`."""
    seen = Seen()

    async def run() -> None:
        began = time.monotonic()
        end = began + seconds
        await asyncio.gather(*(client(url, request, want, began, end, seen) for _ in range(clients)))

    asyncio.run(run())
    return seen


def resident(service: Service) -> int:
    """Bytes in memory of front and workers, the arena's pages that they share counted once at most each."""
    processes = [psutil.Process(service.process.pid), *service.workers()]
    return sum(process.memory_full_info().uss for process in processes)


@drill("saturation", seconds=240, lasts=600)
def saturation(lasts: float) -> str:
    """Goodput stays within a tenth of its peak, accepted work is answered in bounded time, memory doesn't grow."""
    random = np.random.default_rng(1)
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in ((128, 2048), (2048, 256)))
    flags = ("--queue-requests", str(QUEUE), "--arena-bytes", "256MiB", "--log-level", "warning")
    with (
        tempfile.TemporaryDirectory(prefix="gemm-drill-") as folder,
        running(Path(folder), *flags) as service,
    ):
        service.ready()
        for name, x in (("a", a), ("b", b)):
            service.put(name, x).raise_for_status()
        query = "/gemm?a=handle:a&b=handle:b"
        reply = service.http.post(query, headers={"content-type": "application/octet-stream"})
        np.testing.assert_allclose(result(reply), a @ b, rtol=1e-3, atol=1e-3)
        request = (
            f"POST {query} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
            "Content-Length: 0\r\n\r\n"
        ).encode()
        peaks = {n: steady(load(service.url, request, reply.content, n, STEP_SECONDS)) for n in USUAL}
        usual = max(peaks, key=peaks.__getitem__)
        warm = load(service.url, request, reply.content, TOO_MANY, max(STEP_SECONDS, lasts / 10))
        before = resident(service)
        peaks_between = [steady(load(service.url, request, reply.content, usual, STEP_SECONDS))]
        spells = []
        for _ in range(SPELLS):
            spells.append(load(service.url, request, reply.content, TOO_MANY, lasts / SPELLS))
            peaks_between.append(steady(load(service.url, request, reply.content, usual, STEP_SECONDS)))
        grown = resident(service) - before
        wrong = [text for seen in (warm, *spells) for text in seen.wrong]
        check(not wrong, f"{len(wrong)} wrong answers: {wrong[:3]}")
        check(all(seen.refused for seen in spells), "nothing was refused: this was no overload")
        local = [(first + second) / 2 for first, second in pairwise(peaks_between)]
        kept = [seen.rate(0, lasts / SPELLS) / peak for seen, peak in zip(spells, local, strict=True)]
        late = [quantile([took for _, took in seen.accepted], 0.99) for seen in spells]
        # In units of a request's seconds at the peak: those that wait and those that two batches hold, twice.
        slow = max(seconds * peak for seconds, peak in zip(late, local, strict=True))
        told = (
            f"{TOO_MANY} clients on a queue of {QUEUE}, {SPELLS} spells of {lasts / SPELLS:g} s: goodput"
            f" {statistics.median(kept):.2f} of the peak with {usual} clients (least spell {min(kept):.2f}; peaks"
            f" {min(peaks_between):.0f} to {max(peaks_between):.0f}/s); p99 of accepted at most"
            f" {max(late) * 1e3:.0f} ms; {sum(len(seen.accepted) for seen in spells)} answered,"
            f" {sum(seen.refused for seen in spells)} refused; memory {grown / MIB:+.1f} MiB of {before / MIB:.0f}"
        )
        check(statistics.median(kept) >= 0.9, f"goodput fell under overload: {told}")
        check(slow <= 2 * 3 * QUEUE + 0.1 * max(local), f"accepted work waits too long: {told}")
        check(grown <= 16 * MIB, f"memory grew: {told}")
        return told


def steady(seen: Seen) -> float:
    """The rate after the first second."""
    return seen.rate(1.0, STEP_SECONDS)


def quantile(values: Sequence[float], q: float) -> float:
    """The value that a share `q` of them doesn't exceed."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]
