"""What the one front process carries and what bounds it: writes benchmarks/results/<machine>/front.json.

For each load: requests and bytes a second, the share of a core that front, workers and client took, and where the
front's time went: py-spy's samples of the event loop's thread while it held the interpreter, by file and by function;
what is left of the front's cores is spent in system calls and C without it. One front stays one process: with a
second worker the front's part must not change.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks import record
from benchmarks.load import Counted, free_port, ours, put, served, wrk

PACKAGES = ("numpy", "torch", "fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "py-spy")
MIB = 1 << 20
#: Samples a second.
RATE = 250
ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind: `body` bytes go in with each, `reply` bytes of D come out."""

    name: str
    query: str
    body: int
    reply: int
    clients: int


LOADS = (
    Load("8×8 fp32 in the body", "a_shape=8x8&b_shape=8x8&dtype=fp32", 512, 256, 32),
    Load("8×8 fp32 by handle", "a=handle:small&b=handle:small", 0, 256, 32),
    Load(
        "upload of 8 MiB, nothing computed",
        "alpha=0&a_shape=2048x1024&b_shape=1024x1&dtype=fp32",
        8 * MIB + 4096,
        8192,
        4,
    ),
    Load("reply of 16 MiB", "a=handle:column&b=handle:row", 0, 16 * MIB, 4),
)


@contextlib.contextmanager
def one_service(workers: int) -> Iterator[tuple[str, psutil.Process]]:
    """One of our own with what the loads name, and its front."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        command = ours(port, Path(folder), "--workers", str(workers), "--device", "cpu", "--backend", "numpy")
        with (
            served(command, f"{url}/health/ready") as process,
            httpx.Client(base_url=url, timeout=60) as http,
        ):
            random = np.random.default_rng(1)
            for name, shape in (("small", (8, 8)), ("column", (2048, 1)), ("row", (1, 2048))):
                put(http, name, random.standard_normal(shape).astype(np.float32))
            yield url, psutil.Process(process.pid)


class Cores:
    """Seconds of processor time that processes took, from the beginning of a block to its end."""

    def __init__(self, *processes: psutil.Process) -> None:
        self._processes = processes

    def __enter__(self) -> Cores:
        self._began, self._before = time.monotonic(), self._taken()
        return self

    def __exit__(self, *_: object) -> None:
        self.share = (self._taken() - self._before) / (time.monotonic() - self._began)

    def _taken(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def sampled(front: psutil.Process, seconds: float, folder: Path) -> Counter[tuple[str, ...]]:
    """Stacks of the event loop's thread, outermost frame first, with how often each was seen holding the GIL."""
    path = folder / "stacks"
    command = [str(Path(sys.executable).with_name("py-spy")), "record", "--pid", str(front.pid)]
    command += ["--duration", f"{seconds:g}", "--rate", str(RATE), "--format", "raw", "--gil"]
    command += ["--output", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=seconds + 60)
    stacks: Counter[tuple[str, ...]] = Counter()
    for line in path.read_text().splitlines():
        text, _, count = line.rpartition(" ")
        if "service/__main__.py" in text:  # the main thread
            stacks[tuple(text.split(";"))] += int(count)
    return stacks


def own(stacks: Counter[tuple[str, ...]]) -> tuple[dict[str, float], dict[str, float]]:
    """Shares of samples by file and by function of the innermost frame, the largest first.

    C code counts for the Python function that called it; uvloop was called by asyncio's runner.
    """
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for stack, count in stacks.items():
        function, _, place = stack[-1].partition(" (")
        file = place.rpartition(":")[0]
        file = str(Path(file).relative_to(ROOT)) if file.startswith(str(ROOT)) else file
        if "runners.py" in file or not file:
            file = "uvloop"
        files[file] += count
        functions[f"{file} {function}"] += count
    total = max(sum(files.values()), 1)
    return (
        {name: round(n / total, 4) for name, n in files.most_common(16)},
        {name: round(n / total, 4) for name, n in functions.most_common(16)},
    )


def measured(load: Load, url: str, front: psutil.Process, seconds: float, rounds: int, folder: Path) -> Row:
    """One load on one service: `rounds` runs that count, then one that is sampled."""
    body = folder / "body"
    body.write_bytes(bytes(load.body))
    target = f"{url}/gemm?{load.query}"
    workers = front.children()

    def run(length: float) -> Counted:
        return wrk(target, body, clients=load.clients, seconds=length)

    run(1)
    seen, fronts, others, clients = [], [], [], []
    for _ in range(rounds):
        me = psutil.Process()
        client = sum(me.cpu_times()[2:4])
        with Cores(front) as busy, Cores(*workers) as working:
            began = time.monotonic()
            seen.append(run(seconds))
            took = time.monotonic() - began
        fronts.append(busy.share)
        others.append(working.share)
        clients.append((sum(me.cpu_times()[2:4]) - client) / took)
    loading = threading.Thread(target=run, args=(seconds + 2,))
    loading.start()
    time.sleep(1)
    stacks = sampled(front, seconds, folder)
    files, functions = own(stacks)
    loading.join()
    rate = record.spread([one.requests_per_second for one in seen])
    moved = load.body + load.reply
    return {
        "workload": load.name,
        "workers": len(workers),
        "clients": load.clients,
        "requests_per_second": rate,
        "bytes_per_second": {name: value * moved for name, value in rate.items()},
        "p50_seconds": record.spread([one.p50_seconds for one in seen]),
        "p99_seconds": record.spread([one.p99_seconds for one in seen]),
        "front_cores": record.spread(fronts),
        "workers_cores": record.spread(others),
        "client_cores": record.spread(clients),
        "front_seconds_per_request": record.spread(
            [share / one.requests_per_second for share, one in zip(fronts, seen, strict=True)]
        ),
        "front_interpreter_cores": round(stacks.total() / (RATE * seconds), 3),
        "front_by_file": files,
        "front_by_function": functions,
    }


def main() -> None:
    """Measure all loads, with one worker and with two."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front", description=__doc__)
    record.add_places(parser)
    parser.add_argument("--seconds", type=float, default=5, help="of each run (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="runs that count (default: 3)")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, 2):
            with one_service(workers) as (url, front):
                for load in LOADS:
                    row = measured(load, url, front, options.seconds, options.rounds, Path(folder))
                    rows.append(row)
                    print(
                        f"{load.name:36} {workers} workers {row['requests_per_second']['median']:9.0f}/s"
                        f" {row['bytes_per_second']['median'] / 1e9:6.2f} GB/s, cores: front"
                        f" {row['front_cores']['median']:.2f}, workers {row['workers_cores']['median']:.2f},"
                        f" client {row['client_cores']['median']:.2f}; {next(iter(row['front_by_file']))}",
                        flush=True,
                    )
    path = record.write_here(options, "front", rows, PACKAGES)
    print(path)


if __name__ == "__main__":
    main()
