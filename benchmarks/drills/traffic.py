"""Clients of all kinds at once: receives how to ask, hands on how many requests went well and what did not.

Every answer is compared with numpy's (small whole numbers, so products are exact); every tensor whose PUT was
answered and every job that was accepted is looked at again in the end.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from service.client import Client, GemmError, Handle, Retries, Step
from tests.service.real import raw, raw_tensor, result

ACCEPT = {"accept": "application/octet-stream"}
SIDE = 32


def matrix(seed: int, rows: int = SIDE) -> np.ndarray:
    """Small whole numbers."""
    return np.random.default_rng(seed).integers(-4, 5, (rows, SIDE)).astype(np.float32)


WEIGHT = matrix(1)


@dataclass
class Tally:
    """What happened, over all clients. `slowest` in seconds, by kind of request."""

    well: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    #: What each name may mean; None: nothing, for no PUT of it was answered well yet.
    stored: dict[str, list[np.ndarray | None]] = field(default_factory=dict)
    jobs: dict[str, np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def did(self, kind: str, seconds: float, failure: str = "") -> None:
        """Note one request."""
        with self.lock:
            self.slowest[kind] = max(self.slowest.get(kind, 0.0), seconds)
            if failure:
                self.failures.append(f"{kind}: {failure}")
            else:
                self.well[kind] += 1

    def put(self, name: str, value: np.ndarray, *, answered: bool) -> None:
        """A tensor was stored; or may have been, where no good answer came."""
        with self.lock:
            self.stored[name] = [value] if answered else [*self.stored.get(name, [None]), value]

    @property
    def total(self) -> int:
        """Requests that went well."""
        return sum(self.well.values())


class KeepAlive:
    """A client that keeps its connection and never tries again: what isn't answered well is a failure."""

    def __init__(self, url: str, number: int, tally: Tally) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.number = number
        self.tally = tally
        self._count = itertools.count()

    def walk(self) -> None:
        """A product of inline operands, one with a handle, a PUT and a GET, a job."""
        n = next(self._count)
        a, name = matrix(n, 8), f"k{self.number}-{n % 20}"
        affinity = {"x-gemm-affinity": "weight"}
        self._do("inline", lambda: same(result(self.http.post("/gemm", **raw(a, WEIGHT))), a @ WEIGHT))
        by_handle = raw(a, "weight")
        by_handle["headers"] |= affinity
        self._do("handle", lambda: same(result(self.http.post("/gemm", **by_handle)), a @ WEIGHT))
        put = self._do("put", lambda: self._put(name, a))
        self.tally.put(name, a, answered=put)
        if put:
            self._do("get", lambda: same(result(self.http.get(f"/tensors/{name}", headers=ACCEPT)), a))
        if n % 5 == 0:
            self._do("job", lambda: self._job(a))

    def _do(self, kind: str, ask: Callable[[], None]) -> bool:
        began = time.monotonic()
        failure = ""
        try:
            ask()
        except (httpx.HTTPError, AssertionError) as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}"
        self.tally.did(kind, time.monotonic() - began, failure)
        return not failure

    def _put(self, name: str, a: np.ndarray) -> None:
        reply = self.http.put(f"/tensors/{name}", **raw_tensor(a))
        assert reply.status_code in (200, 201), reply.text

    def _job(self, a: np.ndarray) -> None:
        steps = [{"id": "s", "a": a.tolist(), "b": {"handle": "weight"}}]
        reply = self.http.post("/jobs", json={"steps": steps})
        assert reply.status_code == 202, reply.text
        with self.tally.lock:
            self.tally.jobs[reply.json()["id"]] = a @ WEIGHT

    def close(self) -> None:
        """Close the connection."""
        self.http.close()


class Retrying:
    """The service's own client, which tries again where it is told that it may."""

    def __init__(self, url: str, number: int, tally: Tally) -> None:
        retries = Retries(attempts=12, first_pause=0.1, longest_pause=2.0)
        self.client = Client(url.split(","), timeout=60, local=False, retries=retries)
        self.number = number
        self.tally = tally
        self._count = itertools.count()

    def walk(self) -> None:
        """As KeepAlive does."""
        n = next(self._count)
        a, name = matrix(1000 + n, 8), f"r{self.number}-{n % 20}"
        self._do("inline", lambda: same(self.client.gemm(a, WEIGHT), a @ WEIGHT))
        self._do("handle", lambda: same(self.client.gemm(a, "weight"), a @ WEIGHT))
        put = self._do("put", lambda: self.client.put(name, a))
        self.tally.put(name, a, answered=put)
        if put:
            self._do("get", lambda: same(self.client.get(name), a))
        if n % 5 == 0:
            self._do("job", lambda: self._job(a))

    def _do(self, kind: str, ask: Callable[[], Any]) -> bool:
        began = time.monotonic()
        failure = ""
        try:
            ask()
        except (GemmError, AssertionError) as error:
            failure = f"{type(error).__name__}: {str(error)[:200]}"
        self.tally.did(kind, time.monotonic() - began, failure)
        return not failure

    def _job(self, a: np.ndarray) -> None:
        job = self.client.submit([Step("s", a, Handle("weight"))])
        with self.tally.lock:
            self.tally.jobs[job.id] = a @ WEIGHT

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def same(got: np.ndarray, want: np.ndarray) -> None:
    """AssertionError unless all bits agree."""
    assert np.array_equal(got, want), "a wrong result"


class Traffic:
    """Walks in threads for the length of a block."""

    def __init__(self, walkers: list[KeepAlive] | list[Retrying]) -> None:
        self._walkers = walkers
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(walker,)) for walker in walkers]

    def _run(self, walker: KeepAlive | Retrying) -> None:
        while not self._stop.is_set():
            walker.walk()
            time.sleep(0.01)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for walker in self._walkers:
            walker.close()


def nothing_lost(url: str, tally: Tally) -> str:
    """Every stored tensor and every accepted job is there and right; what was looked at. AssertionError."""
    with httpx.Client(base_url=url, timeout=60) as http:
        for name, possible in tally.stored.items():
            reply = http.get(f"/tensors/{name}", headers=ACCEPT)
            if reply.status_code == 404 and possible[0] is None:
                continue
            assert reply.status_code == 200, f"tensor {name}: {reply.text}"
            found = result(reply)
            assert any(want is not None and np.array_equal(found, want) for want in possible), (
                f"{name} is wrong"
            )
        for job, want in tally.jobs.items():
            told = http.get(f"/jobs/{job}?wait=30").json()
            assert told["state"] == "done", f"job {job}: {told}"
            same(result(http.get(f"/jobs/{job}/steps/s/result", headers=ACCEPT)), want)
    return f"{len(tally.stored)} tensors and {len(tally.jobs)} jobs looked at again"
