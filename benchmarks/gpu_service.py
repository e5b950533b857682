"""The service on one GPU: latency over the kernel, stacking, the tensor-core probe, a killed worker, start-up.

    python -m benchmarks.gpu_service --machine h200

Writes benchmarks/results/<machine>/service.json. The kernels must be built (`python -m kernels build`).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import record
from benchmarks.load import free_port, served
from benchmarks.transfers import Peer

PACKAGES = ("torch", "numpy", "apache-tvm-ffi", "fastapi", "uvicorn", "uvloop")
#: Dense fp16 FLOPs a cycle of one SM of Hopper: 1,979 sparse TFLOP/s halved, over 132 SMs at 1,830 MHz.
TENSOR_FLOPS_A_CYCLE = 4096
Row = dict[str, Any]


@contextlib.contextmanager
def service(*flags: str) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """A service on the GPU; its port, process, and seconds from start to ready."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *[
                sys.executable,
                "-m",
                "service",
                "serve",
                "--port",
                str(port),
                "--data",
                folder,
                "--device",
                "cuda",
            ],
            *["--workers", "1", "--arena-bytes", "4GiB", "--log-level", "warning", *flags],
        ]
        started = time.perf_counter()
        with served(command, f"http://127.0.0.1:{port}/health/ready") as process:
            yield port, process, time.perf_counter() - started


def metrics(port: int) -> dict[str, float]:
    """All samples by name and labels."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"
    }


def total(samples: dict[str, float], name: str) -> float:
    """Sum over a metric's labels."""
    return sum(value for key, value in samples.items() if key.partition("{")[0] == name)


def stages(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Mean seconds of each stage between two scrapes."""
    name = "gemm_stage_seconds"
    means = {}
    for key, count in after.items():
        if not key.startswith(f"{name}_count{{"):
            continue
        sums = key.replace("_count{", "_sum{")
        ended = count - before.get(key, 0.0)
        if ended:
            means[key.partition('"')[2].partition('"')[0]] = (after[sums] - before.get(sums, 0.0)) / ended
    return means


def normal(*shape: int, seed: int = 1) -> Any:
    """fp16 values from a normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).astype(np.float16)


def put(port: int, name: str, x: Any) -> None:
    """Store a tensor."""
    peer = Peer(port)
    shape = "x".join(map(str, x.shape))
    peer.exchange(
        "PUT", f"/tensors/{name}?shape={shape}&dtype=fp16", memoryview(x).cast("B"), accept="application/json"
    )
    peer.close()


