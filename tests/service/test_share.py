"""Shares of owners: a tensor that takes another's place counts by the difference, and nothing adds up to more."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import ServiceError
from service.store import Conditions, Hold, LocalStore, TensorStore, index
from service.store.share import Stock
from tests.service.storing import Clock, Settings, get, open_store, put, tensor

#: Bytes of the tensor `W` with its file's header, and what is enough for one of them.
W = tensor(32, 32)
SHARE = 4400


def refused(code: str) -> pytest.RaisesExc[ServiceError]:
    return pytest.RaisesExc(ServiceError, check=lambda error: error.code == code)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    async with open_store(Settings(tmp_path)) as store:
        yield store


class Gate:
    """Lets files be written, or not, or fail."""

    def __init__(self, store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.error = asyncio.Event(), None
        write = store.files.write

        async def gated(*args: Any) -> None:
            await self.open.wait()
            if self.error is not None:
                raise self.error
            await write(*args)

        monkeypatch.setattr(store.files, "write", gated)


async def begun(*work: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have come as far as they get."""
    tasks = [asyncio.ensure_future(one) for one in work]
    for _ in range(20):
        await asyncio.sleep(0)
    return tasks


@contextlib.asynccontextmanager
async def holding(store: TensorStore, owner: str, name: str) -> AsyncIterator[Hold]:
    """Somebody reads it."""
    hold = await store.hold(owner, name)
    try:
        yield hold
    finally:
        hold.release()


def used(store: LocalStore, owner: str = "ann") -> int:
    return store.contents.bytes_by_owner.get(owner, 0)


def at_rest(store: LocalStore) -> bool:
    """Nothing is on its way, and what is kept is what files hold."""
    on_disk = sum(path.stat().st_size for path in store.folder.tensors.iterdir())
    return not store.contents.arrivals and sum(store.contents.bytes_by_owner.values()) == on_disk


class TestStock:
    def test_a_new_name_adds_its_bytes(self) -> None:
        assert Stock(60).admit(40, 100) == 100
        with refused("quota"):
            Stock(61).admit(40, 100)
        with refused("too_large"):
            Stock(0).admit(101, 100)

    def test_another_version_adds_what_it_is_larger_by(self) -> None:
        full = Stock(100, {"w": {"old": 40}})
        for nbytes in (0, 39, 40):
            full.admit(nbytes, 100, name="w")
        with refused("quota"):
            full.admit(41, 100, name="w")
        with refused("quota"):
            full.admit(1, 100, name="v")
        Stock(99, {"w": {"old": 40}}).admit(41, 100, name="w")

    def test_of_versions_on_their_way_the_largest_stays(self) -> None:
        stock = Stock(100, {"w": {"old": 10, "new": 40, "newer": 20}, "v": {"first": 30}})
        assert stock.staying == 70
        stock.admit(30, 100)
        with refused("quota"):
            stock.admit(31, 100)
        stock.admit(70, 100, name="w")
        with refused("quota"):
            stock.admit(71, 100, name="w")

    def test_who_keeps_too_much_may_still_make_it_less(self) -> None:
        stock = Stock(200, {"w": {"old": 40}})
        assert stock.admit(40, 100, name="w") == 200
        with refused("quota"):
            stock.admit(41, 100, name="w")

    def test_headers_dont_add_up(self) -> None:
        """Versions each a header larger than the one before would else never count."""
        with refused("quota"):
            Stock(100, {"w": {"old": 100}}).admit(90, 100, name="w", size=101)


