"""What KEDA asks a Prometheus, asked of a real one that scrapes two services with work in their queues."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml

from tests.service.real import ROOT, Service, raw, result, running
from tests.service.test_monitoring import asked, prometheus

pytestmark = pytest.mark.ci

TRIGGER = yaml.safe_load((ROOT / "deploy/keda/scaledobject.yaml").read_text())["spec"]["triggers"][0]
SQUARE = np.random.default_rng(5).standard_normal((256, 256))


@contextlib.contextmanager
def stopped(worker: psutil.Process) -> Iterator[None]:
    """A worker that stands still, so that its queue does too."""
    worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGCONT)


def post(url: str) -> httpx.Response:
    return httpx.post(f"{url}/gemm", **raw(SQUARE, SQUARE), timeout=120)


def queued(service: Service) -> float:
    return service.metric("gemm_queue_seconds")


def test_the_query_of_two_loaded_services_gives_the_sum_and_the_replicas(tmp_path: Path) -> None:
    patient = ("--hang-seconds", "300", "--ping-seconds", "60", "--batch-requests", "1")
    with contextlib.ExitStack() as stack:
        services = [
            stack.enter_context(running(tmp_path / name, *patient)).ready() for name in ("one", "two")
        ]
        targets = [service.url.removeprefix("http://") for service in services]
        client = stack.enter_context(prometheus(tmp_path, *targets))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(40))
        with contextlib.ExitStack() as standing:
            for service in services:
                standing.enter_context(stopped(service.worker()))
            counts = (30, 10)
            answers = [
                pool.submit(post, s.url) for s, n in zip(services, counts, strict=True) for _ in range(n)
            ]
            # What a worker was sent has left the queue: at most two batches of one.
            for service, count in zip(services, counts, strict=True):
                service.until(lambda s=service, n=count: s.metric("gemm_queue_depth") >= n - 2, what="queued")
            time.sleep(0.2)
            want = sum(map(queued, services))
            assert want > 0
            end = time.monotonic() + 30
            value = math.nan
            while not math.isclose(value, want, rel_tol=1e-6) and time.monotonic() < end:
                time.sleep(0.3)
                with contextlib.suppress(httpx.TransportError):
                    (found,) = asked(client, TRIGGER["metadata"]["query"]) or [{"value": (0, "nan")}]
                    value = float(found["value"][1])
            assert value == pytest.approx(want, rel=1e-6), (tmp_path / "log").read_text()
            # One series, as KEDA wants; AverageValue then asks for this many replicas.
            threshold = float(TRIGGER["metadata"]["threshold"])
            assert math.ceil(value / threshold) == math.ceil(want / threshold) >= 1
        for answer in answers:
            np.testing.assert_allclose(result(answer.result(60)), SQUARE @ SQUARE, rtol=1e-9, atol=1e-9)
        for service in services:
            service.until(lambda s=service: queued(s) == 0, what="an empty queue")
