"""The journal: what was accepted is there after a restart, transactions, keys, expiry."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.database import Database
from service.errors import ServiceError
from service.journal import IDEMPOTENCY_SECONDS, JobRow, Journal, Key, Progress, StepRow
from service.store import index
from service.store.index import ContentRow, NameRow

KEY = Key("ann", "k", "f00d")
#: The time, and how long results are kept.
NOW = (100.0, 60.0)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "service.db")
    database.open()
    await database.prepare(index.prepare)
    yield database
    database.close()


@pytest.fixture
async def journal(database: Database) -> Journal:
    journal = Journal(database)
    assert await journal.start() == []
    return journal


def job(id_: str = "j1", *specs: bytes, owner: str = "ann", accepted: float = 100.0) -> JobRow:
    steps = tuple(StepRow(position, spec) for position, spec in enumerate(specs or (b"one", b"two")))
    return JobRow(id_, owner, accepted, steps=steps)


def content(id_: str, *, whole: bool = True) -> ContentRow:
    return ContentRow(id_, "ann", "", "e" + id_, "fp32", (1, 2), 8, whole)


async def contents(database: Database) -> set[str]:
    rows, _, _ = await database.read(index.load)
    return {row.id for row in rows}


class TestJournal:
    async def test_accepted_jobs_are_there_after_a_restart(self, journal: Journal, tmp_path: Path) -> None:
        await journal.accept(job("j2"), [content("c")], None)
        await journal.accept(job("j1"), [content("c")], None)
        other = Database(tmp_path / "service.db")
        other.open()
        assert [row.id for row in await Journal(other).start()] == ["j1", "j2"]
        assert await Journal(other).find("ann", "j1", *NOW) == job("j1")
        other.close()

    async def test_progress_is_one_transaction(self, journal: Journal) -> None:
        await journal.accept(job(), [content("in")], None)
        done = StepRow(0, b"one", "done", finished=101.0, variant="v", reason="r", why="w", result="out")
        name = NameRow("ann", "d", "out", 101.0, None)
        await journal.record(Progress("j1", [done], [content("out")], [name]))
        found = await journal.find("ann", "j1", *NOW)
        assert found is not None
        assert found.steps[0] == done
        assert found.steps[1].state == "queued"
        assert (await journal.start())[0].id == "j1"

        failed = StepRow(1, b"two", "failed", "deadline", "too late", 102.0)
        await journal.record(Progress("j1", [failed], state="failed", finished=102.0, unneeded={"in"}))
        found = await journal.find("ann", "j1", *NOW)
        assert found is not None
        assert (found.state, found.finished, found.steps[1]) == ("failed", 102.0, failed)
        assert await journal.start() == []
        assert await contents(journal.database) == {"out"}

    async def test_a_progress_that_fails_records_nothing(self, journal: Journal) -> None:
        await journal.accept(job(), [], None)
        bad = NameRow("ann", "d", "unknown", 101.0, None)  # no such content: the foreign key refuses
        done = StepRow(0, b"one", "done")
        with pytest.raises(sqlite3.IntegrityError):
            await journal.record(Progress("j1", [done], [content("out")], [bad]))
        found = await journal.find("ann", "j1", *NOW)
        assert found is not None
        assert found.steps[0].state == "queued"
        assert await contents(journal.database) == set()

    async def test_only_the_owner_finds_a_job(self, journal: Journal) -> None:
        await journal.accept(job(), [], None)
        assert await journal.find("bob", "j1", *NOW) is None
        assert await journal.page("bob", "", 9, *NOW) == []

    async def test_pages(self, journal: Journal) -> None:
        for n in range(5):
            await journal.accept(job(f"j{n}"), [], None)
        assert [row.id for row in await journal.page("ann", "", 2, *NOW)] == ["j4", "j3"]
        assert [row.id for row in await journal.page("ann", "j3", 9, *NOW)] == ["j2", "j1", "j0"]

    async def test_a_job_comes_once(self, journal: Journal) -> None:
        await journal.accept(job(), [], KEY)
        with pytest.raises(sqlite3.IntegrityError):
            await journal.accept(job(), [], None)
        assert await journal.replay(KEY, 100.0) == "j1"
        assert await journal.replay(Key("bob", "k", "f00d"), 100.0) is None
        with pytest.raises(ServiceError, match="another body"):
            await journal.replay(Key("ann", "k", "beef"), 100.0)

    async def test_expiry(self, journal: Journal) -> None:
        await journal.accept(job("j1"), [], KEY)
        await journal.accept(job("j2"), [], None)
        for id_ in ("j1", "j2"):
            done = [StepRow(n, b"x", "done", result=f"{id_}{n}") for n in range(2)]
            results = [content(f"{id_}{n}") for n in range(2)]
            await journal.record(Progress(id_, done, results, state="done", finished=100.0))
        assert await journal.expire(159.0, 60.0) == []
        assert [row.id for row in await journal.page("ann", "", 9, 159.0, 60.0)] == ["j2", "j1"]
        await self._is_swept(journal)  # what the sweep will do is seen before
        assert sorted(await journal.expire(160.0, 60.0)) == ["j10", "j11", "j20", "j21"]
        assert await contents(journal.database) == set()
        await self._is_swept(journal)
        day = 100.0 + IDEMPOTENCY_SECONDS
        assert await journal.replay(KEY, day - 1) == "j1"
        assert await journal.replay(KEY, day) is None
        await journal.expire(day, 60.0)
        assert await journal.find("ann", "j1", day, 60.0) is None

    @staticmethod
    async def _is_swept(journal: Journal) -> None:
        now = (160.0, 60.0)
        assert await journal.find("ann", "j2", *now) is None
        kept = await journal.find("ann", "j1", *now)  # its key may come again
        assert kept is not None
        assert kept.expired
        assert [step.result for step in kept.steps] == [None, None]
        assert [row.id for row in await journal.page("ann", "", 9, *now)] == ["j1"]

    async def test_what_a_name_needs_stays_when_its_job_expires(self, journal: Journal) -> None:
        await journal.accept(job("j1", b"one"), [], None)
        done = [StepRow(0, b"one", "done", result="out")]
        name = NameRow("ann", "d", "out", 101.0, None)
        await journal.record(Progress("j1", done, [content("out")], [name], "done", 100.0))
        assert await journal.expire(160.0, 60.0) == ["out"]
        assert await contents(journal.database) == {"out"}
