"""Servers to measure and the load on them: receives commands, hands on running processes and what wrk counted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

RAW = "application/octet-stream"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_SCRIPT = Path(__file__).with_name("post.lua")


@dataclass(frozen=True, slots=True)
class Counted:
    """What wrk saw in one run."""

    requests_per_second: float
    p50_seconds: float
    p99_seconds: float


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def served(
    command: Sequence[str], probe: str, *, seconds: float = 90, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the length of a block, from its first answer at `probe` on; its group ends with it."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **(environ or {})}
        )
        try:
            _await(process, probe, seconds)
            yield process
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(process: subprocess.Popen[bytes], probe: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            # Peers have no readiness of their own: any answer but "not ready" will do.
            if httpx.get(probe, timeout=2).status_code != 503:
                return
        time.sleep(0.05)
    raise RuntimeError(f"no answer at {probe} within {seconds:g} s")


def ours(port: int, data: Path, *flags: str) -> list[str]:
    """The command of our server; later `flags` win over earlier ones."""
    common = ["--port", str(port), "--data", str(data), "--log-level", "warning", "--arena-bytes", "1536MiB"]
    return [sys.executable, "-m", "service", "serve", *common, *flags]


@dataclass(frozen=True, slots=True)
class OnGpus:
    """A service on GPUs that takes work: its port, its front, and seconds from start to ready."""

    port: int
    process: subprocess.Popen[bytes]
    ready_seconds: float


@contextlib.contextmanager
def on_gpus(*flags: str, devices: str = "0") -> Iterator[OnGpus]:
    """One of our own with a worker on each of `devices` (as CUDA_VISIBLE_DEVICES has them), for a block."""
    port = free_port()
    room = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 32 << 30 else None
    workers = str(len(devices.split(",")))
    with tempfile.TemporaryDirectory(dir=room) as folder:
        own = ("--device", "cuda", "--workers", workers, "--arena-bytes", "4GiB", *flags)
        started = time.perf_counter()
        with served(
            ours(port, Path(folder), *own),
            f"http://127.0.0.1:{port}/health/ready",
            environ={"CUDA_VISIBLE_DEVICES": devices},
        ) as process:
            yield OnGpus(port, process, time.perf_counter() - started)


@contextlib.contextmanager
def one_service(*flags: str) -> Iterator[tuple[int, httpx.Client]]:
    """One of our own, alone: its port, and a client of it."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(ours(port, Path(folder), *flags), f"http://127.0.0.1:{port}/health/ready"),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        yield port, http


def put(http: httpx.Client, name: str, x: Any) -> None:
    """Store `x`, fp32, under `name`."""
    shape = "x".join(map(str, x.shape))
    http.put(
        f"/tensors/{name}",
        params={"shape": shape, "dtype": "fp32"},
        content=x.tobytes(),
        headers={"content-type": RAW},
    ).raise_for_status()


def wrk(url: str, body: Path, *, clients: int, seconds: float, media: str = RAW) -> Counted:
    """Load `url` with wrk, one thread; raises where any answer was no success."""
    if shutil.which("wrk") is None:
        raise SystemExit("benchmarks need wrk: apt-get install wrk")
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", str(_SCRIPT), url]
    environ = {**os.environ, "GEMM_BODY": str(body), "GEMM_TYPE": media}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+)", run.stdout)
    # wrk counts an answer that took over 2 s as a timeout: slow, but an answer.
    if "Non-2xx" in run.stdout or (errors is not None and any(map(int, errors.groups()))):
        raise RuntimeError(f"not every answer was a success:\n{run.stdout}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", run.stdout)
    assert rate is not None, run.stdout
    return Counted(float(rate[1]), _latency(run.stdout, "50%"), _latency(run.stdout, "99%"))


def _latency(text: str, quantile: str) -> float:
    found = re.search(rf"^\s+{quantile}\s+([\d.]+)(us|ms|s|m)\s*$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]
