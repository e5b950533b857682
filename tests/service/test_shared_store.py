"""The store that fronts share, over a real S3 server (or a folder) and a real PostgreSQL: two fronts, one truth."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from service.arena import Arena, Slots
from service.errors import ServiceError
from service.session import SharedUnusable
from service.store import Conditions, index, objects
from service.store import shared as shared_store
from service.store.cluster import open_store
from service.store.shared import SharedStore
from tests.service import shared
from tests.service.storing import MIB, Clock, get, put, tensor

pytestmark = pytest.mark.ci


@dataclass
class Settings:
    """What a shared store reads."""

    store: str
    journal: str
    shared_seconds: float = 5.0
    lease_seconds: float = 1.0
    store_memory_bytes: int = 32 * MIB
    store_disk_bytes: int = 256 * MIB


@contextlib.asynccontextmanager
async def front(settings: Settings, clock: Clock | None = None) -> AsyncIterator[SharedStore]:
    """A started store over an arena of its own."""
    arena = Arena.create(64 * MIB)
    store = open_store(settings, Slots(arena), lambda *tensors: None, clock=clock or Clock())
    try:
        await store.start()
        yield store
    finally:
        await store.close()
        arena.close()


@pytest.fixture(autouse=True)
def environment(s3: shared.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["s3", "file"])
def settings(
    request: pytest.FixtureRequest, s3: shared.S3, postgres: shared.Postgres, tmp_path: Path
) -> Settings:
    url = s3.bucket() if request.param == "s3" else f"file://{tmp_path}/shared%20folder"
    return Settings(url, postgres.database())


@pytest.fixture
def on_s3(s3: shared.S3, postgres: shared.Postgres) -> Settings:
    return Settings(s3.bucket(), postgres.database())


@pytest.fixture
async def both(settings: Settings) -> AsyncIterator[tuple[SharedStore, SharedStore]]:
    clock = Clock()
    async with front(settings, clock) as a, front(settings, clock) as b:
        yield a, b


def refused(code: str) -> pytest.RaisesExc[ServiceError]:
    return pytest.RaisesExc(ServiceError, check=lambda error: error.code == code)


def kept(settings: Settings) -> list[str]:
    """Names of the objects under the store's prefix."""
    store = objects.ObjectFiles(settings.store, seconds=5)._store
    return [o["path"] for page in obstore.list(store) for o in page]


Both = tuple[SharedStore, SharedStore]


