"""A real service for tests: its own process, worker, data folder and free port, ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
#: Flags for a worker that a test lets stand still.
PATIENT = ("--hang-seconds", "600", "--ping-seconds", "60")
_URL = re.compile(r"(https?://127\.0\.0\.1:\d+)")


class Service:
    """A running `gemm-service serve`."""

    def __init__(
        self,
        data: Path,
        *flags: str,
        environ: dict[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        under: Sequence[str] = (),
    ) -> None:
        self.data = data
        command = [
            *under,
            sys.executable,
            "-m",
            "service",
            "serve",
            "--port",
            "0",
            "--data",
            str(data),
            *flags,
        ]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._said = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(timeout=60) if tls is None else httpx.Client(timeout=60, verify=tls)
        if not self._said.wait(120) or not self.url:
            self.close()
            raise AssertionError(f"ended with {self.process.returncode}: {self.output}")
        self.http.base_url = httpx.URL(self.url)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = _URL.search(line)
            if found and not self.url:
                self.url = found[1]
                self._said.set()
        self._said.set()

    @property
    def output(self) -> str:
        """All that it printed."""
        return "".join(self.lines)

    def until(self, true: Callable[[], Any], seconds: float = 60, what: str = "") -> Any:
        """Wait until `true()` is; its value."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = true()
            if value:
                return value
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s: {what or true}\n{self.output}")

    def ready(self, seconds: float = 60) -> Service:
        """Wait until a worker takes work."""
        self.until(self.is_ready, seconds, "ready")
        return self

    def is_ready(self) -> bool:
        """Whether /health/ready says 200."""
        try:
            return self.http.get("/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[psutil.Process]:
        """Worker processes."""
        return psutil.Process(self.process.pid).children()

    def worker(self) -> psutil.Process:
        """The one worker."""
        return self.until(self.workers, what="a worker process")[0]

    @contextlib.contextmanager
    def standing(self) -> Iterator[psutil.Process]:
        """The one worker stands still for the length of a block, so that its queue does too, however fast it is.

        Start the service with PATIENT, or the watchdog takes it for hung.
        """
        worker = self.worker()
        worker.suspend()
        try:
            yield worker
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()

    def admitted(self, count: int) -> None:
        """Wait until `count` requests were admitted."""
        name, stage = "gemm_stage_seconds_count", "admit"
        self.until(lambda: self.metric(name, stage=stage) >= count, 60, what=f"{count} admitted")

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where it is absent."""
        return metric(self.http.get("/metrics").text, name, **labels)

    def gemm(self, a: np.ndarray, b: np.ndarray | str, **query: Any) -> httpx.Response:
        """POST /gemm with raw operands; `b` may be a handle's name."""
        return self.http.post("/gemm", **raw(a, b, **query))

    def put(self, name: str, x: np.ndarray) -> httpx.Response:
        """PUT a tensor, raw."""
        return self.http.put(f"/tensors/{name}", **raw_tensor(x))

    def stop(self, seconds: float = 40) -> int:
        """SIGTERM and wait; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """kill -9 of the front."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End whatever still runs."""
        self.http.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [
                psutil.Process(self.process.pid),
                *psutil.Process(self.process.pid).children(recursive=True),
            ]
            if self.process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.stop(20)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry all `labels`."""
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


def raw(a: np.ndarray, b: np.ndarray | str, **query: Any) -> dict[str, Any]:
    """Arguments of an httpx POST of a raw GEMM."""
    params = {"a_shape": shape(a), "dtype": dtype(a), **query}
    content = a.tobytes()
    if isinstance(b, str):
        params["b"] = f"handle:{b}"
    else:
        params["b_shape"] = shape(b)
        content += b.tobytes()
    headers = {"content-type": "application/octet-stream"}
    return {"params": params, "content": content, "headers": headers}


def raw_tensor(x: np.ndarray) -> dict[str, Any]:
    """Arguments of an httpx PUT of a raw tensor."""
    headers = {"content-type": "application/octet-stream"}
    return {"params": {"shape": shape(x), "dtype": dtype(x)}, "content": x.tobytes(), "headers": headers}


def shape(x: np.ndarray) -> str:
    """A shape as the query has it."""
    return "x".join(map(str, x.shape))


def dtype(x: np.ndarray) -> str:
    """A dtype's name in the API."""
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[x.dtype.name]


def result(response: httpx.Response) -> np.ndarray:
    """D of a raw reply."""
    assert response.status_code == 200, response.text
    kinds = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
    extents = response.headers["x-gemm-shape"].replace("x", ",").split(",")
    return np.frombuffer(response.content, kinds[response.headers["x-gemm-dtype"]]).reshape(
        [int(e) for e in extents]
    )


@contextlib.contextmanager
def running(
    data: Path,
    *flags: str,
    environ: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    under: Sequence[str] = (),
) -> Iterator[Service]:
    """A service for the length of a block; `tls` is its client's side, `under` a command that becomes the service."""
    light = ("--backend", "numpy", "--arena-bytes", "256MiB")
    service = Service(data, *light, *flags, environ=environ, tls=tls, under=under)
    try:
        yield service
    finally:
        service.close()
