"""Random requests for a long time, against a real service: writes benchmarks/results/<machine>/soak.json.

Actors walk at random through register, infer, unregister, cancel and refused requests, and through products
in memory that they lend over the local socket, while the worker is killed now and then. Every result is
compared with numpy's. In the end nothing may be left: no descriptor, no shared memory, no slot of the arena;
and no request was answered with a fault of the service's own. Anything wrong ends it with a traceback and
status 1. Actors are spread over processes, since checking takes more time than the service does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import mmap
import multiprocessing
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import record
from service.client import AsyncClient, Busy, GemmError
from tests.service.real import Service, running

#: Requests to a kill of the worker, at most, and seconds from one kill to the next, at least.
KILL_EVERY = 1500
KILL_SECONDS = 3.0
#: Actors of one process.
ACTORS = 8
#: Refused for now, where a worker was killed: its work runs once more, and then fails clearly.
PASSING = 503
REGION_BYTES = 1 << 16
MOST = 48


class Wrong(Exception):
    """The service did what it must not."""


class Region:
    """A client's shared memory, as a client makes it: a file in /dev/shm, mapped here."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.path = Path("/dev/shm") / key
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, REGION_BYTES)
        self.memory = mmap.mmap(fd, REGION_BYTES)
        os.close(fd)

    def put(self, offset: int, x: np.ndarray) -> None:
        """Write an array's bytes."""
        self.memory[offset : offset + x.nbytes] = x.tobytes()

    def get(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array from here."""
        count = int(np.prod(shape))
        return np.frombuffer(self.memory[offset : offset + 4 * count], np.float32).reshape(shape)

    def destroy(self) -> None:
        """Unmap and unlink."""
        self.memory.close()
        self.path.unlink()


class Actor:
    """One client's random walk; what it did is in `counts`."""

    def __init__(self, number: int, url: str, run: str, seed: int) -> None:
        self._random = random.Random(seed * 1000 + number)
        self._numbers = np.random.default_rng(seed * 1000 + number)
        self._url = url
        self._number = number
        self._region = Region(f"{run}-{number}")
        self._registered = False
        self._stored: np.ndarray | None = None
        self._near: AsyncClient | None = None
        self.counts: Counter[str] = Counter()
        self.late = 0.0

    async def run(self, steps: int) -> None:
        """Take `steps` steps."""
        walks: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (30, self.infer_binary),
            (10, self.infer_json),
            (20, self.infer_shared),
            (8, self.register),
            (5, self.unregister),
            (8, self.cancel),
            (6, self.garbage),
            (4, self.store),
            (8, self.infer_stored),
            (1, self.status),
            (20, self.lend),
            (3, self.break_off),
        ]
        weights = [weight for weight, _ in walks]
        try:
            async with httpx.AsyncClient(base_url=self._url, timeout=120) as self._http:
                for _ in range(steps):
                    walk = self._random.choices(walks, weights)[0][1]
                    self.counts[walk.__name__] += 1
                    await walk()
                    with _steps.get_lock():
                        _steps.value += 1
                await self.unregister()
                if self._near is not None:
                    await self._near.close()
                if self._stored is not None:
                    await self._http.delete(f"/tensors/soak-{self._number}")
        finally:
            self._region.destroy()

    # -- steps ----------------------------------------------------------------------------------------------------

    async def infer_binary(self) -> None:
        """A and B after the JSON, D likewise."""
        a, b = self._operands()
        reply = await self._infer([self._sized("A", a), self._sized("B", b)], a.tobytes() + b.tobytes())
        if reply is not None:
            length = int(reply.headers["inference-header-content-length"])
            self._check(np.frombuffer(reply.content[length:], np.float32), a, b)

    async def infer_json(self) -> None:
        """Numbers in and out."""
        a, b = self._operands(6)
        inputs = [{**self._tensor(n, x), "data": x.reshape(-1).tolist()} for n, x in (("A", a), ("B", b))]
        reply = await self._infer(inputs, binary=False)
        if reply is not None:
            self._check(np.array(reply.json()["outputs"][0]["data"], np.float32), a, b)

    async def infer_shared(self) -> None:
        """A, B and D in the actor's region; refused where it isn't registered."""
        a, b = self._operands()
        self._region.put(0, a)
        self._region.put(1 << 14, b)
        nbytes = 4 * a.shape[0] * b.shape[1]
        inputs = [self._placed("A", a, 0), self._placed("B", b, 1 << 14)]
        place = {**self._place(1 << 15, nbytes), "binary_data": False}
        reply = await self._infer(
            inputs, outputs=[{"name": "D", "parameters": place}], refused=not self._registered
        )
        if reply is not None and self._registered:
            self._check(self._region.get(1 << 15, (a.shape[0], b.shape[1])), a, b)

    async def register(self) -> None:
        """Register the region; twice is refused."""
        document = {"key": self._region.key, "offset": 0, "byte_size": REGION_BYTES}
        reply = await self._http.post(f"{self._at}/register", json=document)
        self._expect(reply, 400 if self._registered else 200)
        self._registered = True

    async def unregister(self) -> None:
        """End the registration; twice is no harm."""
        self._expect(await self._http.post(f"{self._at}/unregister"), 200)
        self._registered = False

    async def status(self) -> None:
        """What is registered."""
        reply = await self._http.get(f"{self._at}/status")
        self._expect(reply, 200 if self._registered else 404)

    async def cancel(self) -> None:
        """Leave while the request is on its way."""
        a, b = self._operands()
        inputs = [self._sized("A", a), self._sized("B", b)]
        asked = asyncio.ensure_future(self._infer(inputs, a.tobytes() + b.tobytes()))
        await asyncio.sleep(self._random.random() * 0.004)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    async def garbage(self) -> None:
        """A request with bytes changed, cut or added: refused, or right by chance."""
        a, b = self._operands(4)
        head = self._head([self._sized("A", a), self._sized("B", b)])
        body = bytearray(head + a.tobytes() + b.tobytes())
        length = len(head)
        match self._random.randrange(4):
            case 0:
                body[self._random.randrange(len(head))] = self._random.randrange(256)
            case 1:
                del body[self._random.randrange(len(body)) :]
            case 2:
                body += bytes(1 + self._random.randrange(9))
            case 3:
                length += self._random.randrange(-40, 40)
        headers = {"inference-header-content-length": str(length)}
        reply = await self._http.post("/v2/models/gemm/infer", content=bytes(body), headers=headers)
        if reply.status_code not in (200, 400, 404, 501, PASSING):
            raise Wrong(f"garbage was answered {reply.status_code}: {reply.text[:200]}")

    async def store(self) -> None:
        """Keep a B on the service, in place of the last."""
        b = self._normal(16, 8)
        headers = {"content-type": "application/octet-stream"}
        params = {"shape": "16x8", "dtype": "fp32"}
        reply = await self._http.put(
            f"/tensors/soak-{self._number}", params=params, content=b.tobytes(), headers=headers
        )
        self._expect(reply, 200, 201)
        self._stored = b

    async def infer_stored(self) -> None:
        """B by its handle."""
        if self._stored is None:
            return
        a = self._normal(self._random.randrange(1, MOST), 16)
        handle = {"parameters": {"b": f"handle:soak-{self._number}"}}
        reply = await self._infer([self._sized("A", a)], a.tobytes(), **handle)
        if reply is not None:
            length = int(reply.headers["inference-header-content-length"])
            self._check(np.frombuffer(reply.content[length:], np.float32), a, self._stored)

    async def lend(self) -> None:
        """A, B and D in memory that is lent to the service by descriptor, or copied into such memory."""
        if self._near is None:
            self._near = AsyncClient(self._url, retries=1)
            self._lent = [self._near.empty((MOST, MOST)) for _ in range(3)]
        a, b = self._operands()
        arrays = [self._within(0, a), self._within(1, b)]
        out = self._within(2, np.full((a.shape[0], b.shape[1]), np.nan, np.float32))
        if self._random.random() < 0.2:
            arrays[0] = a
        try:
            await self._near.gemm(*arrays, out=out)
        except Busy as refusal:
            if refusal.status != PASSING:
                raise Wrong(f"lent memory: {refusal}") from refusal
            self.counts["unavailable"] += 1
            return
        self._check(out, a, b)

    def _within(self, index: int, x: np.ndarray) -> np.ndarray:
        """An array's elements at the beginning of lent memory."""
        place: np.ndarray = self._lent[index].reshape(-1)[: x.size].reshape(x.shape)
        place[:] = x
        return place

    async def break_off(self) -> None:
        """Leave amid a product in lent memory, as a process that dies does."""
        if self._near is None:
            return
        asked = asyncio.ensure_future(self._near.gemm(self._lent[0], self._lent[1], out=self._lent[2]))
        await asyncio.sleep(self._random.random() * 0.002)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError, GemmError):
            await asked
        await self._near.close()
        self._near = None
        self._lent = []

    # -- parts ----------------------------------------------------------------------------------------------------

    @property
    def _at(self) -> str:
        return f"/v2/systemsharedmemory/region/soak{self._number}"

    def _normal(self, *shape: int) -> np.ndarray:
        return self._numbers.normal(size=shape).astype(np.float32)

    def _operands(self, most: int = MOST) -> tuple[np.ndarray, np.ndarray]:
        """Operands of random extents, zero among them."""
        m, n, k = (self._random.choice((0, 1, *range(2, most + 1))) for _ in range(3))
        return self._normal(m, k), self._normal(k, n)

    @staticmethod
    def _tensor(name: str, x: np.ndarray) -> dict[str, Any]:
        return {"name": name, "datatype": "FP32", "shape": list(x.shape)}

    def _sized(self, name: str, x: np.ndarray) -> dict[str, Any]:
        return {**self._tensor(name, x), "parameters": {"binary_data_size": x.nbytes}}

    def _placed(self, name: str, x: np.ndarray, offset: int) -> dict[str, Any]:
        return {**self._tensor(name, x), "parameters": self._place(offset, x.nbytes)}

    def _place(self, offset: int, nbytes: int) -> dict[str, Any]:
        return {
            "shared_memory_region": f"soak{self._number}",
            "shared_memory_offset": offset,
            "shared_memory_byte_size": nbytes,
        }

    @staticmethod
    def _head(inputs: list[dict[str, Any]], *, binary: bool = True, **more: Any) -> bytes:
        parameters = {"binary_data_output": binary, **more.pop("parameters", {})}
        return json.dumps({"inputs": inputs, "parameters": parameters, **more}).encode()

    async def _infer(
        self,
        inputs: list[dict[str, Any]],
        content: bytes = b"",
        *,
        refused: bool = False,
        binary: bool = True,
        **more: Any,
    ) -> httpx.Response | None:
        """The reply; None where it was refused, as expected or in passing."""
        head = self._head(inputs, binary=binary, **more)
        headers = {"inference-header-content-length": str(len(head))}
        began = time.perf_counter()
        reply = await self._http.post("/v2/models/gemm_fp32/infer", content=head + content, headers=headers)
        self.late = max(self.late, time.perf_counter() - began)
        if reply.status_code == PASSING:
            self.counts["unavailable"] += 1
            return None
        self._expect(reply, 400 if refused else 200)
        return None if refused else reply

    @staticmethod
    def _expect(reply: httpx.Response, *statuses: int) -> None:
        if reply.status_code not in statuses:
            raise Wrong(f"{reply.request.url.path}: {reply.status_code}, not {statuses}: {reply.text[:200]}")

    @staticmethod
    def _check(d: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
        expected = a.astype(np.float64) @ b
        if not np.allclose(d.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4):
            raise Wrong(f"a product of {a.shape} and {b.shape} is wrong")


def descriptors(service: Service) -> int:
    """Open descriptors of the front."""
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


_CONTEXT = multiprocessing.get_context("spawn")
#: Steps that all processes have taken.
_steps: Any = _CONTEXT.Value("q", 0)


def _begin(steps: Any) -> None:
    """Make a new process count with the others."""
    global _steps  # noqa: PLW0603
    _steps = steps


def walk(url: str, numbers: Sequence[int], steps: int, run: str, seed: int) -> tuple[Counter[str], float]:
    """All of a process's actors at once, `steps` each; what they did, and the longest that one waited, seconds."""

    async def together() -> list[Actor]:
        made = [Actor(number, url, run, seed) for number in numbers]
        async with asyncio.TaskGroup() as group:
            for actor in made:
                group.create_task(actor.run(steps))
        return made

    made = asyncio.run(together())
    return sum((actor.counts for actor in made), Counter[str]()), max(actor.late for actor in made)


def walks(
    service: Service, pool: ProcessPoolExecutor, processes: int, requests: int, run: str, seed: int
) -> tuple[Counter[str], float]:
    """All processes at once, while the worker is killed now and then: halfway through a short walk."""
    share = requests // (processes * ACTORS)
    numbers = [range(first * ACTORS, (first + 1) * ACTORS) for first in range(processes)]
    futures = [pool.submit(walk, service.url, mine, share, run, seed) for mine in numbers]
    kills = _kill_until_done(service, futures, min(KILL_EVERY, requests // 2))
    ended = [future.result() for future in futures]
    return sum((counts for counts, _ in ended), Counter(kill=kills)), max(late for _, late in ended)


def _kill_until_done(service: Service, futures: Sequence[Future[Any]], every: int) -> int:
    """How often the worker was killed; the first time after `every` steps, however fast they were."""
    kills, at, began = 0, _steps.value, -math.inf
    while wait(futures, 0.01, FIRST_EXCEPTION).not_done:
        if any(future.done() and future.exception() for future in futures):
            break
        if _steps.value - at >= every and time.monotonic() - began >= KILL_SECONDS and service.workers():
            service.workers()[0].kill()
            kills, at, began = kills + 1, _steps.value, time.monotonic()
    return kills


def _wait_restarted(service: Service, kills: int) -> None:
    """Wait for a worker that is ready after the last kill."""
    service.until(lambda: service.metric("gemm_worker_restarts_total") >= kills, 60, f"{kills} restarts")
    service.until(service.is_ready, 60)


def soak(data: Path, requests: int, *, processes: int = 1, seed: int = 1) -> dict[str, Any]:
    """Walk, and look at what is left; what happened, as a row. Raises Wrong."""
    run = f"gemmsoak-{secrets.token_hex(6)}"
    flags = ("--shared-memory", "--shared-memory-keys", f"{run}-*", "--log-level", "error")
    with (
        running(data, *flags) as service,
        ProcessPoolExecutor(processes, _CONTEXT, initializer=_begin, initargs=(_steps,)) as pool,
    ):
        service.ready()
        # Opens what stays open.
        opened, _ = walks(service, pool, processes, 40 * ACTORS * processes, run, seed + 1)
        _wait_restarted(service, opened["kill"])
        before = descriptors(service)
        began = time.monotonic()
        counts, late = walks(service, pool, processes, requests, run, seed)
        seconds = time.monotonic() - began
        _wait_restarted(service, opened["kill"] + counts["kill"])
        service.until(lambda: descriptors(service) <= before, 30, "descriptors as before")
        for state in ("request", "reply"):
            service.until(lambda s=state: service.metric("gemm_arena_bytes", state=s) == 0, 10, f"no {state}")
        service.until(lambda: service.metric("gemm_local_bytes") == 0, 10, "no lent memory")
        left = [name for name in os.listdir("/dev/shm") if name.startswith(run)]
        faults = service.metric("gemm_requests_total", code="500")
        if left or faults:
            raise Wrong(f"left in /dev/shm: {left}; answers of 500: {faults:g}")
        return {
            "requests": requests,
            "seconds": seconds,
            "processes": processes,
            "slowest_seconds": late,
            "steps": dict(sorted(counts.items())),
            "descriptors": before,
            "worker_restarts": service.metric("gemm_worker_restarts_total") - opened["kill"],
        }


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    record.add_places(parser)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--processes", type=int, default=1, help=f"of {ACTORS} actors each")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as data:
        row = soak(Path(data), arguments.requests, processes=arguments.processes, seed=arguments.seed)
    row = {"name": "soak", "outcome": "ok", "detail": f"{arguments.requests} requests", **row}
    print(json.dumps(row, indent=1))
    print(record.write_here(arguments, "soak", [row], ("numpy", "httpx")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
