"""Arrays on a GPU: what happens to them where they can't be lent, and, on a GPU, that they are used in place."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from service.client import AsyncClient, Client, Handle, tensors
from service.client.device import OnDevice, settle
from service.client.local import result_of
from service.client.operations import Operations, Retries
from service.client.tensors import Unfit
from service.client.transport import BestTransport
from service.client.wire import Call, Head, Reply
from service.formats import Tensor
from service.model import GemmFields
from service.plan import plan
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


def test_work_on_operands_is_waited_for_once_a_gpu_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def current_stream(index: int) -> Any:
        return SimpleNamespace(query=lambda: index == 2, synchronize=lambda: waited.append(index))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    zero, one, done = (
        OnDevice(SimpleNamespace(nbytes=4, get_device=lambda index=index: index)) for index in range(3)
    )
    settle([zero, b"host", zero, one, done])
    assert sorted(waited) == [0, 1]


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tensors here stand in for a GPU's, lent by a driver that remembers nothing; the tensors of fresh host memory."""
    made: list[Any] = []
    monkeypatch.setattr(tensors, "_on_gpu", tensors.is_torch)
    monkeypatch.setattr(tensors, "empty", lambda *told: made.append(told))
    return made


def test_a_result_in_place_needs_no_memory_here_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_gpu(monkeypatch)
    a, d = torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE)
    operation = Operations(Retries()).gemm(
        a, a, None, None, out=d, options={}, deadline=time.monotonic() + 60
    )
    call = next(operation)
    assert isinstance(call, Call)
    assert isinstance(call.into, OnDevice)
    assert call.into.value is d, "the caller's own, not a view of it"
    head = Head(200, {"x-gemm-dtype": "fp32", "x-gemm-shape": f"{SIDE}x{SIDE}"})
    with pytest.raises(StopIteration) as done:
        operation.send(Reply(head, in_place=True))
    assert done.value.value.array is d
    assert not made
    for told in (
        {"x-gemm-dtype": "fp16", "x-gemm-shape": f"{SIDE}x{SIDE}"},
        {"x-gemm-dtype": "fp32", "x-gemm-shape": "1x1"},
    ):
        operation = Operations(Retries()).gemm(
            a, a, None, None, out=d, options={}, deadline=time.monotonic() + 60
        )
        next(operation)
        with pytest.raises(Unfit):
            operation.send(Reply(Head(200, told), in_place=True))


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


