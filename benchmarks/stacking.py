"""What stacking brings: receives rounds and seconds, hands on a row for benchmarks/results/<machine>/serving.json.

64 clients send M = 16 rows each against one stored 4096×4096 weight, to a service that stacks and to one whose
batches hold one request. Beside it torch alone, in a process of its own, with 16 rows and with 1024: how much
larger products are worth on this computer. The load generator runs on the same cores, so `core_seconds` tells
what each process takes a request.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import record
from benchmarks.load import RAW, one_service, put, wrk

CLIENTS, ROWS, SIZE = 64, 16, 4096
TARGET = f"/gemm?a_shape={ROWS}x{SIZE}&dtype=fp32&b=handle:w"
_HEADERS = {"content-type": RAW}
#: A service whose processes use less than this share of a core is idle.
_IDLE = 0.05


@dataclass
class Contender:
    """A running service, and what it did in each round."""

    port: int
    http: httpx.Client
    rates: list[float] = field(default_factory=list)
    core_seconds: dict[str, list[float]] = field(default_factory=dict)
    batches: list[float] = field(default_factory=list)

    def load(self, body: Path, seconds: float) -> None:
        """One round of the load; then wait until nothing of it is left."""
        used, counted = self._used(), self._batches()
        url = f"http://127.0.0.1:{self.port}{TARGET}"
        self.rates.append(wrk(url, body, clients=CLIENTS, seconds=seconds).requests_per_second)
        self.settle()
        requests, batches = (after - before for after, before in zip(self._batches(), counted, strict=True))
        self.batches.append(requests / batches)
        for name, now in self._used().items():
            self.core_seconds.setdefault(name, []).append((now - used[name]) / requests)

    def settle(self) -> None:
        """Wait until its processes rest: who comes next must not compute beside what clients left behind."""
        while True:
            used, began = sum(self._used().values()), time.monotonic()
            time.sleep(0.2)
            if sum(self._used().values()) - used < _IDLE * (time.monotonic() - began):
                return

    def _used(self) -> dict[str, float]:
        """Core seconds so far of front and worker, and of all load generators that ended."""
        front = next(p for p in psutil.Process().children() if str(self.port) in p.cmdline())
        (worker,) = front.children()
        used = {name: sum(p.cpu_times()[:2]) for name, p in (("front", front), ("worker", worker))}
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used | {"load generator": ended.ru_utime + ended.ru_stime}

    def _batches(self) -> tuple[float, float]:
        """Requests in batches so far, and batches."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        family = next(one for one in families if one.name == "gemm_batch_requests")
        values = {sample.name: sample.value for sample in family.samples}
        return values["gemm_batch_requests_sum"], values["gemm_batch_requests_count"]

    def facts(self) -> dict[str, Any]:
        """For the row."""
        cores = {name: statistics.median(values) for name, values in self.core_seconds.items()}
        return {
            "requests_per_second": record.spread(self.rates),
            "core_seconds": cores,
            "mean_batch": record.spread(self.batches),
        }


def stacking(rounds: int, seconds: float, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """The gain of stacking, and bare torch's."""
    random = np.random.default_rng(7)
    weight = random.standard_normal((SIZE, SIZE)).astype(np.float32)
    a = random.standard_normal((ROWS, SIZE)).astype(np.float32)
    bare: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder, "body")
        body.write_bytes(a.tobytes())
        with one_service() as stacks, one_service("--batch-requests", "1") as alone:
            contenders = {"stacked": Contender(*stacks), "unstacked": Contender(*alone)}
            for contender in contenders.values():
                put(contender.http, "w", weight)
            for _ in range(rounds):
                for name, contender in contenders.items():
                    tick(name)
                    contender.load(body, seconds)
                tick("bare torch")
                bare.append(_bare())
            equal = _equal_bits(contenders["stacked"], contenders["unstacked"], a.tobytes())
    return [_row(contenders, bare, equal)]


def _row(
    contenders: dict[str, Contender], bare: list[dict[str, dict[str, float]]], equal: bool
) -> dict[str, Any]:
    stacked, alone = contenders["stacked"], contenders["unstacked"]
    gains = [s / o for s, o in zip(stacked.rates, alone.rates, strict=True)]
    best = str(CLIENTS * ROWS)
    seconds = {rows: [one[rows]["seconds"] for one in bare] for rows in (str(ROWS), best)}
    bare_gains = [CLIENTS * few / many for few, many in zip(seconds[str(ROWS)], seconds[best], strict=True)]
    return {
        "server": "gemm-service",
        "workload": f"M = {ROWS} against a stored {SIZE}×{SIZE} fp32 weight",
        "clients": CLIENTS,
        **stacked.facts(),
        "unstacked": alone.facts(),
        "bare_torch": {
            rows: {"seconds": record.spread(seconds[rows])}
            | {"core_seconds": record.spread([one[rows]["core_seconds"] for one in bare])}
            for rows in seconds
        },
        "gain": record.spread(gains),
        "bare_torch_gain": record.spread(bare_gains),
        "kept": record.spread([g / t for g, t in zip(gains, bare_gains, strict=True)]),
        "share_of_bare_rate": record.spread(
            [rate * many / CLIENTS for rate, many in zip(stacked.rates, seconds[best], strict=True)]
        ),
        "equal_bits": equal,
    }


def _bare() -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.peers.bare", str(SIZE), str(ROWS), str(CLIENTS * ROWS)]
    found: dict[str, dict[str, float]] = json.loads(subprocess.check_output(command))
    return found


def _equal_bits(stacked: Contender, alone: Contender, body: bytes) -> bool:
    """Whether 32 clients at once get the bits that one alone gets."""
    single = alone.http.post(TARGET, content=body, headers=_HEADERS).content
    url = f"http://127.0.0.1:{stacked.port}{TARGET}"

    def ask(_: int) -> bytes:
        return httpx.post(url, content=body, headers=_HEADERS, timeout=60).content

    with ThreadPoolExecutor(32) as pool:
        return all(answer == single for answer in pool.map(ask, range(32)))