def until_admitted(port: int, seconds: float = 120) -> list[dict[str, Any]]:
    """Wait until every variant's self-test has ended; the variants."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        variants: list[dict[str, Any]] = httpx.get(f"http://127.0.0.1:{port}/variants", timeout=10).json()[
            "variants"
        ]
        if not any("has not ended" in each["detail"] for each in variants):
            return variants
        time.sleep(0.2)
    raise SystemExit("self-tests did not end")


def latency(rounds: int) -> list[Row]:
    """POST /gemm 4096³ between stored handles with D kept, one client, over the kernel alone."""
    size = 4096
    x, y = normal(size, size), normal(size, size, seed=2)
    target = "/gemm?a=handle:a&b=handle:b&out=handle:d&batch_invariant=false"
    with service("--store-memory-bytes", "3GiB") as (port, _, ready):
        variants = until_admitted(port)
        put(port, "a", x)
        put(port, "b", y)
        peer = Peer(port)
        for _ in range(20):
            peer.exchange("POST", target, accept="application/json")
        first = metrics(port)
        times = [peer.exchange("POST", target, accept="application/json") for _ in range(rounds * 30)]
        second = metrics(port)
        small = normal(64, 512), normal(512, 64, seed=3)
        put(port, "sa", small[0])
        put(port, "sb", small[1])
        into = memoryview(bytearray(64 * 64 * 2))
        tiny = [peer.exchange("POST", "/gemm?a=handle:sa&b=handle:sb", into=into) for _ in range(300)][20:]
        third = metrics(port)
        peer.close()
    kernel = kernel_seconds(size)
    return [
        {
            "name": "POST /gemm 4096³ fp16, A and B resident, D kept",
            "p50_seconds": statistics.median(times),
            "p99_seconds": sorted(times)[int(len(times) * 0.99)],
            "kernel_seconds": kernel,
            "overhead_seconds": statistics.median(times) - kernel,
            "stages": stages(first, second),
        },
        {
            "name": "POST /gemm 64×512×64 fp16 between stored handles",
            "p50_seconds": statistics.median(tiny),
            "stages": stages(second, third),
        },
        {"name": "process start to ready, libraries built", "seconds": ready},
        {
            "name": "variants admitted",
            "outcome": "read",
            "detail": {each["name"]: f"{each['state']}: {each['detail']}" for each in variants},
        },
    ]


def kernel_seconds(size: int) -> float:
    """Median seconds of the product alone, by events, inputs rotated past L2."""
    import torch

    from kernels import gemm

    sets = [tuple(torch.randn(size, size, device="cuda").half() for _ in range(2)) for _ in range(4)]
    out = torch.empty(size, size, device="cuda", dtype=torch.float16)
    times = []
    for turn in range(40):
        a, b = sets[turn % 4]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        gemm(a, b, out=out, batch_invariant=False)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return statistics.median(times[5:])


class Clients:
    """Threads that post one request again and again."""

    def __init__(self, port: int, count: int, target: str, body: bytes) -> None:
        self.done = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(port, target, body)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, port: int, target: str, body: bytes) -> None:
        peer = Peer(port)
        while not self._stop.is_set():
            peer.exchange("POST", target, body)
            with self._lock:
                self.done += 1
        peer.close()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def stacking(seconds: float) -> list[Row]:
    """Device seconds a request of 64 clients against a stored 8192×8192 weight, stacked and not."""
    size = 8192
    weight = normal(size, size)
    cost: dict[tuple[int, bool], tuple[float, float, float]] = {}
    for stacked in (True, False):
        flags = () if stacked else ("--batch-requests", "1")
        with service(*flags) as (port, _, _):
            until_admitted(port)
            put(port, "w", weight)
            for m in (1, 16, 64):
                body = normal(m, size, seed=m).tobytes()
                target = f"/gemm?a_shape={m}x{size}&dtype=fp16&b=handle:w"
                clients = Clients(port, 64, target, body)
                time.sleep(1)
                before, began, first = metrics(port), time.perf_counter(), clients.done
                time.sleep(seconds)
                after, done = metrics(port), clients.done - first
                took = time.perf_counter() - began
                clients.stop()
                busy = total(after, "gemm_kernel_busy_seconds_total") - total(
                    before, "gemm_kernel_busy_seconds_total"
                )
                batches = after["gemm_batch_requests_count"] - before["gemm_batch_requests_count"]
                requests = after["gemm_batch_requests_sum"] - before["gemm_batch_requests_sum"]
                cost[m, stacked] = busy / requests, done / took, requests / batches
    return [
        {
            "name": f"64 clients, M = {m} against a stored 8192×8192 fp16 weight",
            "device_seconds": cost[m, True][0],
            "unstacked_device_seconds": cost[m, False][0],
            "gain": cost[m, False][0] / cost[m, True][0],
            "requests_per_second": cost[m, True][1],
            "unstacked_requests_per_second": cost[m, False][1],
            "mean_batch": cost[m, True][2],
        }
        for m in (1, 16, 64)
    ]


def probe(seconds: float) -> list[Row]:
    """gemm_tensor_active_ratio against a second reader of NVML, idle, at half load and flat out, and against FLOPs."""
    import torch

    from kernels import gemm
    from service.drivers.gpm import TensorProbe

    size = 8192
    a, b = (torch.randn(size, size, device="cuda").half() for _ in range(2))
    out = torch.empty(size, size, device="cuda", dtype=torch.float16)
    for _ in range(3):
        gemm(a, b, out=out, batch_invariant=False)
    torch.cuda.synchronize()
    rows: list[Row] = []
    properties = torch.cuda.get_device_properties(0)
    with service() as (port, _, _):
        until_admitted(port)
        readings: list[Any] = []
        second = TensorProbe(str(properties.uuid))
        second.start(readings.append)
        for load, pause in (("idle", None), ("half", 1.0), ("full", 0.0)):
            flops, began = 0.0, time.perf_counter()
            served_ratio: list[float] = []
            ahead: list[Any] = []
            readings.clear()
            stop = threading.Event()
            scraper = threading.Thread(target=_scrape, args=(port, served_ratio, stop))
            scraper.start()
            while time.perf_counter() - began < seconds:
                if pause is None:
                    time.sleep(0.1)
                else:
                    turn = time.perf_counter()
                    for _ in range(16):
                        gemm(a, b, out=out, batch_invariant=False)
                        flops += 2.0 * size**3
                        while ahead and not ahead[0].query():
                            time.sleep(1e-4)
                        ahead[:] = [torch.cuda.Event()]
                        ahead[0].record()
                    if pause:
                        torch.cuda.synchronize()
                        time.sleep(pause * (time.perf_counter() - turn))
            torch.cuda.synchronize()
            stop.set()
            scraper.join()
            spent = time.perf_counter() - began
            mine = [r for r in readings[3:] if r.active is not None]
            ratio = statistics.mean(r.active for r in mine)
            clock = statistics.mean(r.sm_clock_mhz for r in mine) * 1e6
            implied = ratio * properties.multi_processor_count * TENSOR_FLOPS_A_CYCLE * clock
            rows.append(
                {
                    "name": f"tensor-core activity, {load} load",
                    "metric": statistics.mean(served_ratio) if served_ratio else None,
                    "second_reader": ratio,
                    "sm_clock_mhz": clock / 1e6,
                    "achieved_flops_per_second": flops / spent,
                    "implied_flops_per_second": implied,
                    "implied_over_achieved": implied / (flops / spent) if flops else None,
                }
            )
        second.stop()
    return rows


def _scrape(port: int, into: list[float], stop: threading.Event) -> None:
    """The metric twice a second, once the load has settled."""
    stop.wait(1.5)
    while not stop.wait(0.5):
        into += [v for k, v in metrics(port).items() if k.startswith("gemm_tensor_active_ratio{")]


def killed() -> list[Row]:
    """kill -9 of the worker under load: device memory back, service again, no request lost."""
    import psutil

    with service() as (port, process, _):
        until_admitted(port)
        put(port, "w", normal(4096, 4096))
        before = device_memory()
        clients = Clients(port, 4, "/gemm?a_shape=16x4096&dtype=fp16&b=handle:w", normal(16, 4096).tobytes())
        time.sleep(1)
        worker = psutil.Process(process.pid).children()[0]
        began = time.perf_counter()
        worker.kill()
        lowest = before
        while httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
            time.sleep(0.01)
        while httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code != 200:
            lowest = min(lowest, device_memory())
            time.sleep(0.05)
        back = time.perf_counter() - began
        count = clients.done
        time.sleep(1)
        grew = clients.done - count
        clients.stop()
    return [
        {
            "name": "kill -9 of the worker under load",
            "outcome": "service again" if grew else "no request was answered afterwards",
            "detail": {
                "seconds_until_ready": back,
                "device_memory_before": before,
                "device_memory_lowest": lowest,
                "requests_in_the_second_after": grew,
            },
        }
    ]


def device_memory() -> int:
    """Bytes in use on GPU 0, all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def main() -> None:
    """Measure, print and write."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_service", description=__doc__)
    parser.add_argument("--machine", default="gpu", help="short name of this machine in benchmarks/results")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--part", action="append", help="only these parts")
    parser.add_argument("--out", type=Path, help="folder for the results file")
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "latency": lambda: latency(options.rounds),
        "stacking": lambda: stacking(options.seconds),
        "probe": lambda: probe(max(4.0, options.seconds)),
        "killed": killed,
    }
    rows: list[Row] = []
    failed = []
    details = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, **record.cpu_machine()}
    for name in options.part or parts:
        began = time.perf_counter()
        try:
            found = parts[name]()
        except (Exception, SystemExit) as error:  # what the other parts found must come home
            failed.append(name)
            found = [{"name": name, "outcome": "failed", "detail": f"{type(error).__name__}: {error}"}]
        for row in found:
            print(row, flush=True)
        rows += [{"part": name, **row} for row in found]
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        # After each part, so that a run that is cut short keeps what it found.
        path = record.write(
            options.machine, "service", rows, details=details, packages=PACKAGES, folder=options.out
        )
    print("written:", path)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