def test_a_library_that_does_not_name_itself_is_its_types_package(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("elder")
    package.from_dlpack = lambda value: elder(np.from_dlpack(value))  # type: ignore[attr-defined]
    elder = type("ndarray", (Other,), {"__module__": "elder.core", "dtype": np.dtype(np.float32)})
    monkeypatch.setitem(sys.modules, "elder", package)
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    with Client(service.url) as client:
        made = client.gemm(elder(a), a.T)
        assert isinstance(made, elder)
        assert np.array_equal(np.from_dlpack(made), a @ a.T)
        assert isinstance(client.gemm(Other(a), a.T), np.ndarray), "nothing is known of its library"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batches", [(), (3,), (1, 3), (3, 1), (1, 1), (0, 1), (None, 4)])
@pytest.mark.parametrize("c_batch", [None, 1, 3])
def test_what_a_query_tells_of_d_is_what_the_service_plans(
    turned: bool, batches: tuple[int | None, ...], c_batch: int | None
) -> None:
    shapes = {"a": (4, 2) if turned else (2, 4), "b": (5, 4) if turned else (4, 5)}
    for (name, shape), batch in zip(shapes.items(), batches, strict=False):
        shapes[name] = shape if batch is None else (batch, *shape)  # type: ignore[assignment]
    if c_batch is not None and c_batch in (1, *(one for one in batches if one)):
        shapes["c"] = (c_batch, 2, 5)  # type: ignore[assignment]
    fields = {"trans_a": turned, "trans_b": turned, "out_dtype": "fp64" if turned else None}
    limits: Any = type("Limits", (), {"max_output_bytes": 1 << 20, "max_flops": 1e9})
    made = plan(GemmFields(**fields), {name: Tensor("fp16", shape) for name, shape in shapes.items()}, limits)
    query = {f"{name}_shape": "x".join(map(str, shape)) for name, shape in shapes.items()}
    query |= {name: str(value).lower() for name, value in fields.items() if value is not None}
    assert result_of({**query, "dtype": "fp16"}) == (made.out.dtype, tuple(made.out.shape))
    del query["b_shape"]  # as where B is kept by the service
    assert result_of({**query, "dtype": "fp16"}) is None


@pytest.mark.parametrize("local", [True, False], ids=["lent", "http"])
@pytest.mark.parametrize("wrap", [lambda x: x, Foreign], ids=["torch", "other"])
def test_d_is_made_on_the_operands_gpu(
    service: Service, monkeypatch: pytest.MonkeyPatch, local: bool, wrap: Callable[[Any], Any]
) -> None:
    """Tensors here stand in for a GPU's: D goes into one that the client made before it asked."""
    monkeypatch.setattr(tensors, "_on_gpu", tensors.is_torch)
    monkeypatch.setattr(tensors, "_DLPACK_CUDA", 1)
    made: list[Any] = []
    right = tensors.on_gpu_like

    def noted(*arguments: Any) -> Any:
        made.append(right(*arguments))
        return made[-1]

    monkeypatch.setattr(tensors, "on_gpu_like", noted)
    a, b = (torch.randint(-4, 5, (SIDE, SIDE), dtype=torch.float32) for _ in range(2))
    with Client(service.url, local=local) as client:
        d = client.gemm(wrap(a), wrap(b))
        assert torch.equal(torch.as_tensor(np.from_dlpack(d)), a @ b)
        assert np.from_dlpack(d).__array_interface__["data"][0] == made[0].data_ptr()
        kept = client.put("gpu", wrap(b))
        assert torch.equal(torch.as_tensor(np.from_dlpack(client.gemm(wrap(a), "gpu"))), a @ b)
        assert len(made) == 1, "its size is the service's to tell"
        d = client.gemm(wrap(a), kept)
        assert torch.equal(torch.as_tensor(np.from_dlpack(d)), a @ b)
        assert np.from_dlpack(d).__array_interface__["data"][0] == made[1].data_ptr()
        for columns in (SIDE - 100, 2 * SIDE):  # another has replaced it since
            now = torch.randint(-4, 5, (SIDE, columns), dtype=torch.float32)
            client.put("gpu", now)
            d = client.gemm(wrap(a), kept)
            assert torch.equal(torch.as_tensor(np.from_dlpack(d)), a @ now)
            with pytest.raises(ValueError, match="the result is fp32 of shape"):
                client.gemm(wrap(a), kept, out=torch.zeros(SIDE, SIDE))
        given = torch.zeros(SIDE, SIDE)
        assert client.gemm(wrap(a), wrap(b), out=given) is given
        assert torch.equal(given, a @ b)
        assert client.gemm(wrap(a), wrap(b), out=Handle("kept")).name == "kept"
    assert len(made) == 4


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
        assert connection._staging is None, "nothing is copied"
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
        asyncio.run(_borrows_in_an_event_loop(one.url, w))
        kept = client.gemm(w.T.contiguous(), "w", out=Handle("d"))
        with client.borrow("d") as lent:
            torch.testing.assert_close(lent.value.float().cpu(), w.float().T @ w.float(), rtol=1e-2, atol=1.0)
        assert torch.equal(client.get("w", like=w), w)
        began = time.perf_counter()
        for _ in range(20):
            client.borrow("w").close()
        print(f"borrowing takes {(time.perf_counter() - began) / 20 * 1e6:.0f} µs; {kept}")


async def _borrows_in_an_event_loop(url: str, w: Any) -> None:
    async with AsyncClient(url) as client:
        lent = await asyncio.gather(*(client.borrow("w") for _ in range(3)))
        for one in lent:
            async with one as borrowed:
                assert torch.equal(borrowed.value.cpu(), w)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("gpu"), "--device", "cuda", "--workers", "1") as one:
        yield one.ready()


