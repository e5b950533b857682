"""Products that stay on a device: where they are, how they come to the arena, how they end with a worker."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from service.errors import ServiceError
from service.kept import Kept
from service.messages import ON_DEVICE, Item, Operand, Params
from tests.service import cuda_stand_in
from tests.service.real import PATIENT, Service, result, running
from tests.service.storing import MIB, Settings, open_store

torch = pytest.importorskip("torch")
random = np.random.default_rng(5)
CUDA = ("--device", "cuda", "--workers", "1")


def operand(tensor: str, nbytes: int = 64) -> Operand:
    return Operand(0, nbytes, "fp32", (4, nbytes // 16), tensor)


class Owner:
    """Holds what it is told to have."""

    def __init__(self, *tensors: str) -> None:
        self.has = set(tensors)
        self.held: list[str] = []
        self.lost: list[str] = []

    def hold_copy(self, tensor: str):
        if tensor not in self.has:
            return None
        self.held.append(tensor)
        return lambda: self.held.remove(tensor)

    def lose_copy(self, tensor: str) -> None:
        self.lost.append(tensor)


class Devices:
    """Workers that write when `go` is set, or are dead."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, str]] = []
        self.go = asyncio.Event()
        self.dead = False

    async def fetch(self, worker: int, operand: Operand) -> None:
        self.fetched.append((worker, operand.tensor))
        await self.go.wait()
        if self.dead:
            raise ServiceError("no_worker", "it ended")


async def test_a_copy_is_brought_once_for_all_who_ask_and_its_place_is_held_meanwhile() -> None:
    devices, owner = Devices(), Owner("o/d@1")
    kept = Kept(devices.fetch)
    kept.owner = owner
    kept.note(1, operand("o/d@1"))
    asked = [asyncio.ensure_future(kept.bring("o/d@1")) for _ in range(3)]
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.sleep(0)
    assert owner.held == ["o/d@1"]
    assert kept.homes([operand("o/d@1")]) == {1}
    devices.go.set()
    await asyncio.gather(*asked[1:])
    assert (devices.fetched, owner.held, kept.nbytes) == ([(1, "o/d@1")], [], 0)
    assert not kept.homes([operand("o/d@1")])
    await kept.bring("o/d@1")
    assert len(devices.fetched) == 1


async def test_what_went_down_with_its_worker_is_lost_until_it_is_forgotten() -> None:
    owner = Owner("o/d@1", "o/e@2")
    kept = Kept(Devices().fetch)
    kept.owner = owner
    kept.note(0, operand("o/d@1"))
    kept.note(1, operand("o/e@2"))
    kept.ended(0)
    assert owner.lost == ["o/d@1"]
    with pytest.raises(ServiceError, match="'d' was lost") as caught:
        await kept.bring("o/d@1")
    assert caught.value.status == 410
    assert kept.refusal([operand("o/e@2"), operand("o/d@1")]) is not None
    assert kept.refusal([operand("o/e@2")]) is None
    kept.forget(["o/d@1"])
    assert kept.refusal([operand("o/d@1")]) is None


async def test_a_worker_that_ends_while_it_is_asked_tells_who_waits() -> None:
    devices = Devices()
    kept = Kept(devices.fetch)
    kept.owner = Owner("o/d@1")
    kept.note(0, operand("o/d@1"))
    asked = asyncio.ensure_future(kept.bring("o/d@1"))
    await asyncio.sleep(0)
    devices.dead = True
    kept.ended(0)
    devices.go.set()
    with pytest.raises(ServiceError, match="lost"):
        await asked
    assert kept.owner.lost == ["o/d@1"]


async def test_operands_on_several_devices_are_gathered_where_most_bytes_are() -> None:
    devices = Devices()
    devices.go.set()
    kept = Kept(devices.fetch)
    kept.owner = Owner("o/a@1", "o/b@2", "o/c@3")
    operands = [operand("o/a@1", 640), operand("o/b@2"), operand("o/c@3"), operand("")]
    for worker, one in enumerate(operands[:3]):
        kept.note(worker, one)
    await kept.gather(operands)
    assert kept.homes(operands) == {0}
    assert devices.fetched == [(1, "o/b@2"), (2, "o/c@3")]


def test_an_item_says_which_operands_only_the_device_has() -> None:
    kept = Kept(Devices().fetch)
    kept.note(0, operand("o/a@1"))
    item = Item(1, operand("o/a@1"), operand("o/b@2"), operand("o/d@3"), Params("fp32"))
    placed = kept.placed(item)
    assert (placed.a.region, placed.b.region, placed.out.region) == (ON_DEVICE, 0, 0)


