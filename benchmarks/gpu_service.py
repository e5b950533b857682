"""The service on one GPU: latency, by HTTP and CUDA IPC, stacking, tensor probe, a killed worker, start-up.

    python -m benchmarks.gpu_service --machine h200

Writes benchmarks/results/<machine>/service.json. The kernels must be built (`python -m kernels build`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from benchmarks import parts, record
from benchmarks.clients import Clients, Seen
from benchmarks.cycles import CycleCounter
from benchmarks.load import on_gpus
from benchmarks.parts import Row
from benchmarks.transfers import Peer

PACKAGES = ("torch", "numpy", "apache-tvm-ffi", "fastapi", "uvicorn", "uvloop")
#: Dense fp16 FLOPs a cycle of one SM of Hopper: 1,979 sparse TFLOP/s halved, over 132 SMs at 1,830 MHz.
TENSOR_FLOPS_A_CYCLE = 4096


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


def latency(rounds: int) -> Iterator[Row]:
    """POST /gemm 4096³ between stored handles with D kept, one client, over the kernel alone."""
    size = 4096
    x, y = normal(size, size), normal(size, size, seed=2)
    target = "/gemm?a=handle:a&b=handle:b&out=handle:d&batch_invariant=false"
    with on_gpus("--store-memory-bytes", "3GiB") as service:
        port = service.port
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
    yield {
        "name": "POST /gemm 4096³ fp16, A and B resident, D kept",
        "p50_seconds": statistics.median(times),
        "p99_seconds": sorted(times)[int(len(times) * 0.99)],
        "kernel_seconds": kernel,
        "overhead_seconds": statistics.median(times) - kernel,
        "stages": stages(first, second),
    }
    yield {
        "name": "POST /gemm 64×512×64 fp16 between stored handles",
        "p50_seconds": statistics.median(tiny),
        "stages": stages(second, third),
    }
    yield {"name": "process start to ready, libraries built", "seconds": service.ready_seconds}
    yield {
        "name": "variants admitted",
        "outcome": "read",
        "detail": {each["name"]: f"{each['state']}: {each['detail']}" for each in variants},
    }


def kernel_seconds(size: int) -> float:
    """Median seconds of the product alone, by events, inputs rotated past L2."""
    return statistics.median(kernel_times(size, 40)[5:])


def kernel_times(size: int, count: int) -> list[float]:
    """Seconds of each of so many products in this process, by events, which its launch is part of."""
    import torch

    from kernels import gemm

    sets = [tuple(torch.randn(size, size, device="cuda").half() for _ in range(2)) for _ in range(4)]
    out = torch.empty(size, size, device="cuda", dtype=torch.float16)
    times = []
    for turn in range(count):
        a, b = sets[turn % 4]
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        gemm(a, b, out=out, batch_invariant=False)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return times


def ipc(rounds: int) -> Iterator[Row]:
    """Products between this process's device tensors, lent to the service by CUDA IPC, over the kernel alone."""
    import torch

    from service.client import Client

    with on_gpus() as service:
        port = service.port
        until_admitted(port)
        with Client(f"http://127.0.0.1:{port}") as client:
            for size in (512, 4096):
                a, b = (torch.randn(size, size, device="cuda").half() for _ in range(2))
                d = torch.full((size, size), float("nan"), device="cuda", dtype=torch.float16)
                for _ in range(20):
                    client.gemm(a, b, out=d, batch_invariant=False)
                torch.testing.assert_close(d[:64].double(), a[:64].double() @ b.double(), rtol=1e-2, atol=1.0)
                times, alone = [], []
                first = metrics(port)
                # In turns: the GPU's clock is not the same from one second to the next.
                for _ in range(rounds):
                    for _ in range(30):
                        began = time.perf_counter()
                        client.gemm(a, b, out=d, batch_invariant=False)
                        times.append(time.perf_counter() - began)
                    alone += kernel_times(size, 20)[5:]
                kernel = statistics.median(alone)
                yield {
                    "name": f"Client.gemm {size}³ fp16 by CUDA IPC, D into the client's memory",
                    "p50_seconds": statistics.median(times),
                    "p99_seconds": sorted(times)[int(len(times) * 0.99)],
                    "kernel_seconds": kernel,
                    "overhead_seconds": statistics.median(times) - kernel,
                    "stages": stages(first, metrics(port)),
                }


