"""Grouped GEMM: receives a GPU, hands on grouped.json: unlike products in one launch against one after the other.

    python -m benchmarks.grouped [--machine h200] [--out DIR]

Three ways to the same list of products, timed by events around the list, in turn, inputs normal and rotated:
`kernels.gemm_grouped` with all that it does (tables, tensor maps), own kernels one by one, and torch.mm one by one
(cuBLAS). `host_seconds` is what Python takes to queue a list: where that is longer the GPU waits for it, so
`busy_seconds`, in which kernels ran, stand beside. Results are compared with fp64 by the API's bound first.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import kernels
from benchmarks.record import add_places, gpu_machine, spread, write
from kernels.device import describe_cuda

ROUNDS = 30
SETS = 3
Shapes = list[tuple[int, int, int]]
Lists = tuple[list[Any], list[Any], list[Any]]


def workloads() -> dict[str, Shapes]:
    """Lists of (M, N, K): a service's small unlike requests, experts with unlike loads, a few of some size."""
    dice = random.Random(5)
    return {
        "64 small": [
            (dice.randint(1, 128), 8 * dice.randint(8, 96), 64 * dice.randint(2, 16)) for _ in range(64)
        ],
        "16 small": [
            (dice.randint(1, 128), 8 * dice.randint(8, 96), 64 * dice.randint(2, 16)) for _ in range(16)
        ],
        "32 experts": [(1 + int(dice.expovariate(1 / 96)), 2048, 1024) for _ in range(32)],
        "8 medium": [(8 * dice.randint(32, 128), 8 * dice.randint(64, 256), 1024) for _ in range(8)],
    }


def operands(shapes: Shapes) -> Lists:
    """A, B and room for D of each product."""
    import torch

    def normal(*size: int) -> Any:
        return torch.randn(size, device="cuda").half()

    a = [normal(m, k) for m, _, k in shapes]
    b = [normal(k, n) for _, n, k in shapes]
    return a, b, [torch.empty(m, n, device="cuda", dtype=torch.float16) for m, n, _ in shapes]


def grouped(lists: Lists) -> None:
    """All in one call."""
    a, b, d = lists
    kernels.gemm_grouped(a, b, out=d, batch_invariant=False)


def alone(lists: Lists) -> None:
    """Own kernels, one after the other."""
    for a, b, d in zip(*lists, strict=True):
        kernels.gemm(a, b, out=d, batch_invariant=False)


def cublas(lists: Lists) -> None:
    """torch.mm, one after the other."""
    import torch

    for a, b, d in zip(*lists, strict=True):
        torch.mm(a, b, out=d)


def checked(lists: Lists) -> None:
    """Raise AssertionError where an element is beyond the API's bound, or wasn't written."""
    import torch

    for d in lists[2]:
        d.fill_(torch.nan)
    grouped(lists)
    for a, b, d in zip(*lists, strict=True):
        want = a.double() @ b.double()
        bound = 2.0**-22 * (a.shape[1] / 16 + 4) * (a.double().abs() @ b.double().abs())
        bound += torch.exp2(torch.frexp(want.abs().clamp(min=2.0**-14))[1] - 1.0) * 2.0**-11
        wrong = int((~((d.double() - want).abs() <= bound)).sum())
        assert not wrong, f"{tuple(d.shape)}: {wrong} elements are wrong"


def timed(
    ways: dict[str, Callable[[Lists], None]], sets: Sequence[Lists]
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way on the device and on the host, in turn."""
    import torch

    found: dict[str, dict[str, list[float]]] = {name: {"device": [], "host": []} for name in ways}
    for turn in range(ROUNDS):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            before = time.perf_counter()
            begin.record()
            way(sets[turn % len(sets)])
            end.record()
            host = time.perf_counter() - before
            end.synchronize()
            if turn >= SETS:  # the first loads code and encodes tensor maps
                found[name]["device"].append(begin.elapsed_time(end) / 1e3)
                found[name]["host"].append(host)
    return found


def busy(way: Callable[[Lists], None], lists: Lists) -> float:
    """Seconds that kernels ran, whoever waited for whom: the profiler's sum."""
    import torch
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as run:
        way(lists)
        torch.cuda.synchronize()
    return float(sum(each.self_device_time_total for each in run.key_averages())) / 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped", description="Time grouped GEMM.")
    add_places(parser, "h200")
    options = parser.parse_args(argv)
    device = describe_cuda()
    ways = {"grouped": grouped, "own kernels": alone, "cuBLAS": cublas}
    rows = []
    for name, shapes in workloads().items():
        sets = [operands(shapes) for _ in range(SETS)]
        checked(sets[0])
        found = timed(ways, sets)
        ran = {way: busy(launch, sets[0]) for way, launch in ways.items()}
        best = statistics.median(found["cuBLAS"]["device"])
        for way, times in found.items():
            ratio = best / statistics.median(times["device"])
            rows.append(
                {
                    "name": name, "way": way, "products": len(shapes), "shapes": shapes,
                    "flops": sum(2 * m * n * k for m, n, k in shapes), "seconds": spread(times["device"]),
                    "host_seconds": spread(times["host"]), "busy_seconds": ran[way], "ratio": ratio,
                    "busy_ratio": ran["cuBLAS"] / ran[way] if ran[way] else None,
                }
            )  # fmt: skip
            print(
                f"{name:<12}{way:<12}{statistics.median(times['device']) * 1e6:>9.1f} µs, host "
                f"{statistics.median(times['host']) * 1e6:>7.1f}, kernels {ran[way] * 1e6:>7.1f}, ratio {ratio:.2f}",
                flush=True,
            )
    packages = ["torch", "apache-tvm-ffi"]
    details = gpu_machine(device)
    print(write(options.machine, "grouped", rows, details=details, packages=packages, folder=options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
