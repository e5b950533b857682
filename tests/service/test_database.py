"""The database's thread: groups of writes, failures among them, a full disk, what is synced."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.database import Database
from service.errors import ServiceError
from service.store import index
from tests.service.test_journal import content, contents


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "service.db")
    database.open()
    await database.prepare(index.prepare)
    yield database
    database.close()


class TestDatabase:
    async def test_writes_that_wait_share_a_commit(self, database: Database) -> None:
        commits: list[str] = []
        await database.read(lambda db: db.set_trace_callback(commits.append))
        await asyncio.gather(*(database.write(_add(f"c{n}")) for n in range(50)))
        await database.read(lambda db: db.set_trace_callback(None))
        assert len([text for text in commits if text == "COMMIT"]) < 10
        assert len(await contents(database)) == 50

    async def test_a_failure_leaves_the_others_of_its_group_whole(self, database: Database) -> None:
        def fail(db: sqlite3.Connection) -> None:
            index.add(db, content("half"))
            raise KeyError("as told")

        results = await asyncio.gather(
            database.write(_add("a")), database.write(fail), database.write(_add("b")), return_exceptions=True
        )
        assert [type(result) for result in results] == [type(None), KeyError, type(None)]
        assert await contents(database) == {"a", "b"}

    async def test_a_full_disk_is_refused_and_passes(self, database: Database) -> None:
        pages = await database.read(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
        await database.read(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 2}"))

        def large(db: sqlite3.Connection) -> None:
            for n in range(1000):
                index.add(db, content(f"large{n}"))

        results = await asyncio.gather(*(database.write(large) for _ in range(3)), return_exceptions=True)
        assert {getattr(result, "code", None) for result in results} == {"no_room"}
        await database.read(lambda db: db.execute(f"PRAGMA max_page_count = {pages + 9999}"))
        await database.write(_add("small"))
        assert await contents(database) == {"small"}

    async def test_is_synced_at_each_commit_unless_it_may_be_soft(self, database: Database) -> None:
        seen: list[Any] = []

        def look(db: sqlite3.Connection) -> None:
            seen.append(db.execute("PRAGMA synchronous").fetchone()[0])
            seen.append(db.execute("PRAGMA journal_mode").fetchone()[0])

        await database.write(look)
        await database.write(look, soft=True)
        assert seen == [2, "wal", 1, "wal"]  # FULL, NORMAL

    async def test_closed(self, database: Database) -> None:
        pending = asyncio.create_task(database.write(_add("last")))
        await asyncio.sleep(0)
        await asyncio.to_thread(database.close)
        await pending
        with pytest.raises(ServiceError, match="shutting down"):
            await database.read(index.load)

    async def test_that_is_no_database(self, tmp_path: Path) -> None:
        (tmp_path / "service.db").write_bytes(b"not SQLite" * 1000)
        database = Database(tmp_path / "service.db")
        with pytest.raises(sqlite3.DatabaseError):
            database.open()


def _add(id_: str) -> Any:
    return lambda db: index.add(db, content(id_))