def stacking(seconds: float) -> Iterator[Row]:
    """Device seconds a request of 64 clients against a stored 8192×8192 weight, stacked and not."""
    size = 8192
    weight = normal(size, size)
    bodies = {m: normal(m, size, seed=m).tobytes() for m in (1, 16, 64)}
    alone: dict[int, tuple[float, Seen]] = {}
    for stacked in (False, True):
        flags = () if stacked else ("--batch-requests", "1")
        with on_gpus(*flags) as service:
            port = service.port
            until_admitted(port)
            put(port, "w", weight)
            for m, body in bodies.items():
                clients = Clients(port, 64, f"/gemm?a_shape={m}x{size}&dtype=fp16&b=handle:w", body)
                clients.window(1.0)
                before = metrics(port)
                seen = clients.window(seconds)
                after = metrics(port)
                clients.stop()
                grown = {key: after[key] - before.get(key, 0.0) for key in after}
                requests = grown["gemm_batch_requests_sum"]
                busy = total(grown, "gemm_kernel_busy_seconds_total") / requests
                if not stacked:
                    alone[m] = busy, seen
                    continue
                yield {
                    "name": f"64 clients, M = {m} against a stored 8192×8192 fp16 weight",
                    "device_seconds": busy,
                    "unstacked_device_seconds": alone[m][0],
                    "gain": alone[m][0] / busy,
                    "requests_per_second": seen.answers / seen.seconds,
                    "p50_seconds": seen.p50_seconds,
                    "p99_seconds": seen.p99_seconds,
                    "unstacked_requests_per_second": alone[m][1].answers / alone[m][1].seconds,
                    "unstacked_p50_seconds": alone[m][1].p50_seconds,
                    "mean_batch": requests / grown["gemm_batch_requests_count"],
                    "stages": stages(before, after),
                }


#: Seconds of load before readings count: the probe's window and the metric's age.
SETTLE = 1.5


def probe(seconds: float) -> Iterator[Row]:
    """gemm_tensor_active_ratio against a second reader of NVML, idle, at half load and flat out, and against FLOPs."""
    import torch

    from service.drivers.gpm import TensorProbe

    properties = torch.cuda.get_device_properties(0)
    with on_gpus() as service:
        port = service.port
        until_admitted(port)
        readings: list[tuple[float, Any]] = []
        second = TensorProbe(str(properties.uuid))
        second.start(lambda reading: readings.append((time.perf_counter(), reading)))
        load = Load(8192)
        for name, share in (("idle", 0.0), ("half", 0.5), ("full", 1.0)):
            served_ratio: list[tuple[float, float]] = []
            stop = threading.Event()
            scraper = threading.Thread(target=_scrape, args=(port, served_ratio, stop))
            scraper.start()
            load.run(share, SETTLE)
            counter = CycleCounter()
            began = time.perf_counter()
            flops = load.run(share, seconds, meanwhile=counter.look)
            ended = time.perf_counter()
            stop.set()
            scraper.join()
            # A reading tells of the half second before it.
            mine = [each for at, each in readings if began + 0.6 < at < ended and each.active is not None]
            theirs = [ratio for at, ratio in served_ratio if began + 1.1 < at < ended]
            if not mine or not theirs:
                raise SystemExit(f"no readings: {[each for _, each in readings[-3:]]}")
            ratio = statistics.mean(each.active for each in mine)
            rate = properties.multi_processor_count * TENSOR_FLOPS_A_CYCLE
            achieved = flops / (ended - began)
            # The clock that NVML tells is set, not counted: beside it stands what an SM counted meanwhile.
            clocks = {
                "told": statistics.mean(each.sm_clock_mhz for each in mine) * 1e6,
                "counted": statistics.mean(counter.clocks) * 1e6 if counter.clocks else None,
            }
            implied = {name: statistics.mean(theirs) * rate * hz for name, hz in clocks.items() if hz}
            yield {
                "name": f"tensor-core activity, {name} load",
                "metric": statistics.mean(theirs),
                "second_reader": ratio,
                "points_apart": 100 * abs(statistics.mean(theirs) - ratio),
                "readings": len(mine),
                "clock_hertz": clocks,
                "achieved_flops_per_second": achieved,
                "implied_flops_per_second": implied,
                "implied_over_achieved": {key: value / achieved for key, value in implied.items()}
                if flops
                else None,
            }
        second.stop()


