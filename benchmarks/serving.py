"""The service against its peers on this computer: writes benchmarks/results/<machine>/serving.json and a picture.

Every comparison is interleaved: each round runs every contender once, in turn, so that a machine whose speed drifts
favours none. Ratios are taken round by round; medians and spreads are reported.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.progress import Progress

from benchmarks import record
from benchmarks.load import RAW, Counted, free_port, one_service, ours, put, served, wrk
from benchmarks.stacking import stacking
from benchmarks.transfers import Peer, Raw

N = 256
MIB = 1 << 20
PACKAGES = ("numpy", "torch", "fastapi", "uvicorn", "uvloop", "httptools", "mosec", "litserve")
RAW_QUERY = f"a_shape={N}x{N}&b_shape={N}x{N}&dtype=fp32"
Row = dict[str, Any]


def contenders(data: Path) -> dict[str, tuple[list[str], str, str]]:
    """Each server's command, the URL to load, and the URL that answers once it is up."""
    python = sys.executable
    a, b, c, d = (free_port() for _ in range(4))
    at = "http://127.0.0.1"
    return {
        "gemm-service": (ours(a, data), f"{at}:{a}/gemm?{RAW_QUERY}", f"{at}:{a}/health/ready"),
        "fastapi-inline": (
            [python, "-m", "benchmarks.peers.inline", str(b)],
            f"{at}:{b}/gemm",
            f"{at}:{b}/docs",
        ),
        "mosec": (
            [python, "-m", "benchmarks.peers.mosec_raw", "--address", "127.0.0.1", "--port", str(c)],
            f"{at}:{c}/inference",
            f"{at}:{c}/metrics",
        ),
        "litserve": ([python, "-m", "benchmarks.peers.lit", str(d)], f"{at}:{d}/gemm", f"{at}:{d}/health"),
    }


def rates(rounds: int, seconds: float, tick: Callable[[str], None]) -> list[Row]:
    """Requests a second of 256³ fp32 with 8 clients; raw bodies, where the server takes them."""
    a, b = (np.random.default_rng(n).standard_normal((N, N)).astype(np.float32) for n in (1, 2))
    want = a.astype(np.float64) @ b
    both = a.tobytes() + b.tobytes()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        raw, text = Path(folder, "raw"), Path(folder, "json")
        raw.write_bytes(both)
        text.write_text(json.dumps({"both": base64.b64encode(both).decode()}))
        servers = contenders(Path(folder, "data"))
        loads: dict[str, Callable[[], Counted]] = {}
        for name, (command, url, probe) in servers.items():
            stack.enter_context(served(command, probe))
            body, media = (text, "application/json") if name == "litserve" else (raw, RAW)
            _check_product(name, url, body.read_bytes(), media, want)
            loads[name] = partial(wrk, url, body, clients=8, seconds=seconds, media=media)
        seen: dict[str, list[Counted]] = {name: [] for name in servers}
        floor: list[float] = []
        for _ in range(rounds):
            for name, load in loads.items():
                tick(name)
                seen[name].append(load())
            floor.append(_product_seconds(a, b))
    rows = [_rate_row(name, runs, seen["gemm-service"]) for name, runs in seen.items()]
    alone: Row = {"server": "product alone", "workload": "256³ fp32", "clients": 1}
    rows.append(alone | {"requests_per_second": record.spread([1 / s for s in floor])})
    return rows


def _check_product(name: str, url: str, body: bytes, media: str, want: Any) -> None:
    answer: httpx.Response | None = None
    for _ in range(100):
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(url, content=body, headers={"content-type": media}, timeout=30)
            if answer.status_code == 200:
                break
        time.sleep(0.2)
    if answer is None or answer.status_code != 200:
        raise SystemExit(f"{name} gives no answer: {answer and answer.text[:300]}")
    data = base64.b64decode(answer.json()["d"]) if media == "application/json" else answer.content
    if not np.allclose(np.frombuffer(data, np.float32).reshape(N, N), want, rtol=1e-4, atol=1e-4):
        raise SystemExit(f"{name} answers a wrong product")