async def test_the_store_reads_and_writes_only_what_was_brought(tmp_path: Path) -> None:
    data = random.standard_normal((4, 4)).astype(np.float32)
    kept = Kept()
    async with open_store(Settings(tmp_path), kept=kept) as store:
        slots = store.contents.memory.slots

        async def fetch(worker: int, operand: Operand) -> None:
            slots.arena.view(operand.offset, operand.nbytes)[:] = data.tobytes()

        kept._fetch = fetch
        slot = slots.allocate(64, state="reply")
        slot.view(64)[:] = bytes(64)
        kept.note(0, Operand(slot.offset, 64, "fp32", (4, 4), "ann/d@1"))
        entry = await store.put("ann", "d", slot, 64, "fp32", (4, 4), durable=False, id_="1")
        slot.release()
        assert not entry.durable
        with await store.pin("ann", "d") as pin:  # for a product: it stays where it is
            assert pin.operand.tensor == "ann/d@1"
            assert kept.away("ann/d@1")
        hold = await store.hold("ann", "d")
        assert bytes(await store.contents.read(hold, 0, 64)) == data.tobytes()
        hold.release()
        assert not kept.away("ann/d@1")
    async with open_store(Settings(tmp_path)) as store:
        with await store.pin("ann", "d") as pin:
            assert bytes(pin.view()) == data.tobytes()


async def test_a_result_that_is_lost_answers_410_and_gives_its_room_back(tmp_path: Path) -> None:
    kept = Kept(Devices().fetch)
    async with open_store(Settings(tmp_path), kept=kept) as store:
        slots = store.contents.memory.slots
        for late in (False, True):  # the worker ends after, and before D is the store's
            slot = slots.allocate(MIB, state="reply")
            kept.note(0, Operand(slot.offset, MIB, "fp32", (512, 512), f"ann/d@{late}"))
            if late:
                kept.ended(0)
            await store.put("ann", "d", slot, MIB, "fp32", (512, 512), durable=False, id_=str(late))
            slot.release()
            if not late:
                kept.ended(0)
            with pytest.raises(ServiceError) as caught:
                await store.pin("ann", "d")
            assert caught.value.status == 410
            assert store.reclaim(8 * MIB) == MIB


# -- with a worker whose device is a stand-in ---------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": cuda_stand_in.folder(tmp_path), "GEMM_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def service(tmp_path: Path, environ: dict[str, str]) -> Iterator[Service]:
    with running(tmp_path / "data", *CUDA, *PATIENT, environ=environ) as one:
        yield one.ready()