class TestTwoFronts:
    async def test_one_serves_what_the_other_stored(self, both: Both) -> None:
        a, b = both
        array = tensor(37, 5)
        etag = await put(a, "ann", "w", array)
        assert (await get(b, "ann", "w")).tobytes() == array.tobytes()
        entry = await b.head("ann", "w")
        assert (entry.etag, entry.dtype, entry.shape, entry.durable) == (etag, "fp32", (37, 5), True)
        empty = tensor(0, 4)
        await put(b, "ann", "empty", empty)
        assert (await get(a, "ann", "empty")).shape == (0, 4)

    async def test_a_large_one_goes_and_comes_in_pieces(self, both: Both) -> None:
        a, b = both
        array = tensor(2500, 2000)  # 20 MB: three parts
        await put(a, "ann", "w", array)
        assert (await get(b, "ann", "w")).tobytes() == array.tobytes()
        hold = await b.hold("ann", "w")
        assert await b.contents.read(hold, 9_000_001, 77) == array.tobytes()[9_000_001:9_000_078]
        hold.release()

    async def test_what_one_replaced_the_other_never_serves_again(self, both: Both) -> None:
        a, b = both
        old, new = tensor(4, 4, 1), tensor(4, 4, 2)
        await put(a, "ann", "w", old)
        with await a.pin("ann", "w") as before:
            await put(b, "ann", "w", new)
            assert (await get(a, "ann", "w")).tobytes() == new.tobytes()
            assert bytes(before.view()) == old.tobytes()

    async def test_is_fetched_once(self, both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(4, 4))
        loads = []
        read_into = b.kept_files.read_into
        monkeypatch.setattr(b.kept_files, "read_into", lambda *args: (loads.append(1), read_into(*args))[1])
        for _ in range(3):
            await get(b, "ann", "w")
            await put(a, "ann", "other", tensor(2, 2))
            await b.sweep(0)
        assert loads == [1]

    async def test_of_two_that_put_where_none_may_be_one_wins(self, both: Both) -> None:
        fresh = Conditions(if_none_match={"*"})
        for n in range(5):
            puts = [put(s, "ann", f"w{n}", tensor(2, 2, i), conditions=fresh) for i, s in enumerate(both)]
            answers = await asyncio.gather(*puts, return_exceptions=True)
            (won,) = [answer for answer in answers if isinstance(answer, str)]
            (lost,) = [answer for answer in answers if isinstance(answer, ServiceError)]
            assert lost.code == "precondition_failed"
            assert {(await store.head("ann", f"w{n}")).etag for store in both} == {won}

    async def test_of_many_that_replace_one_version_one_wins(self, both: Both) -> None:
        a, b = both
        etag = await put(a, "ann", "w", tensor(2, 2))
        only = Conditions(if_match={etag})
        puts = [put(s, "ann", "w", tensor(2, 2, 1 + n), conditions=only) for n, s in enumerate([a, b] * 4)]
        answers = await asyncio.gather(*puts, return_exceptions=True)
        assert sum(isinstance(answer, str) for answer in answers) == 1, answers
        with refused("precondition_failed"):
            await b.delete("ann", "w", only)

    async def test_deleted_is_gone_for_both_and_readable_to_who_holds_it(self, both: Both) -> None:
        a, b = both
        array = tensor(4, 4)
        await put(a, "ann", "w", array)
        hold = await b.hold("ann", "w")
        await a.delete("ann", "w")
        for store in both:
            with refused("not_found"):
                await store.pin("ann", "w")
            with refused("not_found"):
                await store.delete("ann", "w")
        assert await b.contents.read(hold, 0, array.nbytes) == array.tobytes()
        hold.release()

    async def test_of_another_owner_is_not_found(self, both: Both) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(2, 2))
        with refused("not_found"):
            await b.pin("bob", "w")
        assert await b.entries("bob", "", 9) == ([], None)

    async def test_are_listed_in_pages_in_the_order_of_bytes(self, both: Both) -> None:
        b = both[1]
        names = ["B", "a", "a-1", "a.0", "a_", "b", "C9"]
        for n, name in enumerate(names):
            await put(both[n % 2], "ann", name, tensor(1, 1))
        listed, after = [], ""
        while after is not None:
            page, after = await b.entries("ann", after, 3)
            listed += [entry.name for entry in page]
        assert listed == sorted(names)

    async def test_expires_for_both(self, both: Both) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(2, 2), ttl=10)
        assert (await b.head("ann", "w")).expires == b.clock() + 10
        a.clock.now += 10
        for store in both:
            with refused("not_found"):
                await store.head("ann", "w")
            assert await store.entries("ann", "", 9) == ([], None)
        await b.sweep(b.clock())
        assert await b.transactions.read(
            lambda db: db.execute("SELECT count(*) FROM contents").fetchone()
        ) == (0,)

    async def test_room_is_counted_over_both(self, both: Both) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(16, 16))
        await b.sweep(0)
        b.contents.disk_budget = 1500
        with refused("no_room"):
            await put(b, "bob", "v", tensor(16, 16))


