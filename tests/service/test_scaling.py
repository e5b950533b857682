"""What KEDA asks a Prometheus, asked of a real one that scrapes two services with work in their queues."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from tests.service.real import PATIENT, ROOT, Service, raw, result, running
from tests.service.test_monitoring import asked, prometheus

pytestmark = pytest.mark.ci

TRIGGER = yaml.safe_load((ROOT / "deploy/keda/scaledobject.yaml").read_text())["spec"]["triggers"][0]
SQUARE = np.random.default_rng(5).standard_normal((256, 256))


def post(url: str) -> httpx.Response:
    return httpx.post(f"{url}/gemm", **raw(SQUARE, SQUARE), timeout=120)


def queued(service: Service) -> float:
    return service.metric("gemm_queue_seconds")


def test_the_query_of_two_loaded_services_gives_the_sum_and_the_replicas(tmp_path: Path) -> None:
    patient = (*PATIENT, "--batch-requests", "1")
    with contextlib.ExitStack() as stack:
        services = [
            stack.enter_context(running(tmp_path / name, *patient)).ready() for name in ("one", "two")
        ]
        targets = [service.url.removeprefix("http://") for service in services]
        client = stack.enter_context(prometheus(tmp_path, *targets))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(40))
        with contextlib.ExitStack() as standing:
            for service in services:
                standing.enter_context(service.standing())
            counts = (30, 10)
            answers = [
                pool.submit(post, s.url) for s, n in zip(services, counts, strict=True) for _ in range(n)
            ]
            for service, count in zip(services, counts, strict=True):
                service.admitted(count)
            want = sum(map(queued, services))
            assert want > 0
            end = time.monotonic() + 60
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