def keep(service: Service, a: np.ndarray, b: np.ndarray | str, name: str, **query: object) -> None:
    answer = service.gemm(a, b, out=f"handle:{name}", **query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["out"]["durable"] is bool(query.get("durable", False))


def read(service: Service, name: str) -> np.ndarray:
    return result(service.http.get(f"/tensors/{name}", headers={"accept": "application/octet-stream"}))


def matrix(*shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def near(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_kept_result_is_read_used_and_written_back(service: Service) -> None:
    a, b = matrix(20, 30), matrix(30, 40)
    keep(service, a, b, "d")
    assert service.metric("gemm_device_only_bytes") == 20 * 40 * 4
    keep(service, matrix(1, 1), matrix(1, 1), "other")
    near(result(service.gemm(matrix(3, 20) * 0 + 1, "d")), np.ones((3, 20), np.float32) @ a @ b)
    near(read(service, "d"), a @ b)
    service.until(lambda: service.metric("gemm_device_only_bytes") == 0, 60, "write-back")
    service.until(lambda: service.http.get("/tensors").json()["tensors"][0]["durable"], 60, "durable")
    service.worker().kill()
    near(read(service, "d"), a @ b)


@pytest.mark.ci
def test_what_is_replaced_is_never_copied_and_takes_no_room(service: Service) -> None:
    a, b = matrix(100, 10), matrix(10, 100)
    for _ in range(60):  # 40 KB each, 512 KB may be on the device alone
        keep(service, a, b, "d")
    assert service.metric("gemm_device_only_bytes") == 40_000
    assert service.http.delete("/tensors/d").status_code == 204
    assert service.metric("gemm_device_only_bytes") == 0
    assert service.metric("gemm_arena_bytes", state="tensor") == 0


@pytest.mark.ci
def test_what_the_device_has_no_room_for_goes_to_the_arena(service: Service) -> None:
    a, b = matrix(400, 10), matrix(10, 400)
    keep(service, a, b, "d")
    assert service.metric("gemm_device_only_bytes") == 0
    near(read(service, "d"), a @ b)


@pytest.mark.ci
def test_rows_of_a_stack_stay_each_by_itself(service: Service) -> None:
    b = matrix(30, 40)
    service.put("b", b).raise_for_status()
    many = {f"d{n}": matrix(4 + n, 30) for n in range(16)}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        with service.standing():  # so that the queue grows
            asked = [pool.submit(keep, service, a, "b", name) for name, a in many.items()]
            service.admitted(16)
        for one in asked:
            one.result()
    assert service.metric("gemm_batch_requests_sum") > service.metric("gemm_batch_requests_count")
    assert service.metric("gemm_device_only_bytes") == sum(len(a) * 40 * 4 for a in many.values())
    product = result(service.gemm(matrix(2, 4) * 0 + 1, "d0"))
    near(product, np.ones((2, 4), np.float32) @ many["d0"] @ b)
    for name, a in many.items():
        near(read(service, name), a @ b)


@pytest.mark.ci
def test_sigterm_writes_what_only_the_device_has(tmp_path: Path, environ: dict[str, str]) -> None:
    a, b = matrix(20, 30), matrix(30, 40)
    with running(tmp_path / "data", *CUDA, environ=environ) as one:
        keep(one.ready(), a, b, "d")
        assert one.stop() == 0
    with running(tmp_path / "data", *CUDA, environ=environ) as one:
        near(read(one, "d"), a @ b)


def test_what_dies_with_its_worker_is_410_and_may_be_made_again(service: Service) -> None:
    a, b = matrix(20, 30), matrix(30, 40)
    keep(service, a, b, "d")
    os.kill(service.worker().pid, signal.SIGKILL)
    service.until(lambda: service.http.get("/tensors/d").status_code == 410, what="410")
    assert service.gemm(matrix(3, 20), "d").status_code == 410
    assert service.http.head("/tensors/d").status_code == 410
    service.ready()
    keep(service, a, b, "d")
    near(read(service, "d"), a @ b)


@pytest.mark.ci
def test_results_on_two_devices_meet(tmp_path: Path, environ: dict[str, str]) -> None:
    with running(tmp_path / "data", "--device", "cuda", "--workers", "2", environ=environ) as one:
        one.until(lambda: one.metric("gemm_workers_ready") == 2, what="two workers")
        a, b, c = matrix(200, 3000), matrix(3000, 200), matrix(3000, 200)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for _ in range(10):  # two at a time, so that each device makes one
                list(pool.map(lambda made: keep(one, a, *made), [(b, "d"), (c, "e")]))
                keep(one, np.eye(200, dtype=np.float32), "e", "f")
                answer = one.http.post("/gemm", json={"a": {"handle": "d"}, "b": {"handle": "e"}})
                np.testing.assert_allclose(answer.json()["d"], (a @ b) @ (a @ c), rtol=1e-2, atol=2)
                np.testing.assert_allclose(read(one, "f"), a @ c, rtol=1e-2, atol=1e-2)
        assert all(one.metric("gemm_placements_total", worker=str(worker)) for worker in (0, 1))


@pytest.mark.ci
def test_a_batch_that_hangs_condemns_its_variant_and_is_answered_by_the_reference(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    times = ("--hang-seconds", "3", "--ping-seconds", "0.2")
    with running(tmp_path / "data", *CUDA, *times, environ=environ) as service:
        hang(service.ready())


def hang(service: Service) -> None:
    a, b = matrix(20, 30), matrix(30, 40)
    assert service.gemm(a, b).headers["x-gemm-variant"] == cuda_stand_in.OWN
    answer = service.gemm(a, b, alpha=cuda_stand_in.HANGS)
    near(result(answer), cuda_stand_in.HANGS * (a @ b))
    assert answer.headers["x-gemm-variant"] == "reference-cublas"
    after = service.gemm(a, b)
    assert after.headers["x-gemm-variant"] == "reference-cublas"
    variants = {each["name"]: each for each in service.http.get("/variants").json()["variants"]}
    assert variants[cuda_stand_in.OWN]["state"] == "barred"
    assert service.metric("gemm_variant_quarantined", variant=cuda_stand_in.OWN, reason="hang") == 1
    assert service.metric("gemm_worker_restarts_total", reason="hang") == 1