class TestShares:
    """Of 1024 bytes for a tensor of 16 × 16, and 1100 to keep."""

    async def test_a_full_share_takes_another_version_from_any_front(self, both: Both) -> None:
        a, b = both
        await put(a, "ann", "x", tensor(1, 16), share=1100)
        for seed, store in enumerate((a, b, b, a, b)):
            await put(store, "ann", "w", tensor(16, 16, seed), share=1100)
            for one in both:
                with refused("quota"):
                    await put(one, "ann", "v", tensor(16, 16), share=1100)
                with refused("quota"):
                    await put(one, "ann", "w", tensor(16, 17), share=1100)
        await put(a, "ann", "w", tensor(8, 8), share=1100)
        await put(b, "ann", "v", tensor(8, 8), share=1100)
        await b.delete("ann", "w")
        await a.delete("ann", "v")
        await b.delete("ann", "x")
        await put(a, "ann", "u", tensor(16, 16), share=1100)

    async def test_several_versions_at_once_end_as_one(self, both: Both) -> None:
        work = [put(both[n % 2], "ann", "w", tensor(16, 16, n), share=1100) for n in range(6)]
        await asyncio.gather(*work)
        assert await _bytes(both[0], "ann") == 1024

    async def test_new_names_at_once_stay_within_the_share(self, both: Both) -> None:
        a = both[0]
        work = [put(a, "ann", f"w{n}", tensor(16, 16), share=2100) for n in range(6)]
        done = await asyncio.gather(*work, return_exceptions=True)
        assert sorted(getattr(one, "code", "") for one in done) == ["", "", *["quota"] * 4]
        assert await _bytes(a, "ann") == 2048

    async def test_what_a_job_keeps_makes_no_room(self, both: Both) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(16, 16), share=1100)
        row = (await a.hold("ann", "w")).content.row
        await a.transactions.write(lambda db: index.keep(db, "job", [row]))
        with refused("quota"):
            await put(b, "ann", "w", tensor(16, 16, 1), share=1100)
        await a.transactions.write(lambda db: index.unkeep(db, "job", [row.id]))
        await put(b, "ann", "w", tensor(16, 16, 1), share=1100)

    async def test_nor_what_a_job_comes_to_keep_meanwhile(
        self, both: Both, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = both
        await put(a, "ann", "w", tensor(16, 16), share=1100)
        row = (await a.hold("ann", "w")).content.row
        write = b.contents.files.write

        async def kept_first(*args: Any) -> None:
            await a.transactions.write(lambda db: index.keep(db, "job", [row]))
            await write(*args)

        monkeypatch.setattr(b.contents.files, "write", kept_first)
        with refused("quota"):
            await put(b, "ann", "w", tensor(16, 16, 1), share=1100)
        assert await _bytes(a, "ann") == 1024
        assert (await get(b, "ann", "w") == tensor(16, 16)).all()

    async def test_one_result_after_another_needs_room_for_one(self, both: Both) -> None:
        for seed in range(6):
            array = tensor(16, 16, seed)
            await put(both[seed % 2], "ann", "d", array, share=1100, durable=False)
        with refused("quota"):
            await put(both[0], "ann", "v", tensor(16, 16), share=1100, durable=False)


async def _bytes(store: SharedStore, owner: str) -> int:
    """What the database knows of an owner's."""
    (nbytes,) = await store.transactions.read(
        lambda db: db.execute("SELECT sum(nbytes) FROM contents WHERE owner = ?", (owner,)).fetchone()
    )
    return int(nbytes)


class TestResultsToBeWritten:
    async def test_are_waited_for(self, both: Both) -> None:
        a, b = both
        array = tensor(8, 8)
        etag = await put(a, "ann", "d", array, durable=False)
        assert not (await b.head("ann", "d")).durable
        assert (await get(b, "ann", "d")).tobytes() == array.tobytes()
        entry = await b.head("ann", "d")
        assert (entry.durable, entry.etag) == (True, etag)
        a.contents.write_waiting()
        await a.effects.settle()
        await b.sweep(0)
        assert await b.transactions.read(lambda db: db.execute("SELECT * FROM unwritten").fetchall()) == []

    async def test_are_lost_with_their_front_for_all(self, settings: Settings) -> None:
        clock = Clock()
        async with front(settings, clock) as b:
            async with front(settings, clock) as a:
                await put(a, "ann", "gone", tensor(8, 8), durable=False)
                await put(a, "ann", "kept", tensor(8, 8))
                # As kill -9: nothing is written, nobody says goodbye.
                a.contents.forget(next(iter(a._soft.values())))
                a.fronts._beating.cancel()
                a.fronts._beating = None
            assert not (await b.head("ann", "gone")).durable
            await asyncio.sleep(1.5 * settings.lease_seconds)
            for find in (b.head, b.pin):
                with refused("lost"):
                    await find("ann", "gone")
            await get(b, "ann", "kept")
            await put(b, "ann", "gone", tensor(2, 2))
            await get(b, "ann", "gone")

    async def test_replaced_before_are_never_written(
        self, both: Both, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b = both
        writes = []
        write = a.kept_files.write
        monkeypatch.setattr(a.kept_files, "write", lambda *args: (writes.append(args[0]), write(*args))[1])
        for n in range(5):
            await put(a, "ann", "d", tensor(8, 8, n), durable=False)
        a.contents.write_waiting()
        await a.effects.settle()
        assert len(writes) == 1
        assert (await get(b, "ann", "d")).tobytes() == tensor(8, 8, 4).tobytes()

    async def test_are_written_when_the_front_leaves(self, settings: Settings) -> None:
        array = tensor(8, 8)
        async with front(settings) as a:
            await put(a, "ann", "d", array, durable=False)
        async with front(settings) as b:
            assert (await get(b, "ann", "d")).tobytes() == array.tobytes()


class TestObjects:
    async def test_go_after_a_while(self, on_s3: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        async with front(on_s3) as a:
            await put(a, "ann", "w", tensor(2, 2))
            await put(a, "ann", "w", tensor(3, 3))
            await put(a, "ann", "v", tensor(3, 3))
            await a.delete("ann", "v")
            await a.sweep(0)
            assert len(kept(on_s3)) == 1 + 3
            monkeypatch.setattr(shared_store, "GRACE_SECONDS", 0.0)
            await a.sweep(0)
            assert len(kept(on_s3)) == 1 + 1
            assert (await get(a, "ann", "w")).shape == (3, 3)

    async def test_that_nothing_names_go(self, on_s3: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_store, "GRACE_SECONDS", 0.0)
        async with front(on_s3) as a:
            await put(a, "ann", "w", tensor(2, 2))
            await a.kept_files.write("f" * 32, "fp32", (2, 2), memoryview(bytes(16)))
            await a.sweep(0)
            assert len(kept(on_s3)) == 1 + 2, "young ones may be on their way"
            monkeypatch.setattr(shared_store, "ORPHAN_SECONDS", -10.0)
            a._orphans_at = 0.0
            await a.sweep(0)
            assert len(kept(on_s3)) == 1 + 1
            await get(a, "ann", "w")

    async def test_are_kept_where_the_commit_is_in_doubt(
        self, on_s3: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shared_store, "GRACE_SECONDS", 0.0)
        array = tensor(4, 4)
        async with front(on_s3) as a, front(on_s3) as b:
            write = a.transactions.write

            async def commit_and_fail(work: object, **options: bool) -> None:
                await write(work, **options)
                monkeypatch.setattr(a.transactions, "write", write)
                raise ServiceError("unavailable", "the answer got lost")

            monkeypatch.setattr(a.transactions, "write", commit_and_fail)
            with refused("unavailable"):
                await put(a, "ann", "w", array)
            a.contents.write_waiting()
            await a.effects.settle()
            await a.sweep(0)
            assert (await get(b, "ann", "w")).tobytes() == array.tobytes()


class TestOutages:
    async def test_of_s3_are_told_in_time_and_end(
        self, on_s3: Settings, s3: shared.S3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_s3.shared_seconds = 1.0
        array = tensor(2500, 1000)
        with shared.cable(s3.port) as cable:
            monkeypatch.setenv("AWS_ENDPOINT_URL", s3.environ(port=cable.port)["AWS_ENDPOINT_URL"])
            async with front(on_s3) as a, front(on_s3) as b:
                await put(a, "ann", "w", tensor(2, 2))
                for how in ("refuse", "hold"):
                    cable.cut(how)
                    for work in (put(a, "ann", "big", array), b.pin("ann", "w")):
                        with refused("unavailable") as caught:
                            await work
                        assert caught.value.retry_after == 1.0
                    with refused("not_found"):
                        await a.head("ann", "big")
                    # What is in the arena is served; what is made is kept until it can be written.
                    await get(a, "ann", "w")
                    await put(a, "ann", how, tensor(3, 3), durable=False)
                    await asyncio.sleep(0.4)
                    cable.mend()
                    a.contents.write_waiting()
                    await a.effects.settle()
                    await a.sweep(0)
                    assert (await get(b, "ann", how)).shape == (3, 3)
                assert len(kept(on_s3)) == 1 + 3, "nothing half-written is visible"
                await put(a, "ann", "big", array)
                assert (await get(b, "ann", "big")).tobytes() == array.tobytes()

    async def test_of_the_database_are_told_in_time_and_end(
        self, on_s3: Settings, postgres: shared.Postgres
    ) -> None:
        on_s3.shared_seconds = 1.0
        with shared.cable(postgres.port) as cable:
            on_s3.journal = on_s3.journal.replace(f":{postgres.port}/", f":{cable.port}/")
            async with front(on_s3) as a:
                await put(a, "ann", "w", tensor(2, 2))
                for how in ("refuse", "hold"):
                    cable.cut(how)
                    for work in (
                        put(a, "ann", "v", tensor(2, 2)),
                        a.pin("ann", "w"),
                        a.entries("ann", "", 5),
                    ):
                        with refused("unavailable"):
                            await work
                    cable.mend()
                    await asyncio.sleep(0.5)
                    await get(a, "ann", "w")

    @pytest.mark.parametrize("store", ["s3://no-such-bucket/x", "file:///proc/no/folder"])
    async def test_what_cannot_be_used_stops_the_start(self, on_s3: Settings, store: str) -> None:
        on_s3.store = store
        with pytest.raises(SharedUnusable, match=f"store: can't write to {store}: "):
            async with front(on_s3):
                pass

    async def test_an_unreachable_server_stops_the_start(
        self, on_s3: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{shared.free_port()}")
        on_s3.shared_seconds = 1.0
        with pytest.raises(SharedUnusable, match=r"store: can't write to s3://gemm-\w+/tensors-of-tests: "):
            async with front(on_s3):
                pass

    async def test_the_prefix_of_another_database_stops_the_start(
        self, settings: Settings, postgres: shared.Postgres
    ) -> None:
        async with front(settings):
            pass
        async with front(settings):
            pass
        settings.journal = postgres.database()
        with pytest.raises(SharedUnusable, match="holds the tensors of another database"):
            async with front(settings):
                pass


@pytest.mark.parametrize("seed", range(3))
async def test_two_fronts_do_as_one_dictionary_does(on_s3: Settings, seed: int) -> None:
    random = np.random.default_rng(seed)
    clock = Clock()
    model: dict[str, tuple[bytes, float]] = {}
    on_s3.store_memory_bytes = 8192
    async with front(on_s3, clock) as a, front(on_s3, clock) as b:
        for _ in range(80):
            store, name = (a, b)[random.integers(2)], str(random.choice(["a", "b", "c"]))
            there = name in model and clock.now < model[name][1]
            match random.choice(["put", "soft", "delete", "pin", "pin", "evict", "time", "sweep"]):
                case "put" | "soft" as kind:
                    array = tensor(int(random.integers(0, 30)), 30, int(random.integers(1 << 30)))
                    ttl = float(random.integers(1, 30)) if random.random() < 0.3 else None
                    await put(store, "ann", name, array, ttl=ttl, durable=kind == "put")
                    model[name] = array.tobytes(), np.inf if ttl is None else clock.now + ttl
                case "delete" if there:
                    await store.delete("ann", name)
                    del model[name]
                case "pin" if there:
                    assert (await get(store, "ann", name)).tobytes() == model[name][0]
                case "pin" | "delete":
                    with refused("not_found"):
                        await store.pin("ann", name)
                case "evict":
                    store.reclaim(1 << 30)
                case "time":
                    clock.now += 4
                case "sweep":
                    await store.sweep(clock.now)
        want = sorted(name for name, (_, expires) in model.items() if clock.now < expires)
        for store in (a, b):
            assert [entry.name for entry in (await store.entries("ann", "", 99))[0]] == want
