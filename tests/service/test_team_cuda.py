"""A product over the GPUs of a host behind /gemm: right, and a rank's death costs an error and nothing else."""

from __future__ import annotations

import concurrent.futures
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kernels.problem import DType, Problem
from kernels.verify import check
from tests.service.real import Service, raw, result, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
torch = pytest.importorskip("torch")


def ranks(service: Service) -> list[psutil.Process]:
    return [each for each in service.workers() if "--rank" in each.cmdline()]


def post(service: Service, **body: object) -> int:
    started = time.monotonic()
    answer = service.http.post("/gemm", json={"variant": "sharded", **body})
    print(answer.status_code, answer.json().get("why", answer.text), f"{time.monotonic() - started:.2f} s")
    return answer.status_code


def test_sharded_products_over_all_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(s).astype(np.float16) for s in ((1000, 3000), (3000, 520)))
    with running(tmp_path / "data", "--device", "cuda", "--arena-bytes", "8GiB") as service:
        service.ready(120)
        service.until(lambda: service.metric("gemm_workers_ready") >= 2, 120, "two workers")
        d = result(service.http.post("/gemm", **raw(a, b, variant="sharded")))
        verdict = check(Problem(1000, 520, 3000, dtype=DType.FP16, out_dtype=DType.FP16), d, a, b)
        assert verdict.ok, verdict
        for name in ("x", "y"):
            large = random.standard_normal((16384, 16384), dtype=np.float32).astype(np.float16)
            assert service.put(name, large).status_code in (200, 201)
        seen = []
        for _ in range(3):
            assert post(service, a={"handle": "x"}, b={"handle": "y"}, out={"handle": "d"}) == 200
            ways = ("copied", "exchanged", "kept")
            seen.append([service.metric("gemm_shards_bytes_total", way=way) for way in ways])
        # Shards stay on the GPUs: the second product neither copied nor exchanged any, and its D is there as well.
        assert seen[1][:2] == seen[2][:2] == seen[0][:2]
        assert seen[1][2] > seen[0][2]
        assert post(service, a={"handle": "d"}, b={"handle": "y"}, out={"handle": "dy"}) == 200
        assert service.metric("gemm_shards_bytes_total", way="copied") == seen[2][0]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            victim = ranks(service)[0]
            victim.suspend()
            asked = pool.submit(post, service, a={"handle": "x"}, b={"handle": "y"}, out={"handle": "d"})
            time.sleep(1.0)
            victim.kill()
            assert asked.result(60) == 503
        assert service.gemm(a, b).status_code == 200
        assert post(service, a={"handle": "x"}, b={"handle": "y"}, out={"handle": "d"}) == 200
