"""Arrays on a GPU: what happens to them where they can't be lent, and, on a GPU, that they are used in place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.client import AsyncClient, Client, Handle
from service.client.device import OnDevice
from service.client.transport import BestTransport
from service.client.wire import Call
from tests.service.real import Service, running

torch: Any = pytest.importorskip("torch")
SIDE = 300


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("device")) as one:
        yield one.ready()


@pytest.mark.parametrize("local", [True, False])
def test_what_cannot_be_lent_is_copied(service: Service, local: bool) -> None:
    """Host tensors stand in for a GPU's: a service on a CPU takes a copy, whichever way it comes."""
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, dtype=torch.float32)
    d = torch.zeros(SIDE, SIDE)
    query = f"a_shape={SIDE}x{SIDE}&b_shape={SIDE}x{SIDE}&dtype=fp32"
    headers = (("content-type", "application/octet-stream"), ("accept", "application/octet-stream"))
    taken = np.zeros((SIDE, SIDE), np.float32)
    call = Call(
        "POST", f"/gemm?{query}", headers, (OnDevice(a), OnDevice(b)), lambda head: taken.reshape(-1).view("u1").data,
        into=OnDevice(d),
    )  # fmt: skip
    assert call.nbytes == 2 * a.numel() * 4
    with Client(service.url, local=local) as client:
        reply = client._transport.send(call, time.monotonic() + 60)
        assert isinstance(client._transport, BestTransport) is local
    assert reply.status == 200
    assert not reply.in_place
    assert np.allclose(taken, a.numpy() @ b.numpy(), atol=1e-3)
    OnDevice(d).fill(taken)
    assert np.array_equal(d.numpy(), taken)


def test_halves_and_empty_tensors_become_bytes() -> None:
    half = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert bytes(OnDevice(half).host()) == b"\xc0\x3f\x00\xc0"
    assert OnDevice(half).nbytes == 4
    assert OnDevice(torch.zeros(0, 3)).host().nbytes == 0


