"""`gemm-service bench`: receives a problem and a number of clients, sends it over and over, prints rates.

One process of Python makes the load, so beyond a few thousand small requests a second it measures itself.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from service import cli
from service.cli.common import guarded, seconds, service_flags, size
from service.client import AsyncClient, ConnectionFailed, Handle, Refused
from service.client.tensors import DTYPES

_EXAMPLES = """\
  gemm-service bench                                        256³ fp32, 8 clients, 5 seconds
  gemm-service bench -m 16 -n 4096 -k 4096 --keep-b --clients 64
  gemm-service bench -m 4096 -n 4096 -k 4096 --dtype bf16 --clients 2 --keep-a --keep-b --keep-d
"""


@dataclass
class Seen:
    """What the clients saw: seconds of each answered request, failures by code."""

    times: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


def main(argv: Sequence[str]) -> int:
    """`gemm-service bench`."""
    parser = cli.parser("bench", "A small load generator: requests/s, p50, p99, GFLOP/s.", _EXAMPLES)
    for extent in "mnk":
        parser.add_argument(f"-{extent}", type=int, default=256)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--keep-a", action="store_true", help="keep A on the service")
    parser.add_argument("--keep-b", action="store_true", help="keep B on the service")
    parser.add_argument("--keep-d", action="store_true", help="keep results there too (one name a client)")
    parser.add_argument("--variant", default="auto")
    service_flags(parser)
    given = parser.parse_args(argv)
    if min(given.m, given.n, given.k, given.clients) < 1 or given.seconds <= 0:
        return cli.complain("extents, clients and seconds must be above 0")

    def work() -> int:
        import uvloop

        seen, wall = uvloop.run(load(given))
        return report(given, seen, wall)

    return guarded(work)


async def load(given: argparse.Namespace) -> tuple[Seen, float]:
    """Send the problem from `clients` loops for a while."""
    rng = np.random.default_rng(0)
    dtype = DTYPES[given.dtype]
    a, b = (
        rng.standard_normal(shape, np.float32).astype(dtype)
        for shape in ((given.m, given.k), (given.k, given.n))
    )
    seen = Seen()
    async with AsyncClient(given.url, timeout=given.timeout, retries=1, connections=given.clients) as client:
        names = ["bench-a", "bench-b", *(f"bench-d{i}" for i in range(given.clients))]
        left = await client.put(names[0], a) if given.keep_a else a
        right = await client.put(names[1], b) if given.keep_b else b
        await client.gemm(
            left, right, variant=given.variant
        )  # the first is slower: connections, code, caches
        until = time.perf_counter() + given.seconds

        async def one(number: int) -> None:
            out = Handle(names[2 + number]) if given.keep_d else np.empty((given.m, given.n), dtype)
            while (started := time.perf_counter()) < until:
                try:
                    await client.gemm(left, right, out=out, variant=given.variant)
                except Refused as error:
                    seen.failures[error.code] += 1
                    await asyncio.sleep(min(error.retry_after or 0.01, 0.1))
                except ConnectionFailed:
                    seen.failures["connection"] += 1
                    await asyncio.sleep(0.01)
                else:
                    seen.times.append(time.perf_counter() - started)

        started = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(given.clients)))
        wall = time.perf_counter() - started
        kept = (given.keep_a, given.keep_b, *[given.keep_d] * given.clients)
        for name, was_kept in zip(names, kept, strict=True):
            if was_kept:
                await client.delete(name)
    return seen, wall


def report(given: argparse.Namespace, seen: Seen, wall: float) -> int:
    """Print it; 1 where nothing was answered or something was refused."""
    failures = ", ".join(f"{count} × {code}" for code, count in seen.failures.most_common())
    if not seen.times:
        print(f"no request was answered: {failures or 'the time was too short'}")
        return 1
    width = DTYPES[given.dtype].itemsize
    sent = width * ((not given.keep_a) * given.m * given.k + (not given.keep_b) * given.k * given.n)
    received = width * (not given.keep_d) * given.m * given.n
    rate = len(seen.times) / wall
    p50, p99 = np.percentile(seen.times, [50, 99])
    print(f"{given.m} × {given.n} × {given.k} {given.dtype}, {given.clients} clients, {wall:.1f} s")
    print(f"  {rate:,.0f} requests/s   {2 * given.m * given.n * given.k * rate / 1e9:,.1f} GFLOP/s", end="")
    print(f"   {size(rate * (sent + received))}/s of operands and results")
    print(f"  p50 {seconds(p50)}   p99 {seconds(p99)}   longest {seconds(max(seen.times))}")
    if failures:
        print(f"  refused: {failures}")
    return 1 if failures else 0