class Maker(NamedTuple):
    """A library with arrays on a GPU."""

    kind: type
    make: Callable[[np.ndarray, str], Any]
    host: Callable[[Any], np.ndarray]
    bf16: bool
    changes: bool


def of_torch() -> Maker:
    return Maker(
        torch.Tensor,
        lambda x, dtype: torch.from_numpy(x).to("cuda", getattr(torch, dtype)),
        lambda x: x.double().cpu().numpy(),
        bf16=True,
        changes=True,
    )


def of_cupy() -> Maker:
    cupy = pytest.importorskip("cupy")
    return Maker(cupy.ndarray, cupy.asarray, cupy.asnumpy, bf16=False, changes=True)


def of_jax() -> Maker:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    return Maker(
        jax.Array,
        lambda x, dtype: jax.device_put(jax.numpy.asarray(x, dtype), jax.devices("gpu")[0]),
        lambda x: np.asarray(x, np.float64),
        bf16=True,
        changes=False,
    )


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("of", [of_torch, of_cupy, of_jax])
def test_arrays_of_a_gpu_library_in_and_out(
    gpu: Service, monkeypatch: pytest.MonkeyPatch, of: Callable[[], Maker]
) -> None:
    # Read when JAX begins: else it takes most of the GPU's memory for itself.
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    library = of()
    x, y = (np.random.default_rng(n).integers(-4, 5, (1024, 1024)).astype(np.float32) for n in (1, 2))
    want = x.astype(np.float64) @ y
    with Client(gpu.url) as client:
        for dtype in ("float32", "float16", *(["bfloat16"] if library.bf16 else [])):
            a, b = library.make(x, dtype), library.make(y, dtype)
            d = client.gemm(a, b, out_dtype="fp32")
            assert isinstance(d, library.kind)
            assert int(d.__dlpack_device__()[0]) == 2  # kDLCUDA
            np.testing.assert_array_equal(library.host(d), want)
            assert str(client.gemm(a, b.T).dtype).endswith(dtype)
        connection = client._transport._near._idle[-1]  # type: ignore[attr-defined]
        print(f"{of.__name__}: {len(connection._handles)} allocations lent")

        def in_place() -> bool:
            """Operands and D were used where they are. XLA's memory may be of a kind that can't be lent."""
            return bool(connection._handles) and connection._staging is None

        assert in_place() or not library.changes
        handle = client.put("of-library", a)
        np.testing.assert_array_equal(library.host(client.gemm(handle, b, out_dtype="fp32")), want)
        assert in_place() or not library.changes
        kept = client.get("of-library", like=a)
        assert isinstance(kept, library.kind)
        np.testing.assert_array_equal(library.host(kept), x)
        out = library.make(np.full_like(x, np.nan), "float32")
        if library.changes:
            assert client.gemm(a, b, out=out) is out
            np.testing.assert_array_equal(library.host(out), want)
            # What is queued on it is waited for: operands that are being made, and a D that is being filled.
            for n in range(2, 6):
                changed = a
                for _ in range(20):
                    changed = changed * 1
                out[:] = float("nan")
                client.gemm(changed * n, b, out=out)
                np.testing.assert_array_equal(library.host(out), n * want)
        else:
            with pytest.raises(ValueError, match="writable"):
                client.gemm(a, b, out=out)
            assert np.isnan(library.host(out)).all()

    async def run() -> None:
        async with AsyncClient(gpu.url) as client:
            for d in await asyncio.gather(*(client.gemm(a, b, out_dtype="fp32") for _ in range(4))):
                assert isinstance(d, library.kind)
                np.testing.assert_array_equal(library.host(d), want)

    asyncio.run(run())


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_work_on_a_stream_of_cupys_is_waited_for(gpu: Service) -> None:
    cupy = pytest.importorskip("cupy")
    a = cupy.ones((2048, 2048), cupy.float32)
    with Client(gpu.url) as client, cupy.cuda.Stream(non_blocking=True):
        for n in range(1, 5):
            busy = a
            for _ in range(30):
                busy = busy @ a / 2048
            out = cupy.full((2048, 2048), cupy.nan, cupy.float32)
            client.gemm(busy * n, a, out=out)
            assert (out == 2048 * n).all()