class Load:
    """Products of `size`³ in bursts that are short against the window of a reading."""

    BURST = 4

    def __init__(self, size: int) -> None:
        import torch

        from kernels import gemm

        self._flops = 2.0 * size**3
        self._torch = torch
        self._gemm = gemm
        self._sets = [
            tuple(torch.randn(size, size, device="cuda").half() for _ in range(2)) for _ in range(2)
        ]
        self._out = torch.empty(size, size, device="cuda", dtype=torch.float16)
        self.run(1.0, 0.2)

    def _burst(self) -> Any:
        for turn in range(self.BURST):
            self._gemm(*self._sets[turn % 2], out=self._out, batch_invariant=False)
        event = self._torch.cuda.Event()
        event.record()
        return event

    def run(self, share: float, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> float:
        """Compute in `share` of the time; FLOPs done. meanwhile: called after each burst is queued."""
        end = time.perf_counter() + seconds
        if not share:
            while time.perf_counter() < end:
                meanwhile()
                time.sleep(0.01)
            return 0.0
        bursts = 0
        if share < 1.0:
            while time.perf_counter() < end:
                began = time.perf_counter()
                burst = self._burst()
                meanwhile()
                burst.synchronize()
                time.sleep((time.perf_counter() - began) * (1.0 / share - 1.0))
                bursts += 1
            return bursts * self.BURST * self._flops
        ahead: list[Any] = []
        while time.perf_counter() < end:
            ahead.append(self._burst())
            meanwhile()
            bursts += 1
            if len(ahead) > 2:
                ahead.pop(0).synchronize()
        self._torch.cuda.synchronize()
        return bursts * self.BURST * self._flops


def _scrape(port: int, into: list[tuple[float, float]], stop: threading.Event) -> None:
    """The metric twice a second, each with its time."""
    while not stop.wait(0.5):
        seen = [v for k, v in metrics(port).items() if k.startswith("gemm_tensor_active_ratio{")]
        into += [(time.perf_counter(), value) for value in seen]


def killed() -> Iterator[Row]:
    """kill -9 of the worker under load: device memory back, service again, no request lost."""
    import psutil

    with on_gpus() as service:
        port = service.port
        until_admitted(port)
        put(port, "w", normal(4096, 4096))
        before = device_memory()
        body = normal(16, 4096).tobytes()
        clients = Clients(port, 4, "/gemm?a_shape=16x4096&dtype=fp16&b=handle:w", body, processes=2)
        clients.window(1.0)
        worker = psutil.Process(service.process.pid).children()[0]
        began = time.perf_counter()
        worker.kill()
        lowest = before
        while httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
            time.sleep(0.01)
        while httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code != 200:
            lowest = min(lowest, device_memory())
            time.sleep(0.05)
        back = time.perf_counter() - began
        seen = clients.window(1.0)  # raises where a request failed since the last
        clients.stop()
    yield {
        "name": "kill -9 of the worker under load",
        "outcome": "service again, no request failed",
        "detail": {
            "seconds_until_ready": back,
            "device_memory_before": before,
            "device_memory_lowest": lowest,
            "requests_in_the_second_after": seen.answers,
        },
    }


def device_memory() -> int:
    """Bytes in use on GPU 0, all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) << 20


def main() -> int:
    """Measure, print and write; returns the exit status."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_service", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    record.add_places(parser, "gpu")
    parts.add_choice(parser, ["latency", "ipc", "stacking", "probe", "killed"])
    options = parser.parse_args()
    details = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, **record.cpu_machine()}
    measured: parts.Parts = {
        "latency": lambda: latency(options.rounds),
        "ipc": lambda: ipc(options.rounds),
        "stacking": lambda: stacking(options.seconds),
        "probe": lambda: probe(max(4.0, options.seconds)),
        "killed": killed,
    }
    return parts.run("service", measured, options, details=details, packages=PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
