"""PostgreSQL as the journal: transactions as if alone, bounded waits, connections that break, versions."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from service.errors import ServiceError
from service.postgres import Postgres
from service.session import Session, SharedUnusable
from tests.service import shared

pytestmark = pytest.mark.ci


def table(db: Session) -> None:
    db.execute(
        "CREATE TABLE IF NOT EXISTS counts (id TEXT PRIMARY KEY, n INTEGER NOT NULL, x REAL, b BLOB) STRICT"
    )
    db.execute("CREATE INDEX IF NOT EXISTS counts_n ON counts (n)")


def add(db: Session, id_: str = "one") -> None:
    """A change that reads first: two at once must not lose one."""
    row = db.execute("SELECT n FROM counts WHERE id = ?", (id_,)).fetchone()
    n = 1 if row is None else row[0] + 1
    db.execute(
        "INSERT INTO counts VALUES (?, ?, 0.5, ?) ON CONFLICT (id) DO UPDATE SET n = excluded.n",
        (id_, n, b"%?"),
    )


def count(db: Session) -> int:
    row = db.execute("SELECT n FROM counts WHERE id = 'one'").fetchone()
    return 0 if row is None else row[0]


def refused(code: str) -> pytest.RaisesExc[ServiceError]:
    return pytest.RaisesExc(ServiceError, check=lambda error: error.code == code)


@pytest.fixture
async def database(postgres: shared.Postgres) -> AsyncIterator[Postgres]:
    made = Postgres(postgres.database(), seconds=5)
    await asyncio.to_thread(made.open)
    await made.prepare(table)
    yield made
    await asyncio.to_thread(made.close)


async def test_changes_at_once_run_as_if_one_after_the_other(database: Postgres) -> None:
    await asyncio.gather(*(database.write(add) for _ in range(40)))
    assert await database.read(count) == 40


async def test_what_raises_changes_nothing(database: Postgres) -> None:
    def add_and_fail(db: Session) -> None:
        add(db)
        raise ServiceError("invalid", "no")

    with refused("invalid"):
        await database.write(add_and_fail)
    assert await database.read(count) == 0
    await database.write(add)
    assert await database.read(count) == 1


async def test_values_come_back_as_they_went(database: Postgres) -> None:
    await database.write(add)
    assert await database.read(lambda db: db.execute("SELECT * FROM counts").fetchall()) == [
        ("one", 1, 0.5, b"%?")
    ]


async def test_a_wait_is_bounded(postgres: shared.Postgres) -> None:
    url = postgres.database()
    database = Postgres(url, seconds=0.5)
    database.open()
    await database.prepare(table)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE counts")
        with refused("unavailable"):
            await database.write(add)
        other.rollback()
    await database.write(add)
    assert await database.read(count) == 1
    await asyncio.to_thread(database.close)


async def test_a_cut_network_is_told_and_mended(postgres: shared.Postgres) -> None:
    with shared.cable(postgres.port) as cable:
        database = Postgres(postgres.database(port=cable.port), seconds=1)
        database.open()
        await database.prepare(table)
        await database.write(add)
        for how in ("refuse", "hold"):
            cable.cut(how)
            began = time.monotonic()
            waits = [database.read(count) for _ in range(30)]
            answers = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(a, ServiceError) and a.code == "unavailable" for a in answers), answers
            assert time.monotonic() - began < 20, "each waited for those before it"
            assert not database.up
            cable.mend()
            await asyncio.sleep(0.5)
            assert await database.read(count) >= 1
            assert database.up
        await database.write(add)
        await asyncio.to_thread(database.close)


def sessions(db: Session) -> list[tuple[Any, ...]]:
    """State of the others that are at work."""
    found = db.execute(
        "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND state <> 'idle'"
    )
    return found.fetchall()


async def test_a_front_that_is_gone_amid_a_statement_of_many_holds_no_lock(
    database: Postgres, postgres: shared.Postgres
) -> None:
    """Killed, its connection is reset; where its node is gone, the server asks."""
    await database.write(add)
    with shared.cable(postgres.port) as cable:
        gone = psycopg.connect(database._url.replace(str(postgres.port), str(cable.port)))
        gone.pgconn.enter_pipeline_mode()
        gone.pgconn.send_query_params(b"BEGIN", None)
        gone.pgconn.send_query_params(b"UPDATE counts SET n = 77", None)
        gone.pgconn.send_flush_request()
        gone.pgconn.flush()
        async with asyncio.timeout(10):
            while await database.read(sessions) != [("active",)]:
                await asyncio.sleep(0.02)
        with socket.socket(fileno=os.dup(gone.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with Path(os.devnull).open("r+b") as nothing:  # so that libpq says no farewell
                os.dup2(nothing.fileno(), gone.fileno())
        gone.close()
        await database.write(add)
        assert await database.read(count) == 2
        assert await database.read(sessions) == []

    def asks(db: Session) -> int:
        names = ("idle", "interval", "count")
        idle, interval, times = (
            int(db.execute(f"SHOW tcp_keepalives_{name}").fetchone()[0]) for name in names
        )
        return idle + interval * times

    assert 0 < await database.read(asks) <= 30


async def test_a_restart_between_requests_is_not_noticed(
    database: Postgres, postgres: shared.Postgres
) -> None:
    await asyncio.gather(*(database.write(add) for _ in range(8)))
    for number in (signal.SIGINT, signal.SIGQUIT):
        postgres.stop(number)
        postgres.start()
        before = await database.read(count)
        await asyncio.gather(*(database.write(add) for _ in range(8)))
        assert await database.read(count) == before + 8


async def test_a_database_that_takes_no_changes_is_unavailable(database: Postgres) -> None:
    """As a standby after a fail-over."""
    with refused("unavailable"):
        await database.write(lambda db: (db.execute("SET TRANSACTION READ ONLY"), add(db)))
    with refused("unavailable"):
        await database.read(lambda db: db.execute("SELECT * FROM nowhere"))
    await database.write(add)


async def test_start_says_what_is_wrong(postgres: shared.Postgres) -> None:
    with pytest.raises(
        SharedUnusable, match=r"journal: can't connect to 127\.0\.0\.1:1/x: .*refused"
    ) as caught:
        Postgres("postgresql://gemm:secret-word@127.0.0.1:1/x", seconds=2).open()
    assert "secret" not in str(caught.value)
    with pytest.raises(SharedUnusable, match="authentication failed") as caught:
        Postgres(postgres.url("postgres").replace("secret-word", "wrong-word"), seconds=2).open()
    assert "wrong-word" not in str(caught.value)


async def test_a_start_waits_for_nobody_who_uses_the_tables(
    database: Postgres, postgres: shared.Postgres
) -> None:
    held = psycopg.connect(database._url)
    held.execute("INSERT INTO counts VALUES ('held', 1)")  # and not yet committed
    other = Postgres(database._url, seconds=2)
    other.open()
    await asyncio.wait_for(other.prepare(table), 2)
    await asyncio.to_thread(other.close)
    held.close()


async def test_tables_of_another_version_stop_the_start(database: Postgres) -> None:
    await database.prepare(table)  # again is no harm
    await database.write(lambda db: db.execute("UPDATE service SET version = 99"))
    with pytest.raises(SharedUnusable, match=r"holds tables of version 99; this service knows version 1"):
        await database.prepare(table)
