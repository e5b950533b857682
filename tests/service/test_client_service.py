"""The client against a real service: forms, kept tensors, jobs, errors, both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from service.client import (
    AsyncClient,
    Client,
    DeadlinePassed,
    Handle,
    Invalid,
    JobFailed,
    NotFound,
    Refused,
    Step,
)
from tests.service.real import Service

rng = np.random.default_rng(5)
ULPS = {"fp16": 2**-10, "bf16": 2**-7, "fp32": 1e-5, "fp64": 1e-13}
DTYPES: dict[str, Any] = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp64": np.float64,
}


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as made:
        yield made


def normal(*shape: int, dtype: str = "fp32") -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def close(got: np.ndarray, expected: np.ndarray, dtype: str = "fp32") -> None:
    assert got.dtype == DTYPES[dtype]
    bound = ULPS[dtype] * max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=ULPS[dtype], atol=bound)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_and_layout(client: Client, dtype: str) -> None:
    a, b = normal(33, 70, dtype=dtype), normal(70, 21, dtype=dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for left in (a, np.asfortranarray(a)):
        for right in (b, np.asfortranarray(b)):
            close(client.gemm(left, right), exact, dtype)
    close(client.gemm(a.T.copy(), b, trans_a=True), exact, dtype)
    out = np.empty((33, 21), np.float64)
    assert client.gemm(a, b, out=out) is out
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)


def test_batches_c_and_bias(client: Client) -> None:
    a, b, c, bias = normal(3, 8, 9), normal(1, 9, 5), normal(3, 8, 5), normal(8)
    made = client.gemm_result(a, b, c, bias, alpha=-0.5, beta=2.0, bias_dim="m", activation="silu")
    x = -0.5 * (a.astype(np.float64) @ b) + 2.0 * c + bias[:, None]
    close(made.array, x / (1 + np.exp(-x)))
    assert made.variant.startswith("reference-")
    assert made.reason
    assert made.compute_seconds > 0
    assert made.request_id


def test_empty_and_special(client: Client) -> None:
    assert client.gemm(normal(0, 4), normal(4, 5)).shape == (0, 5)
    np.testing.assert_array_equal(client.gemm(normal(2, 0), normal(0, 3)), np.zeros((2, 3), np.float32))
    d = client.gemm(normal(2, 2), normal(2, 2), alpha=float("nan"))
    assert np.isnan(d).all()


def test_torch(client: Client) -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(6, 7, dtype=torch.bfloat16), torch.randn(7, 8, dtype=torch.bfloat16)
    d = client.gemm(a, b.T.contiguous().T)
    assert d.dtype == torch.bfloat16
    torch.testing.assert_close(d.float(), a.float() @ b.float(), rtol=0.01, atol=0.05)


def test_kept_tensors(client: Client, tmp_path: Path) -> None:
    w = normal(40, 30)
    kept = client.put("w", w)
    assert (kept.name, kept.dtype, kept.shape, kept.durable) == ("w", "fp32", (40, 30), True)
    assert client.head("w").etag == kept.etag
    np.testing.assert_array_equal(client.get("w"), w)
    out = np.empty_like(w)
    assert client.get(kept, out=out) is out
    np.testing.assert_array_equal(out, w)
    x = normal(5, 40)
    close(client.gemm(x, kept), x.astype(np.float64) @ w)
    handle = client.gemm(x, "w", out=Handle("d"), durable=True)
    assert (handle.name, handle.shape, handle.durable) == ("d", (5, 30), True)
    close(client.get("d"), x.astype(np.float64) @ w)
    np.save(tmp_path / "v.npy", np.asfortranarray(w.astype(">f8")))
    client.put("v", tmp_path / "v.npy")
    np.testing.assert_array_equal(client.get("v"), w.astype(np.float64))
    with pytest.raises(Refused, match="412 precondition_failed"):
        client.put("w", w, replace=False)
    with pytest.raises(Refused, match="412"):
        client.put("w", w, if_match="other")
    assert client.put("w", 2 * w, if_match=kept.etag).etag != kept.etag
    assert {"w", "d", "v"} <= {one.name for one in client.tensors()}
    for name in ("w", "d", "v"):
        client.delete(name)
    with pytest.raises(NotFound):
        client.get("w")
    with pytest.raises(ValueError, match="must end in"):
        client.put("x", tmp_path / "file.txt")


def test_list_goes_over_all_pages(client: Client) -> None:
    names = [f"page-{i:03}" for i in range(120)]
    for name in names:
        client.put(name, normal(1, 1), ttl_seconds=60)
    assert [one.name for one in client.tensors() if one.name.startswith("page-")] == names
    for name in names:
        client.delete(name)


def test_job_with_dependencies(client: Client) -> None:
    a, b, c = normal(4, 5), normal(5, 6), normal(6, 3)
    first = Step("first", a, b, options={"activation": "relu"})
    second = Step("second", first, np.asfortranarray(c), bias=normal(3) * 0, out=None)
    job = client.wait(client.submit([first, second]), progress=True)
    assert (job.state, job.steps_ended) == ("done", 2)
    hidden = np.maximum(a.astype(np.float64) @ b, 0)
    close(client.result(job, first), hidden)
    out = np.empty((4, 3), np.float32)
    assert client.result(job, "second", out=out) is out
    close(out, hidden @ c)
    assert job.id in {one.id for one in client.jobs()}
    assert client.job(job.id).state == "done"


def test_job_that_fails_tells_which_step(client: Client) -> None:
    first = Step("first", normal(2, 2), normal(2, 2), options={"deadline_ms": 0})
    job = client.submit([first, Step("second", first, normal(2, 2))])
    with pytest.raises(JobFailed, match=r"first: failed .*; second: skipped") as caught:
        client.wait(job)
    assert caught.value.job.id == job.id


def test_same_key_same_job(client: Client) -> None:
    steps = [Step("s", normal(2, 2), normal(2, 2))]
    job = client.submit(steps, idempotency_key="k1")
    assert client.submit(steps, idempotency_key="k1").id == job.id
    with pytest.raises(Invalid, match="idempotency_mismatch"):
        client.submit([Step("s", normal(2, 2), normal(2, 2))], idempotency_key="k1")


def test_refusals(client: Client) -> None:
    with pytest.raises(Invalid) as caught:
        client.gemm(normal(2, 3), normal(4, 5))
    assert (caught.value.status, caught.value.field) == (422, "b")
    with pytest.raises(Invalid) as caught:
        client.gemm(normal(2, 3), normal(3, 2), variant="nonesuch")
    assert caught.value.status == 422
    with pytest.raises(DeadlinePassed):
        client.gemm(normal(2, 3), normal(3, 2), deadline_ms=0)
    huge = np.broadcast_to(np.float32(0), (1 << 13, (1 << 13) + 8))
    with pytest.raises(Invalid, match="413 too_large") as caught:
        client.gemm(huge, huge.T[:, :1])
    assert caught.value.limit == 256 << 20
    close(client.gemm(normal(2, 2) * 0, normal(2, 2)), np.zeros((2, 2)))


def test_what_the_service_is(client: Client) -> None:
    assert client.ready()
    assert client.limits()["arena_bytes"] == 256 << 20
    assert any(row["name"] == "reference-numpy" for row in client.variants()["variants"])
    assert client.choose(64, 64, 64, dtype="fp64")["variant"].startswith("reference-")
    assert "gemm_requests_total" in client.metrics()


async def test_async_client(service: Service) -> None:
    async with AsyncClient(service.url, connections=8) as client:
        w = normal(64, 32)
        await client.put("aw", w)
        xs = [normal(16, 64) for _ in range(40)]
        for x, d in zip(xs, await asyncio.gather(*(client.gemm(x, "aw") for x in xs)), strict=True):
            close(d, x.astype(np.float64) @ w)
        step = Step("s", xs[0], Handle("aw"))
        job = await client.wait(await client.submit([step]), progress=True)
        close(await client.result(job, step), xs[0].astype(np.float64) @ w)
        await client.cancel(job)
        assert job.id in {one.id for one in await client.jobs()}
        assert (await client.job(job)).state == "done"
        assert (await client.head("aw")).shape == (64, 32)
        np.testing.assert_array_equal(await client.get("aw"), w)
        assert (await client.choose(1, 1, 1))["candidates"]
        assert (await client.limits())["job_steps"] == 256
        assert (await client.variants())["variants"]
        assert "gemm_" in await client.metrics()
        assert await client.ready()
        assert "aw" in {one.name for one in await client.tensors()}
        await client.delete("aw")
