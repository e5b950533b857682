"""Shared memory through unmodified tritonclient, and what a client must not be able to do with it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from service import keys
from service.arena import Arena, Slots
from service.decode import Bound
from service.errors import ServiceError
from service.inference.regions import Regions, to_end
from service.inference.request import Place
from service.inference.system_memory import SystemMemory, allowed
from service.keys import Principal
from service.messages import Operand
from tests.service.real import Service, running

RUN = f"gemmtest-{secrets.token_hex(6)}"
FLAGS = ("--shared-memory", "--shared-memory-keys", f"{RUN}-*", "--log-level", "warning")
RNG = np.random.default_rng(9)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("shared"), *FLAGS) as service:
        yield service.ready()


@pytest.fixture
def client(shared: Service) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(shared.url.removeprefix("http://"))
    yield made
    made.unregister_system_shared_memory()
    made.close()


@contextlib.contextmanager
def region(name: str, nbytes: int) -> Iterator[Any]:
    made = shm.create_shared_memory_region(name, f"/{RUN}-{name}", nbytes)
    try:
        yield made
    finally:
        shm.destroy_shared_memory_region(made)


def placed(name: str, x: np.ndarray, where: str, offset: int = 0) -> triton.InferInput:
    made = triton.InferInput(name, list(x.shape), "FP32")
    return made.set_shared_memory(where, x.nbytes, offset=offset)


def output(where: str, nbytes: int, offset: int = 0) -> list[triton.InferRequestedOutput]:
    made = triton.InferRequestedOutput("D")
    made.set_shared_memory(where, nbytes, offset=offset)
    return [made]


def refused(call: Callable[[], Any], status: int, *words: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call()
    assert caught.value.status() == str(status), caught.value
    for word in words:
        assert word in caught.value.message()
    assert "/dev/shm" not in caught.value.message()


@pytest.mark.parametrize("n", [3, 700])
def test_inputs_and_output_in_shared_memory(
    client: triton.InferenceServerClient, shared: Service, n: int
) -> None:
    a, b = RNG.normal(size=(n, n)).astype(np.float32), RNG.normal(size=(n, n)).astype(np.float32)
    with region("in", 2 * a.nbytes) as operands, region("out", a.nbytes + 64) as results:
        shm.set_shared_memory_region(operands, [a, b])
        client.register_system_shared_memory("in", f"/{RUN}-in", 2 * a.nbytes)
        client.register_system_shared_memory("out", f"{RUN}-out", a.nbytes, offset=64)
        told = client.get_system_shared_memory_status()
        assert sorted(told, key=lambda one: one["name"]) == [
            {"name": "in", "key": f"/{RUN}-in", "offset": 0, "byte_size": 2 * a.nbytes},
            {"name": "out", "key": f"{RUN}-out", "offset": 64, "byte_size": a.nbytes},
        ]
        assert client.get_system_shared_memory_status("in")[0]["name"] == "in"
        inputs = [placed("A", a, "in"), placed("B", b, "in", a.nbytes)]
        result = client.infer("gemm_fp32", inputs, outputs=output("out", a.nbytes))
        # No parameters either: C++ clients take them for those of bytes that follow.
        assert result.get_output("D") == {"name": "D", "datatype": "FP32", "shape": [n, n]}
        d = shm.get_contents_as_numpy(results, np.float32, [n * n + 16])[16:].reshape(n, n)
        np.testing.assert_allclose(d, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-3)
        plain = client.infer("gemm_fp32", inputs).as_numpy("D")
        np.testing.assert_array_equal(plain, d)
        client.unregister_system_shared_memory("in")
        refused(lambda: client.infer("gemm_fp32", inputs), 400, "'in'")
        refused(lambda: client.get_system_shared_memory_status("in"), 404)
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    assert shared.metric("gemm_arena_bytes", state="request") == 0
    assert shared.metric("gemm_arena_bytes", state="reply") == 0


def test_registrations_that_are_refused(client: triton.InferenceServerClient, tmp_path: Path) -> None:
    register = client.register_system_shared_memory
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    link, pipe = Path(f"/dev/shm/{RUN}-link"), Path(f"/dev/shm/{RUN}-pipe")
    foreign = Path(f"/dev/shm/other-{RUN}")
    foreign.write_bytes(bytes(64))
    link.symlink_to(secret)
    os.mkfifo(pipe)
    try:
        with region("r", 4096):
            for key in (
                *(f"{RUN}-link", f"{RUN}-pipe", f"{RUN}-none", foreign.name, "", "/", ".."),
                *(f"{RUN}-x/../../etc/passwd", f"//{RUN}-r", f"{RUN}-r\0", f"../shm/{RUN}-r"),
            ):
                refused(lambda key=key: register("r", key, 64), 400, "key")
            good = f"{RUN}-r"
            for name in ("-r", ".r", "r r", "a" * 129, "r\n", "ä"):
                refused(lambda name=name: register(name, good, 64), 400, "name")
            refused(lambda: register("a/b", good, 64), 404)
            for offset, nbytes in ((0, 4097), (4096, 1), (4097, 0), (0, 0), (1 << 62, 1 << 62), (1 << 63, 1)):
                refused(lambda o=offset, n=nbytes: register("r", good, n, offset=o), 400)
            refused(lambda: register("r", good, -1), 400)
            register("r", good, 4096)
            refused(lambda: register("r", good, 4096), 400, "already")
    finally:
        link.unlink()
        pipe.unlink()
        foreign.unlink()


def test_places_outside_a_region_and_truncation(
    client: triton.InferenceServerClient, shared: Service
) -> None:
    a = np.ones((8, 8), np.float32)
    with region("t", 512) as made:
        client.register_system_shared_memory("t", f"{RUN}-t", 512)
        shm.set_shared_memory_region(made, [a, a])
        good = [placed("A", a, "t"), placed("B", a, "t", 256)]
        for offset in (257, 512, 513, 1 << 40, (1 << 63) - 1):
            refused(lambda o=offset: client.infer("gemm_fp32", [good[0], placed("B", a, "t", o)]), 400, "end")
            refused(lambda o=offset: client.infer("gemm_fp32", good, outputs=output("t", 256, o)), 400, "end")
        refused(lambda: client.infer("gemm_fp32", good, outputs=output("t", 255)), 400, "255")
        wrong = triton.InferInput("B", [8, 8], "FP32").set_shared_memory("t", 255, offset=256)
        refused(lambda: client.infer("gemm_fp32", [good[0], wrong]), 400, "255")
        refused(lambda: client.infer("gemm_fp32", [good[0], placed("B", a, "none")]), 400, "none")
        os.truncate(f"/dev/shm/{RUN}-t", 100)
        refused(lambda: client.infer("gemm_fp32", good), 400, "smaller")
        sent = [triton.InferInput(n, [8, 8], "FP32").set_data_from_numpy(a) for n in "AB"]
        refused(lambda: client.infer("gemm_fp32", sent, outputs=output("t", 256)), 400, "smaller")
        assert os.stat(f"/dev/shm/{RUN}-t").st_size == 100
        np.testing.assert_array_equal(client.infer("gemm_fp32", sent).as_numpy("D"), a @ a)
        os.truncate(f"/dev/shm/{RUN}-t", 512)  # so that the client's own library can unmap it
    assert shared.metric("gemm_arena_bytes", state="request") == 0
    assert shared.metric("gemm_arena_bytes", state="reply") == 0


def test_cuda_registrations_on_a_cpu(client: triton.InferenceServerClient) -> None:
    register = client.register_cuda_shared_memory
    for raw in (b"", b"short", base64.b64encode(bytes(63)), base64.b64encode(bytes(65)), b"*" * 88):
        refused(lambda raw=raw: register("c", raw.decode(), 0, 64), 400, "raw_handle")
    handle = base64.b64encode(bytes(64)).decode()
    refused(lambda: register("c", handle, 0, 0), 400, "byte_size")
    refused(lambda: register("c", handle, -1, 64), 400, "device_id")
    refused(lambda: register("c", handle, 0, 64), 501, "CPU")
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory("c")
    client.unregister_cuda_shared_memory()


def test_off_unless_turned_on(service: Service) -> None:
    with triton.InferenceServerClient(service.url.removeprefix("http://")) as plain:
        assert "system_shared_memory" not in plain.get_server_metadata()["extensions"]
        refused(lambda: plain.register_system_shared_memory("r", f"{RUN}-r", 64), 501, "shared_memory")
        assert plain.get_system_shared_memory_status() == []
        plain.unregister_system_shared_memory()


def test_regions_belong_to_an_owner_and_end_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    ann = keys.add(path, "ann", scopes=["gemm", "admin"])
    bob, eve = (keys.add(path, owner, scopes=[s])[1] for owner, s in (("bob", "admin"), ("eve", "gemm")))
    with running(tmp_path / "data", *FLAGS, "--keys-file", str(path)) as service, region("k", 64):
        document = {"key": f"{RUN}-k", "offset": 0, "byte_size": 64}

        def call(token: str, method: str, path: str, json: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {token}"}
            return service.http.request(method, f"/v2/systemsharedmemory{path}", json=json, headers=headers)

        assert call(eve, "POST", "/region/k/register", document).status_code == 403
        assert call("none", "GET", "/status").status_code == 401
        assert call(ann[1], "POST", "/region/k/register", document).status_code == 200
        assert call(bob, "GET", "/status").json() == []
        assert call(bob, "POST", "/region/k/register", document).status_code == 200
        assert call(bob, "POST", "/unregister").status_code == 200
        assert [one["name"] for one in call(ann[1], "GET", "/status").json()] == ["k"]
        opened = Path(f"/proc/{service.process.pid}/fd")

        def held() -> int:
            return sum(RUN in os.readlink(one) for one in opened.iterdir() if os.path.lexists(one))

        assert held() == 1
        keys.revoke(path, ann[0].id)
        service.until(lambda: held() == 0, 60, "the lease of a revoked key to end")


# -- without a service --------------------------------------------------------------------------------------------


def test_the_allow_list() -> None:
    assert allowed("a", ("a",))
    assert allowed("ab", ("x", "a*"))
    assert not allowed("ab", ("a",))
    assert not allowed("ab", ())
    assert not allowed("ab", ("b*",))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def opened(folder: Path, name: str, nbytes: int) -> SystemMemory:
    (folder / name).write_bytes(bytes(range(nbytes)))
    return await SystemMemory.open(name, 0, nbytes, ("*",), str(folder))


async def test_leases_uses_and_ends(tmp_path: Path) -> None:
    clock, revoked = Clock(), set()
    regions = Regions(10.0, lambda key: key not in revoked, clock=clock)
    ann, bob = Principal("ann", key_id="1"), Principal("bob", key_id="2")
    for principal in (ann, bob):
        await regions.register(principal, "r", lambda: opened(tmp_path, "r", 32))
    place = Place("r", 8, 8)
    clock.now = 9
    with regions.use("ann", place):
        pass
    clock.now = 15  # ann's was used at 9; bob's never
    with regions.use("ann", place), pytest.raises(ServiceError, match="no shared memory region"):
        regions.use("bob", place).__enter__()
    assert regions.status("bob", "system") == []
    with regions.use("ann", place):
        ending = asyncio.ensure_future(regions.unregister("ann", "system", "r"))
        await asyncio.sleep(0.05)
        assert not ending.done()  # it waits for this use
        with pytest.raises(ServiceError):
            regions.use("ann", place).__enter__()
    await ending
    await regions.register(ann, "r", lambda: opened(tmp_path, "r", 32))
    revoked.add("1")
    assert regions.status("ann", "system") == []
    await regions.register(bob, "other", lambda: opened(tmp_path, "r", 32))  # sweeps
    assert len(regions._regions) == 1
    await regions.close()
    assert not regions._regions


async def test_a_busy_region_refuses_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.inference.regions._PATIENCE", 0.05)
    regions = Regions(10.0, lambda key: True)
    await regions.register(Principal("ann"), "r", lambda: opened(tmp_path, "r", 32))
    with regions.use("ann", Place("r", 0, 1)), pytest.raises(ServiceError, match="in use"):
        await regions.unregister("ann", "system")
    with regions.use("ann", Place("r", 0, 1)):
        pass
    await regions.unregister("ann", "system")
    await regions.close()


async def test_cancelled_copies_are_waited_for(tmp_path: Path) -> None:
    """A slot must not be freed while a thread still fills it."""
    import threading

    begun, go, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go.wait(5)
        ended.append(True)

    task = asyncio.ensure_future(to_end(work))
    await asyncio.to_thread(begun.wait, 5)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_system_memory_moves_only_its_own_bytes(tmp_path: Path) -> None:
    arena = Arena.create(1 << 16)
    slots = Slots(arena)
    slot = slots.allocate(8)
    memory = await SystemMemory.open("r", 4, 16, ("r",), str(_file(tmp_path, 64)))
    bound = Bound(Operand(slot.offset, 8, "fp64", (1,)), slot, slot.release)
    await memory.read(2, bound)
    assert bytes(bound.view()) == bytes(range(6, 14))
    bound.view()[:] = b"\xff" * 8
    await memory.write(8, bound)
    content = (tmp_path / "r").read_bytes()
    assert content == bytes(range(12)) + b"\xff" * 8 + bytes(range(20, 64))
    await memory.close()
    bound.release()
    arena.close()


def _file(folder: Path, nbytes: int) -> Path:
    (folder / "r").write_bytes(bytes(range(nbytes)))
    return folder
