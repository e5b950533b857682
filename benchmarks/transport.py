"""Ways to hand 128 MB of operands to the service on this computer: writes benchmarks/results/<machine>/transport.json.

A 16×2²⁰ by B 2²⁰×16 in fp32: much to move, little to compute. Each round takes every way once, the next round begins
with another, so that neither a machine whose speed drifts nor what a way leaves behind favours one; ratios are taken
round by round. Every result is checked. A picture is drawn beside the file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from rich.progress import track

from benchmarks import record
from benchmarks.load import free_port, ours, served
from service.client import Client

M, N = 16, 16
PACKAGES = ("numpy", "torch", "uvicorn", "uvloop", "httptools", "tritonclient")
Array = np.ndarray[Any, Any]
Row = dict[str, Any]
Way = Callable[[], Array]

TRITON = "tritonclient, HTTP binary"
TRITON_SHARED = "tritonclient, system shared memory"
HTTP = "service.client, HTTP"
COPIED = "service.client, shared memory, operands copied into it"
IN_PLACE = "service.client, shared memory, operands and D in place"
ALONE = "product alone"

#: What a ratio has to reach: (way, over which, at least).
GOALS = (
    (IN_PLACE, TRITON, 8.0),
    (IN_PLACE, HTTP, 3.0),
    (HTTP, TRITON, 4.0),
    (TRITON_SHARED, TRITON, 5.0),
)


@contextlib.contextmanager
def ways(port: int, run: str, a: Array, b: Array) -> Iterator[dict[str, Way]]:
    """Each way as a function that computes the product and returns D."""
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(Client(f"http://127.0.0.1:{port}"))
        far = stack.enter_context(Client(f"http://127.0.0.1:{port}", local=False))
        shared_a, shared_b, shared_d = near.empty(a.shape), near.empty(b.shape), near.empty((M, N))
        shared_a[:], shared_b[:] = a, b
        http = triton.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=120, connection_timeout=120)
        stack.callback(http.close)
        yield {
            IN_PLACE: lambda: near.gemm(shared_a, shared_b, out=shared_d),
            COPIED: lambda: near.gemm(a, b),
            HTTP: lambda: far.gemm(a, b),
            TRITON_SHARED: stack.enter_context(_triton_shared(http, run, a, b)),
            TRITON: lambda: _triton(http, a, b),
            ALONE: lambda: _alone(a, b),
        }


def _triton(http: triton.InferenceServerClient, a: Array, b: Array) -> Array:
    inputs = [triton.InferInput(name, list(x.shape), "FP32") for name, x in (("A", a), ("B", b))]
    for one, x in zip(inputs, (a, b), strict=True):
        one.set_data_from_numpy(x, binary_data=True)
    d: Array = http.infer("gemm_fp32", inputs).as_numpy("D")
    return d


@contextlib.contextmanager
def _triton_shared(http: triton.InferenceServerClient, run: str, a: Array, b: Array) -> Iterator[Way]:
    """Operands lie in the region already, as the client's own examples have it; D is read from there."""
    nbytes = a.nbytes + b.nbytes + M * N * 4
    region = shm.create_shared_memory_region("operands", f"/{run}", nbytes)
    try:
        shm.set_shared_memory_region(region, [a, b])
        http.register_system_shared_memory("operands", f"/{run}", nbytes)
        inputs = [triton.InferInput(name, list(x.shape), "FP32") for name, x in (("A", a), ("B", b))]
        inputs[0].set_shared_memory("operands", a.nbytes)
        inputs[1].set_shared_memory("operands", b.nbytes, offset=a.nbytes)
        output = triton.InferRequestedOutput("D")
        output.set_shared_memory("operands", M * N * 4, offset=a.nbytes + b.nbytes)

        def way() -> Array:
            http.infer("gemm_fp32", inputs, outputs=[output])
            d: Array = shm.get_contents_as_numpy(region, np.float32, [M, N], offset=a.nbytes + b.nbytes)
            return d

        yield way
        http.unregister_system_shared_memory("operands")
    finally:
        shm.destroy_shared_memory_region(region)