class TestLocal:
    async def test_a_full_share_takes_another_version_of_the_same_size(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        for seed in range(3):
            await put(store, "ann", "w", tensor(32, 32, seed), share=SHARE)
        with refused("quota"):
            await put(store, "ann", "v", W, share=SHARE)
        with refused("quota"):
            await put(store, "ann", "w", tensor(32, 34), share=SHARE)
        await put(store, "ann", "w", tensor(16, 16), share=SHARE)
        await put(store, "ann", "v", tensor(16, 16), share=SHARE)
        await store.effects.settle()
        assert at_rest(store)

    async def test_another_owners_tensor_makes_no_room(self, store: LocalStore) -> None:
        await put(store, "bob", "w", W)
        await put(store, "ann", "v", W)
        with refused("quota"):
            await put(store, "ann", "w", W, share=SHARE)

    async def test_several_versions_at_once_end_as_one(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        gate = Gate(store, monkeypatch)
        tasks = await begun(*(put(store, "ann", "w", tensor(32, 32, n), share=SHARE) for n in range(5)))
        with refused("quota"):
            await put(store, "ann", "v", tensor(16, 16), share=SHARE)
        with refused("quota"):
            await put(store, "ann", "w", tensor(32, 34), share=SHARE)
        gate.open.set()
        await asyncio.gather(*tasks)
        await store.effects.settle()
        assert used(store) <= SHARE
        assert at_rest(store)

    async def test_a_smaller_version_makes_room_once_it_is_there(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        gate = Gate(store, monkeypatch)
        tasks = await begun(put(store, "ann", "w", tensor(8, 8), share=SHARE))
        with refused("quota"):
            await put(store, "ann", "v", tensor(16, 16), share=SHARE)
        gate.open.set()
        await asyncio.gather(*tasks)
        await put(store, "ann", "v", tensor(16, 16), share=SHARE)

    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("unforeseen")])
    async def test_a_version_that_fails_leaves_all_as_it_was(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: Exception
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        before = used(store)
        gate = Gate(store, monkeypatch)
        gate.error = error
        tasks = await begun(*(put(store, "ann", "w", tensor(32, 32, n), share=SHARE) for n in (1, 2)))
        gate.open.set()
        assert all(
            isinstance(one, ServiceError | RuntimeError)
            for one in await asyncio.gather(*tasks, return_exceptions=True)
        )
        await store.effects.settle()
        assert (used(store), at_rest(store)) == (before, True)
        assert (await get(store, "ann", "w") == W).all()
        with refused("quota"):
            await put(store, "ann", "v", W, share=SHARE)
        gate.error = None
        await put(store, "ann", "w", tensor(32, 32, 3), share=SHARE)

    async def test_a_version_that_isnt_wanted_any_more_leaves_all_as_it_was(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        etag = (await store.head("ann", "w")).etag
        gate = Gate(store, monkeypatch)
        once = Conditions(if_match={etag})
        tasks = await begun(
            *(put(store, "ann", "w", tensor(32, 32, n), share=SHARE, conditions=once) for n in (1, 2, 3))
        )
        gate.open.set()
        codes = [getattr(one, "code", "") for one in await asyncio.gather(*tasks, return_exceptions=True)]
        assert sorted(codes) == ["", "precondition_failed", "precondition_failed"]
        await store.effects.settle()
        assert used(store) <= SHARE
        assert at_rest(store)

    async def test_who_leaves_meanwhile_leaves_no_trace(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        gate = Gate(store, monkeypatch)
        (task,) = await begun(put(store, "ann", "w", tensor(32, 32, 1), share=SHARE))
        task.cancel()
        gate.open.set()
        await store.effects.settle()
        assert at_rest(store)
        await put(store, "ann", "w", tensor(32, 32, 2), share=SHARE)

    @pytest.mark.parametrize("end", ["delete", "expire"])
    async def test_what_is_on_its_way_to_a_name_that_ends_keeps_its_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
    ) -> None:
        clock = Clock()
        async with open_store(Settings(tmp_path), clock=clock) as store:
            await put(store, "ann", "w", W, share=SHARE, ttl=10)
            gate = Gate(store, monkeypatch)
            tasks = await begun(put(store, "ann", "w", tensor(32, 32, 1), share=SHARE))
            if end == "delete":
                await store.delete("ann", "w")
            else:
                clock.now += 20
                with refused("quota"):  # it is still there until it is swept
                    await put(store, "ann", "v", W, share=SHARE)
                tasks += await begun(put(store, "ann", "w", tensor(32, 32, 1), share=SHARE))
                await store.sweep(clock())
            with refused("quota"):
                await put(store, "ann", "v", W, share=SHARE)
            gate.open.set()
            await asyncio.gather(*tasks)
            await store.effects.settle()
            assert used(store) <= SHARE
            assert at_rest(store)
            assert (await get(store, "ann", "w") == tensor(32, 32, 1)).all()

    async def test_what_a_job_keeps_makes_no_room(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        async with holding(store, "ann", "w") as hold:
            store.kept([hold])
        with refused("quota"):
            await put(store, "ann", "w", tensor(32, 32, 1), share=SHARE)
        store.unkept([hold.content.row.id])
        await put(store, "ann", "w", tensor(32, 32, 1), share=SHARE)

    async def test_nor_after_a_restart(self, tmp_path: Path) -> None:
        async with open_store(Settings(tmp_path)) as store:
            await put(store, "ann", "w", W, share=SHARE)
            async with holding(store, "ann", "w") as hold:
                row = hold.content.row
            await store.database.write(lambda db: index.keep(db, "job", [row]))
            store.kept([hold])
        async with open_store(Settings(tmp_path)) as store:
            with refused("quota"):
                await put(store, "ann", "w", tensor(32, 32, 1), share=SHARE)

    @pytest.mark.parametrize("durable", [True, False])
    async def test_nor_what_a_job_comes_to_keep_meanwhile(
        self, store: LocalStore, monkeypatch: pytest.MonkeyPatch, durable: bool
    ) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        gate, lock = Gate(store, monkeypatch), store._lock("ann", "w")
        async with lock:  # a result isn't written before its name is bound
            (task,) = await begun(put(store, "ann", "w", tensor(32, 32, 1), share=SHARE, durable=durable))
            async with holding(store, "ann", "w") as hold:
                store.kept([hold])
        gate.open.set()
        with refused("quota"):
            await task
        await store.effects.settle()
        assert (await get(store, "ann", "w") == W).all()
        assert (used(store) <= SHARE, at_rest(store)) == (True, True)

    async def test_what_is_read_at_the_moment_counts_until_it_is_let_go(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        async with holding(store, "ann", "w"):
            await put(store, "ann", "w", tensor(32, 32, 1), share=SHARE)
            with refused("quota"):
                await put(store, "ann", "w", tensor(32, 34), share=SHARE)
            with refused("quota"):
                await put(store, "ann", "v", tensor(1, 1), share=SHARE)
        await put(store, "ann", "w", tensor(32, 32, 2), share=SHARE)

    async def test_one_result_after_another_needs_room_for_one(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W, share=SHARE)
        for seed in range(8):
            await put(store, "ann", "w", tensor(32, 32, seed), share=SHARE, durable=False)
        with refused("quota"):
            await put(store, "ann", "v", tensor(16, 16), share=SHARE, durable=False)
        store.contents.write_waiting()
        await store.effects.settle()
        assert (used(store) <= SHARE, at_rest(store)) == (True, True)

    async def test_what_a_result_took_the_place_of_makes_room_at_once(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W)
        await put(store, "ann", "w", tensor(32, 32, 1), durable=False)
        await put(store, "ann", "v", W, share=2 * SHARE)

    async def test_what_is_lost_makes_no_room(self, store: LocalStore) -> None:
        await put(store, "ann", "w", W, durable=False)
        await put(store, "ann", "v", W)
        async with holding(store, "ann", "w") as hold:
            store.contents.lose(hold.content)
        with refused("quota"):
            await put(store, "ann", "w", W, share=SHARE)

    async def test_what_has_expired_makes_room_for_its_name(self, tmp_path: Path) -> None:
        clock = Clock()
        async with open_store(Settings(tmp_path), clock=clock) as store:
            await put(store, "ann", "w", W, share=SHARE, ttl=10)
            clock.now += 20
            await put(store, "ann", "w", W, share=SHARE)

    async def test_several_first_versions_at_once_need_room_for_one(self, store: LocalStore) -> None:
        await asyncio.gather(*(put(store, "ann", "w", tensor(32, 32, n), share=SHARE) for n in range(4)))
        await store.effects.settle()
        assert at_rest(store)

    async def test_whatever_comes_together_it_stays_within_the_share(self, store: LocalStore) -> None:
        dice, share = random.Random(7), 3 * SHARE

        async def one() -> None:
            name, rows = dice.choice("uvw"), dice.choice((8, 16, 32, 40))
            work = dice.randrange(6)
            if work == 0:
                await store.delete("ann", name)
            elif work == 1:
                async with holding(store, "ann", name):
                    await asyncio.sleep(0.003 * dice.random())
            else:
                await put(store, "ann", name, tensor(rows, 32), share=share, durable=dice.random() < 0.7)

        for _ in range(20):
            done = await asyncio.gather(*(one() for _ in range(12)), return_exceptions=True)
            assert {getattr(error, "code", error) for error in done} <= {None, "quota", "not_found"}
            store.contents.write_waiting()
            await store.effects.settle()
            assert used(store) <= share + 200  # the last tensor's header comes on top
            assert at_rest(store)
