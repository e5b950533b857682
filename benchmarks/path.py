"""Where a small request's time goes: receives a service on a GPU, hands on path.json: microseconds a stage, p50.

    python -m benchmarks.path --machine h200 [--seconds 2] [--out DIR]
    python -m benchmarks.path --stand-in --kernel-us 200        # the same over a GPU made of CPU memory, no file

One client asks for one product after the other: over HTTP between stored handles with D kept, and through its own
memory on this machine (device memory by CUDA IPC on a GPU). Each runs with who waits asleep and awake
(`--awake-ms`), so that the cost of waking shows; what one wake-up costs here is measured by itself. The stages are
the service's own, from its log; what is not in them is the client, the sockets and HTTP. The kernels must be built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import record
from benchmarks.gpu_service import kernel_seconds, normal, put, until_admitted
from benchmarks.load import free_port, served
from benchmarks.transfers import Peer
from service.client import Client
from service.metrics import STAGES

PACKAGES = ("torch", "numpy", "apache-tvm-ffi", "fastapi", "uvicorn", "uvloop")
WARM = 50
Row = dict[str, Any]
Ask = Callable[[], float]


# -- what waking costs ------------------------------------------------------------------------------------------


def _echo(end: socket.socket, other: socket.socket, awake: bool) -> None:
    other.close()  # or the end of it is never seen here
    flags = socket.MSG_DONTWAIT if awake else 0
    while True:
        try:
            data = end.recv(16, flags)
        except BlockingIOError:
            os.sched_yield()
            continue
        if not data:
            return
        end.send(data)


def wake_ups(rounds: int = 500) -> Row:
    """Microseconds of a byte to another process and back, both asleep meanwhile or both awake."""
    row: Row = {"name": "a byte to another process and back"}
    for awake in (False, True):
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("fork").Process(
            target=_echo, args=(theirs, ours, awake), daemon=True
        )
        process.start()
        theirs.close()
        times = []
        for _ in range(rounds):
            # As long as a request's other parts: a core that idles so long is halted.
            time.sleep(0.0003)
            began = time.perf_counter()
            ours.send(b".")
            while True:
                with contextlib.suppress(BlockingIOError):
                    if ours.recv(16, socket.MSG_DONTWAIT if awake else 0):
                        break
                os.sched_yield()
            times.append(time.perf_counter() - began)
        ours.close()
        process.join(5)
        row["awake_us" if awake else "asleep_us"] = round(statistics.median(times) * 1e6, 1)
    return row


# -- the service and its log ------------------------------------------------------------------------------------


class Log:
    """Stages of the requests that a service tells of in its log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def skip(self) -> None:
        """Forget what was told so far."""
        self._at = self._path.stat().st_size

    def stages(self, route: str) -> dict[str, float]:
        """Median microseconds of each stage since `skip`, and of the whole request as `front`."""
        with self._path.open() as file:
            file.seek(self._at)
            lines = [json.loads(line) for line in file if line.startswith("{")]
        told = [line for line in lines if line.get("event") == "request" and line.get("route") == route]
        names = [*STAGES, ""]
        found = {}
        for name in names:
            key = f"{name}_seconds" if name else "seconds"
            values = [line[key] for line in told if key in line]
            if values:
                found[name or "front"] = round(statistics.median(values) * 1e6, 1)
        return found


@contextlib.contextmanager
def service(folder: Path, environ: dict[str, str], *flags: str) -> Iterator[tuple[int, Path, psutil.Process]]:
    """A service on the GPU that logs every request; its port, its log and the front's process."""
    port, log = free_port(), folder / "log"
    command = [
        *[sys.executable, "-m", "service", "serve", "--port", str(port), "--data", str(folder / "data")],
        *["--device", "cuda", "--workers", "1", *flags],
    ]
    shell = ["/bin/sh", "-c", 'exec "$@" 2> "$LOG"', "sh", *command]
    previous = dict(os.environ)
    os.environ.update(environ, LOG=str(log))
    try:
        with served(shell, f"http://127.0.0.1:{port}/health/ready") as process:
            yield port, log, psutil.Process(process.pid)
    finally:
        os.environ.clear()
        os.environ.update(previous)


def switches(process: psutil.Process) -> dict[str, int]:
    """Times that front and worker fell asleep so far."""
    count = {"front": process.num_ctx_switches().voluntary}
    for thread_of in process.children():
        count["worker"] = sum(
            int(line.split()[1])
            for task in Path(f"/proc/{thread_of.pid}/task").iterdir()
            for line in (task / "status").read_text().splitlines()
            if line.startswith("voluntary_ctxt_switches")
        )
    return count


# -- the ways -----------------------------------------------------------------------------------------------------