def _alone(a: Array, b: Array) -> Array:
    """The product in this process, with the library that the service's worker uses."""
    import torch

    d: Array = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return d


def measure(port: int, run: str, k: int, rounds: int) -> list[Row]:
    """Seconds of one request each way, round by round."""
    dice = np.random.default_rng(7)
    a = dice.standard_normal((M, k), np.float32)
    b = dice.standard_normal((k, N), np.float32)
    want = a.astype(np.float64) @ b
    seen: dict[str, list[float]] = {}
    with ways(port, run, a, b) as found:
        for name, way in found.items():
            _check(name, way(), want)  # also warms up: connections, mappings, pages
        names = list(found)
        for first in track(range(rounds), "rounds", transient=True):
            for index in range(len(names)):
                name = names[(first + index) % len(names)]
                way = found[name]
                started = time.perf_counter()
                d = way()
                seen.setdefault(name, []).append(time.perf_counter() - started)
                _check(name, d, want)
                del d
    nbytes = a.nbytes + b.nbytes + M * N * 4
    rows = []
    for name, seconds in seen.items():
        ratio = [other / own for other, own in zip(seen[TRITON], seconds, strict=True)]
        median = statistics.median(seconds)
        rows.append(
            {
                "name": name,
                "bytes": nbytes,
                "seconds": record.spread(seconds),
                "requests_per_second": 1 / median,
                "bytes_per_second": nbytes / median,
                "ratio": record.spread(ratio),
                "ratio_of": f"rate over {TRITON}",
            }
        )
    return rows + [_goal(seen, *goal) for goal in GOALS]


def _check(name: str, d: Array, want: Array) -> None:
    if not np.allclose(d, want, rtol=1e-3, atol=2.0):  # √K·ulp of sums of a million products
        raise SystemExit(f"{name}: the product is wrong")


def _goal(seen: dict[str, list[float]], name: str, over: str, least: float) -> Row:
    ratio = [other / own for other, own in zip(seen[over], seen[name], strict=True)]
    reached = statistics.median(ratio) >= least
    return {
        "name": f"{name} over {over}",
        "ratio": record.spread(ratio),
        "goal": least,
        "outcome": "reached" if reached else "missed",
    }


def draw(rows: list[Row], path: Path) -> None:
    """Milliseconds by way, with spreads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted((row for row in rows if "seconds" in row), key=lambda row: -row["seconds"]["median"])
    figure, axes = pyplot.subplots(figsize=(9, 2.8), layout="constrained")
    for at, row in enumerate(shown):
        low, middle, high = (row["seconds"][part] * 1e3 for part in ("min", "median", "max"))
        own = row["name"].startswith("service.client")
        axes.barh(at, middle, xerr=[[middle - low], [high - middle]], color="#2a7f62" if own else "#9aa5a1")
        axes.text(high, at, f"  {middle:.0f} ms", va="center")
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown])
    axes.set_xlim(0, max(row["seconds"]["max"] for row in shown) * 1e3 * 1.15)
    axes.set_xlabel("milliseconds a request (median, min and max)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transport", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds")
    parser.add_argument("--k", type=int, default=1 << 20, help="columns of A; less is for a try")
    record.add_places(parser)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    # As in the service's worker: threads of a BLAS that spin after a product would be charged to the next way.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    port, run = free_port(), f"gemm-bench-{secrets.token_hex(6)}"
    flags = ("--shared-memory", "--shared-memory-keys", run)
    with tempfile.TemporaryDirectory() as folder:
        command = ours(port, Path(folder), *flags)
        with served(command, f"http://127.0.0.1:{port}/health/ready"):
            rows = measure(port, run, options.k, options.rounds)
    for row in rows:
        ratio, seconds = row["ratio"], row.get("seconds")
        told = f"{seconds['median'] * 1e3:8.1f} ms  " if seconds else " " * 13
        print(f"{told}{ratio['median']:6.2f} ×  {row['name']}  {row.get('outcome', '')}")
    if not options.no_write:
        path = record.write_here(options, "transport", rows, PACKAGES)
        draw(rows, path.with_suffix(".png"))
        print(f"written: {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