def _product_seconds(a: Any, b: Any) -> float:
    """Median seconds of the product alone, in this process with torch."""
    import torch

    x, y = torch.from_numpy(a), torch.from_numpy(b)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        torch.matmul(x, y)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _rate_row(name: str, runs: list[Counted], own: list[Counted]) -> Row:
    ratio = [mine.requests_per_second / run.requests_per_second for mine, run in zip(own, runs, strict=True)]
    return {
        "server": name,
        "workload": "256³ fp32, " + ("base64 in JSON" if name == "litserve" else "raw bodies"),
        "clients": 8,
        "requests_per_second": record.spread([run.requests_per_second for run in runs]),
        "p50_seconds": record.spread([run.p50_seconds for run in runs]),
        "p99_seconds": record.spread([run.p99_seconds for run in runs]),
        "ours_over_this": record.spread(ratio),
    }


def transfers(rounds: int, tick: Callable[[str], None]) -> list[Row]:
    """Uploads into the arena and replies from it, against bare socket calls.

    `ratio` counts what the bytes add to a request: its seconds less those of the same request with one number
    to move. `request_ratio` counts the whole request, with everything that a service does beside moving bytes.
    """
    rows = []
    with one_service() as (port, http):
        peer, raw = Peer(port), Raw(256 * MIB)
        gemm = "/gemm?alpha=0&dtype=fp32&a_shape={}&b_shape={}"
        put(http, "t0", np.zeros((1, 1), np.float32))
        number = partial(peer.exchange, "POST", gemm.format("1x1", "1x1"), bytes(8))
        for mib in (8, 64, 256):
            body = memoryview(np.random.default_rng(3).bytes(mib * MIB + 4096))
            request = partial(peer.exchange, "POST", gemm.format(f"{mib * 256}x1024", "1024x1"), body)
            bare = partial(raw.receive, body[: mib * MIB])
            rows.append(_transfer(f"upload {mib} MiB", mib * MIB, (request, number, bare), rounds, tick))
        number = partial(peer.exchange, "GET", "/tensors/t0", into=memoryview(bytearray(4)))
        for mib in (8, 64):
            put(http, f"t{mib}", np.zeros((mib * 256, 1024), np.float32))
            into = memoryview(bytearray(mib * MIB))
            request = partial(peer.exchange, "GET", f"/tensors/t{mib}", into=into)
            bare = partial(raw.send, into)
            rows.append(_transfer(f"reply {mib} MiB", mib * MIB, (request, number, bare), rounds, tick))
        peer.close()
        raw.close()
    return rows


#: Bytes that one round of `_transfer` moves at most, and how often at most.
ROUND_BYTES = 256 * MIB
ROUND_EXCHANGES = 15