def over_http(port: int, size: int) -> Ask:
    """POST /gemm between stored handles, D kept."""
    put(port, "a", normal(size, size))
    put(port, "b", normal(size, size, seed=2))
    peer = Peer(port)
    target = "/gemm?a=handle:a&b=handle:b&out=handle:d&batch_invariant=false"
    return lambda: peer.exchange("POST", target, accept="application/json")


def in_memory(port: int, size: int, *, stand_in: bool) -> Ask:
    """`Client.gemm` between arrays that the service reads, and writes, where they are."""
    client = Client(f"http://127.0.0.1:{port}")
    a, b, d = (_array(client, size, stand_in=stand_in) for _ in range(3))

    def ask() -> float:
        began = time.perf_counter()
        client.gemm(a, b, out=d, batch_invariant=False)
        return time.perf_counter() - began

    return ask


def _array(client: Client, size: int, *, stand_in: bool) -> Any:
    if stand_in:
        made = client.empty((size, size), "float16")
        made[:] = normal(size, size)
        return made
    import torch

    return torch.randn(size, size, device="cuda").half()


def measure(ask: Ask, process: psutil.Process, seconds: float) -> Row:
    """Median and 90th percentile, and how often front and worker fell asleep in a request."""
    for _ in range(WARM):
        ask()
    before, times = switches(process), []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        times.append(ask())
    after = switches(process)
    return {
        "requests": len(times),
        "p50_us": round(statistics.median(times) * 1e6, 1),
        "p90_us": round(sorted(times)[int(len(times) * 0.9)] * 1e6, 1),
        "sleeps_a_request": {key: round((after[key] - before[key]) / len(times), 2) for key in after},
    }


def split(row: Row, stages: dict[str, float]) -> Row:
    """Add the stages, and what is in none of them: in the front's HTTP, and outside of the front."""
    front = stages.pop("front")
    rest = {"http_us": front - sum(stages.values()), "client_and_sockets_us": row["p50_us"] - front}
    parts = {f"{name}_us": value for name, value in stages.items()}
    return row | {"stages": parts | {name: round(value, 1) for name, value in rest.items()}}


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    yield wake_ups()
    sizes = [64] if options.stand_in else [512, 4096]
    for awake in options.awake_ms:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            environ = _stand_in(folder, options.kernel_us) if options.stand_in else {}
            arena = "64MiB" if options.stand_in else "4GiB"
            told = ["--log-format", "json", "--arena-bytes", arena, "--awake-ms", str(awake)]
            with service(folder, environ, *told) as (port, path, process):
                if not options.stand_in:
                    until_admitted(port)
                log = Log(path)
                for size in sizes:
                    ways = {
                        "/gemm": over_http(port, size),
                        "local": in_memory(port, size, stand_in=options.stand_in),
                    }
                    kernel = options.kernel_us if options.stand_in else kernel_seconds(size) * 1e6
                    for route, ask in ways.items():
                        log.skip()
                        row = measure(ask, process, options.seconds)
                        yield {
                            "name": f"{route} {size}³ fp16",
                            "awake_ms": awake,
                            "kernel_us": round(kernel, 1),
                            "over_kernel_us": round(row["p50_us"] - kernel, 1),
                            **split(row, log.stages(route)),
                        }


def _stand_in(folder: Path, kernel_us: float) -> dict[str, str]:
    from tests.service import cuda_stand_in

    return {
        "PYTHONPATH": cuda_stand_in.folder(folder),
        "GEMM_CACHE": str(folder / "cache"),
        "STAND_IN_KERNEL_SECONDS": str(kernel_us / 1e6),
        "OMP_NUM_THREADS": "1",
    }


def show(row: Row) -> None:
    """A row for people."""
    plain = {key: value for key, value in row.items() if not isinstance(value, dict)}
    print("  ".join(f"{key} {value}" for key, value in plain.items()), flush=True)
    for value in row.values():
        if isinstance(value, dict):
            print("    " + "  ".join(f"{name} {number:g}" for name, number in value.items()), flush=True)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.path", description=__doc__)
    record.add_places(parser, "gpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each way")
    parser.add_argument("--awake-ms", type=float, action="append", help="by default 0 and 2")
    parser.add_argument("--stand-in", action="store_true", help="no GPU: one made of CPU memory")
    parser.add_argument("--kernel-us", type=float, default=200.0, help="of the stand-in's products")
    options = parser.parse_args()
    options.awake_ms = options.awake_ms or [0.0, 2.0]
    rows = []
    for row in run(options):
        show(row)
        rows.append(row)
    if not options.stand_in:
        import torch

        gpu = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
        details = {**gpu, **record.cpu_machine()}
        record.write(options.machine, "path", rows, details=details, packages=PACKAGES, folder=options.out)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