class Other:
    """An array of some other library: nothing but DLPack is known of it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __dlpack__(self, **options: Any) -> Any:
        return self._value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._value.__dlpack_device__()
        return device


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_dlpack_in_and_out(service: Service, make: Any) -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = np.ones((4, 2), np.float32)
    d = np.zeros((3, 2), np.float32)
    with Client(service.url) as client:
        made = client.gemm(Other(make(a)), Other(make(b)), c=Other(make(np.full((3, 2), 2, np.float32))))
        out = Other(make(d))
        assert client.gemm(Other(make(a)), b, out=out) is out
        client.put("dlpack", Other(make(b)))
        assert np.array_equal(client.get("dlpack"), b)
    assert np.array_equal(made, a @ b + 2)
    assert np.array_equal(d, a @ b)
    assert np.array_equal(torch.from_dlpack(made).numpy(), made)


class Library:
    """What an array says is its library; it takes fp32 only."""

    def from_dlpack(self, value: Any) -> Any:
        if value.itemsize != 4:
            raise BufferError("no such elements here")
        return Foreign(np.from_dlpack(value))

    def asarray(self, value: Any) -> Any:
        return Foreign(np.asarray(value, np.float32))


class Foreign(Other):
    """An array of a library that follows the array API standard."""

    def __array_namespace__(self) -> Library:
        return Library()

    @property
    def dtype(self) -> Any:
        return self._value.dtype


def test_results_are_of_the_operands_library_where_it_can_hold_them(service: Service) -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Client(service.url) as client:
        made = client.gemm(a, Foreign(a.T))
        wide = client.gemm(Foreign(a), a.T, out_dtype="fp64")
    assert isinstance(made, Foreign)
    assert np.array_equal(made._value, a @ a.T)
    assert isinstance(wide, np.ndarray), "nothing is lost"
    assert wide.dtype == np.float64
    assert np.array_equal(wide, a @ a.T)


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return pytest.importorskip("jax")


@pytest.mark.ci
@pytest.mark.parametrize("local", [True, False], ids=["lent", "http"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_arrays_in_and_out(service: Service, jax: Any, local: bool, dtype: str) -> None:
    side = 400  # enough for the client to look for shared memory
    a, b = (jax.numpy.asarray(np.random.default_rng(n).integers(-4, 5, (side, side)), dtype) for n in (1, 2))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    with Client(service.url, local=local) as client:
        d = client.gemm(a, b, out_dtype="fp32")
        assert isinstance(d, jax.Array)
        assert np.array_equal(np.asarray(d), want)
        assert client.gemm(a, b.T).dtype == a.dtype
        given = np.zeros((side, side), np.float32)
        assert client.gemm(a, b, out=given) is given
        assert np.array_equal(given, want)
        client.put("jax", b)
        kept = client.get("jax", like=a)
        assert isinstance(kept, jax.Array)
        assert np.array_equal(np.asarray(kept), np.asarray(b))
        # JAX would make fp32 of it.
        assert client.gemm(a, b, out_dtype="fp64").dtype == np.float64
        with pytest.raises(ValueError, match="writable"):
            client.gemm(a, b, out=d)  # JAX arrays don't change


@pytest.mark.ci
async def test_jax_arrays_in_an_event_loop(service: Service, jax: Any) -> None:
    a = jax.numpy.arange(12, dtype="float32").reshape(3, 4)
    async with AsyncClient(service.url) as client:
        d = await client.gemm(a, a.T)
    assert isinstance(d, jax.Array)
    assert np.array_equal(np.asarray(d), np.asarray(a) @ np.asarray(a).T)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_operands_and_d_stay_on_the_gpu(tmp_path: Path) -> None:
    """Two processes: this one's tensors, opened by the service's worker through their IPC handles."""
    with running(tmp_path, "--device", "cuda") as one, Client(one.ready().url) as client:
        a = torch.randn(1024, 2048, device="cuda").half()
        b = torch.randn(2048, 512, device="cuda").half()
        d = torch.full((1024, 512), float("nan"), device="cuda", dtype=torch.float16)
        want = a.double() @ b.double()
        for _ in range(3):
            d.fill_(float("nan"))
            assert client.gemm(a, b, out=d) is d
            torch.testing.assert_close(d.double(), want, rtol=1e-2, atol=0.5)
        # What this process writes is what the service reads: there is no copy in between.
        a *= 2
        client.gemm(a, b, out=d)
        torch.testing.assert_close(d.double(), 2 * want, rtol=1e-2, atol=1.0)
        connection = client._transport._near._idle[-1]  # type: ignore[attr-defined]
        assert connection._handles
        assert connection._staging.nbytes <= 1 << 20
        assert one.metric("gemm_local_bytes") > 0
        turned = client.gemm(a, torch.randn(512, 2048, device="cuda").half().T)
        assert turned.is_cuda
        seconds = []
        for _ in range(200):
            began = time.perf_counter()
            client.gemm(a, b, out=d)
            seconds.append(time.perf_counter() - began)
        print(f"a product by IPC takes {np.median(seconds) * 1e6:.0f} µs")
    # The worker has gone with its mappings; the memory is this process's as before.
    assert torch.isfinite(d).all()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_stored_tensors_are_borrowed_on_the_gpu(tmp_path: Path) -> None:
    """Two processes: the worker's copies, opened by this one through their IPC handles."""
    with running(tmp_path, "--device", "cuda", "--workers", "1") as one, Client(one.ready().url) as client:
        w = torch.randn(700, 300).half()
        client.put("w", w)
        with client.borrow("w") as lent:
            assert lent.value.is_cuda
            assert torch.equal(lent.value.cpu(), w)
            x = torch.randn(20, 700, device="cuda").half()
            torch.testing.assert_close(
                (x @ lent.value).cpu(), (x.cpu().float() @ w.float()).half(), rtol=1e-2, atol=0.3
            )
            lent.value.zero_()  # harms nobody else
            with client.borrow("w") as other:
                assert torch.equal(other.value.cpu(), w)
        kept = client.gemm(w.T.contiguous(), "w", out=Handle("d"))
        with client.borrow("d") as lent:
            torch.testing.assert_close(lent.value.float().cpu(), w.float().T @ w.float(), rtol=1e-2, atol=1.0)
        assert torch.equal(client.get("w", like=w), w)
        began = time.perf_counter()
        for _ in range(20):
            client.borrow("w").close()
        print(f"borrowing takes {(time.perf_counter() - began) / 20 * 1e6:.0f} µs; {kept}")
