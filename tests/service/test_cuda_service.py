"""The whole service on a real GPU."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.verify import check
from service.client import Client
from tests.service.real import Service, raw, result, running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
random = np.random.default_rng(12)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data = tmp_path_factory.mktemp("cuda")
    with running(data / "data", "--device", "cuda", "--workers", "1", "--arena-bytes", "1GiB") as one:
        one.ready(120)
        one.until(lambda: not waiting(one), 150, "self-tests")
        yield one


def waiting(service: Service) -> list[str]:
    variants = service.http.get("/variants").json()["variants"]
    return [each["name"] for each in variants if "has not ended" in each["detail"]]


def normal(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return random.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 64, 128), (128, 256, 64), (300, 520, 1000), (1000, 3000, 500), (95, 97, 100), (17, 33, 5)],
)
@pytest.mark.parametrize("kind", ["fp16", "fp32", "fp64"])
def test_products_are_within_the_bound(service: Service, m: int, n: int, k: int, kind: str) -> None:
    dtype = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[kind]
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    d = result(service.gemm(a, b))
    verdict = check(Problem(m, n, k, dtype=DType(kind), out_dtype=DType(kind)), d, a, b)
    assert verdict.ok, verdict


def test_own_kernels_serve_where_they_were_proven(service: Service) -> None:
    variants = {each["name"]: each for each in service.http.get("/variants").json()["variants"]}
    own = [name for name, each in variants.items() if each["step"] == 9 and each["state"] == "admitted"]
    assert own, variants
    answer = service.gemm(normal(512, 1024), normal(1024, 2048))
    assert answer.headers["x-gemm-variant"] in own


def test_the_whole_epilogue(service: Service) -> None:
    a, b, c, bias = normal(200, 300), normal(160, 300), normal(200, 160), normal(160)
    with Client(service.url) as client:
        d = client.gemm(a, b, trans_b=True, c=c, bias=bias, alpha=0.5, beta=-2.0, activation="gelu")
    tail = Epilogue(0.5, -2.0, True, BiasDim.N, Activation.GELU)
    problem = Problem(200, 160, 300, trans_b=True, epilogue=tail)
    verdict = check(problem, d, a, b, c, bias)
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [((0, 8), (8, 4)), ((4, 0), (0, 8)), ((3, 5, 8), (8, 4)), ((5, 8), (3, 8, 4)), ((2, 5, 8), (2, 8, 4))],
)
def test_empty_and_batched_products(
    service: Service, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    a, b = normal(*a_shape), normal(*b_shape)
    d = result(service.gemm(a, b))
    np.testing.assert_allclose(d, (a.astype(np.float64) @ b.astype(np.float64)), rtol=1e-2, atol=1e-2)


def test_a_row_has_the_same_bits_alone_and_in_a_stack(service: Service) -> None:
    weight = normal(1024, 512)
    assert service.put("weight", weight).status_code in (200, 201)
    rows = [normal(m, 1024) for m in (1, 3, 16, 64, 130) for _ in range(10)]
    alone = [service.gemm(a, "weight").content for a in rows]

    def ask(a: np.ndarray) -> bytes:
        import httpx

        return httpx.post(f"{service.url}/gemm", timeout=60, **raw(a, "weight")).content

    before = service.metric("gemm_batch_requests_sum") / service.metric("gemm_batch_requests_count")
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for _ in range(4):
            assert list(pool.map(ask, rows)) == alone
    after = service.metric("gemm_batch_requests_sum") / service.metric("gemm_batch_requests_count")
    assert after > before, "nothing was stacked"


def test_unlike_products_share_launches_and_have_the_bits_that_they_have_alone(service: Service) -> None:
    shapes = [(8 + 3 * n, 128 + 16 * n, 256) for n in range(12)]
    rows = [normal(m, k) for m, _, k in shapes]
    for number, (_, n, k) in enumerate(shapes):
        assert service.put(f"unlike-{number}", normal(k, n)).status_code in (200, 201)
    alone = [service.gemm(a, f"unlike-{number}").content for number, a in enumerate(rows)]

    def ask(number: int) -> tuple[bytes, str]:
        import httpx

        answer = httpx.post(f"{service.url}/gemm", timeout=60, **raw(rows[number], f"unlike-{number}"))
        return answer.content, answer.headers["x-gemm-variant"]

    found: list[tuple[bytes, str]] = []
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for _ in range(20):
            found += pool.map(ask, range(12))
    assert [content for content, _ in found] == alone * 20
    assert any("grouped" in variant for _, variant in found), "no two waited together"


def test_nan_and_infinity_go_through(service: Service) -> None:
    a, b = normal(8, 16), normal(16, 8)
    a[2, 3], a[5, 0] = np.nan, np.inf
    d = result(service.gemm(a, b))
    assert np.isnan(d[2]).all()
    assert not np.isfinite(d[5]).any()
    assert np.isfinite(d[[0, 1, 3, 4, 6, 7]]).all()


def test_a_product_kept_by_handle_is_used_again(service: Service) -> None:
    a, b = normal(64, 64), normal(64, 64)
    with Client(service.url) as client:
        kept = client.put("kept", b)
        for _ in range(3):
            np.testing.assert_allclose(client.gemm(a, kept), a.astype(np.float32) @ b, rtol=2e-2, atol=2e-2)
        client.put("kept", 2 * b)
        np.testing.assert_allclose(client.gemm(a, "kept"), 2 * a.astype(np.float32) @ b, rtol=2e-2, atol=4e-2)


def test_tensor_activity_is_read_from_the_hardware(service: Service) -> None:
    service.until(lambda: service.metric("gemm_tensor_probe_up", gpu="0") == 1, 60, "probe")
    assert 'gemm_tensor_active_ratio{gpu="0",source="nvml_gpm"}' in service.http.get("/metrics").text


def test_a_worker_killed_comes_back_with_its_variants(service: Service, tmp_path: Path) -> None:
    service.worker().kill()
    service.until(lambda: not service.is_ready(), 60)
    service.ready(60)
    service.until(lambda: not waiting(service), 60, "outcomes of self-tests are kept")
    d = result(service.gemm(normal(8, 16), normal(16, 8)))
    assert np.isfinite(d).all()