def _transfer(
    name: str,
    nbytes: int,
    timed: tuple[Callable[[], float], Callable[[], float], Callable[[], float]],
    rounds: int,
    tick: Callable[[str], None],
) -> Row:
    """A request that moves the bytes, one that moves a number, and bare sockets, in turns.

    Medians of each round; the first warms pages and buffers up and doesn't count."""
    times = []
    for _ in range(rounds):
        tick(name)
        turns = range(min(ROUND_EXCHANGES, max(1, ROUND_BYTES // nbytes)))
        columns = zip(*[[seconds() for seconds in timed] for _ in turns], strict=True)
        times.append([statistics.median(column) for column in columns])
    times = times[1:]
    return {
        "name": name,
        "bytes": nbytes,
        "bytes_per_second": record.spread([nbytes / mine for mine, _, _ in times]),
        "empty_seconds": record.spread([nothing for _, nothing, _ in times]),
        "raw_bytes_per_second": record.spread([nbytes / raw for _, _, raw in times]),
        "ratio": record.spread([raw / (mine - nothing) for mine, nothing, raw in times]),
        "request_ratio": record.spread([raw / mine for mine, _, raw in times]),
    }


def overhead(rounds: int, tick: Callable[[str], None]) -> list[Row]:
    """A product of stored handles with a small result, one client on a kept connection, over the bare product."""
    random = np.random.default_rng(5)
    a, b = (
        random.standard_normal((64, 1024)).astype(np.float32),
        random.standard_normal((1024, 64)).astype(np.float32),
    )
    rows = []
    with one_service() as (port, http):
        put(http, "a", a)
        put(http, "b", b)
        peer, into = Peer(port), memoryview(bytearray(64 * 64 * 4))
        for _ in range(50):
            peer.exchange("POST", "/gemm?a=handle:a&b=handle:b", into=into)
        times, bare = [], []
        for _ in range(rounds):
            tick("stored handles")
            times.append(
                statistics.median(
                    peer.exchange("POST", "/gemm?a=handle:a&b=handle:b", into=into) for _ in range(300)
                )
            )
            bare.append(_product_seconds(a, b))
        peer.close()
    over = [mine - product for mine, product in zip(times, bare, strict=True)]
    rows.append(
        {
            "server": "gemm-service",
            "workload": "64×1024×64 fp32 between stored handles",
            "clients": 1,
            "p50_seconds": record.spread(times),
            "bare_product_seconds": record.spread(bare),
            "overhead_seconds": record.spread(over),
        }
    )
    return rows


def start(rounds: int, tick: Callable[[str], None]) -> list[Row]:
    """Seconds from process start until the front answers /health/live."""
    times = []
    for _ in range(rounds + 1):
        tick("start")
        port = free_port()
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            with served(ours(port, Path(folder)), f"http://127.0.0.1:{port}/health/live"):
                times.append(time.perf_counter() - started)
    return [{"name": "process start to /health/live", "seconds": record.spread(times[1:])}]


PARTS: dict[str, Callable[[argparse.Namespace, Callable[[str], None]], list[Row]]] = {
    "rates": lambda o, tick: rates(o.rounds, o.seconds, tick),
    "transfers": lambda o, tick: transfers(o.rounds + 1, tick),
    "overhead": lambda o, tick: overhead(o.rounds, tick),
    "stacking": lambda o, tick: stacking(o.rounds, o.seconds, tick),
    "start": lambda o, tick: start(o.rounds, tick),
}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (at least 7 to report)")
    parser.add_argument("--seconds", type=int, default=3, help="whole seconds of one run of wrk")
    record.add_places(parser)
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="only these parts; the others' rows stay as they are"
    )
    options = parser.parse_args()
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        for part in options.part or PARTS:
            task = progress.add_task(part, total=None)

            def tick(what: str, task: Any = task, part: str = part) -> None:
                progress.update(task, description=f"{part}: {what}")

            found = [{"part": part, **row} for row in PARTS[part](options, tick)]
            progress.remove_task(task)
            for row in found:
                print({key: _short(value) for key, value in row.items()}, flush=True)
            rows += found
    path = record.write_here(options, "serving", rows, PACKAGES, key="part")
    draw(json.loads(path.read_text())["rows"], path.with_suffix(".png"))
    print(f"written: {path} and {path.with_suffix('.png')}")


def _short(value: Any) -> Any:
    return float(f"{value['median']:.4g}") if isinstance(value, dict) and "median" in value else value


def draw(rows: list[Row], path: Path) -> None:
    """Requests a second by server, with spreads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["part"] == "rates" and "p50_seconds" in row]
    shown.sort(key=lambda row: row["requests_per_second"]["median"])
    figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
    for at, row in enumerate(shown):
        rate = row["requests_per_second"]
        error = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
        axes.barh(
            at, rate["median"], xerr=error, color="#2a7f62" if row["server"] == "gemm-service" else "#9aa5a1"
        )
        axes.text(
            rate["max"],
            at,
            f"  {rate['median']:.0f}/s, p50 {row['p50_seconds']['median'] * 1e3:.1f} ms",
            va="center",
        )
    axes.set_yticks(range(len(shown)), [row["server"] for row in shown])
    axes.set_xlim(0, max(row["requests_per_second"]["max"] for row in shown) * 1.35)
    axes.set_xlabel("requests a second, 256³ fp32, 8 clients (median, min and max)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
