"""PostgreSQL for several fronts: receives functions over a session, hands on their results once committed.

Transactions are SERIALIZABLE: each runs as if alone, as in SQLite, and one that others got in the way of runs
again. A request takes a bounded time, whatever becomes of network and server: then its socket is cut, and the
caller is told "unavailable". A connection that broke is made anew at the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import conninfo, errors

from service.errors import ServiceError
from service.session import Rows, SharedUnusable
from service.session import Session as AnySession

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Connections of a front, each in a thread of its own.
CONNECTIONS = 8
#: Most seconds for making the tables: fronts that start together wait for one another.
START_SECONDS = 30.0
#: How soon the server notices that a front's node is gone, which holds locks amid a statement of many until then.
_KEEPALIVES = {"tcp_keepalives_idle": 10, "tcp_keepalives_interval": 5, "tcp_keepalives_count": 3}
#: After a connection was refused, seconds in which requests are refused without trying.
DOWN_SECONDS = 0.25
#: The database's form; a front of another refuses to start.
VERSION = 1
#: Transaction-wide lock of who makes tables: any fixed number.
_PREPARING = 0x67656D6D
#: What a column's type of SQLite is here.
_TYPES = (
    (" STRICT, WITHOUT ROWID", ""),
    (" STRICT", ""),
    (" REAL", " DOUBLE PRECISION"),
    (" BLOB", " BYTEA"),
    (" INTEGER", " BIGINT"),
)
_IN_THE_WAY = (
    errors.SerializationFailure,
    errors.DeadlockDetected,
    # What another committed after this transaction began to look can show as these too.
    errors.UniqueViolation,
    errors.ForeignKeyViolation,
)
#: Times that a transaction runs which meets rows that it didn't see: then they are really in the way.
_VIOLATIONS = 5


@lru_cache(maxsize=256)
def _spoken(sql: str) -> bytes:
    """A statement as psycopg takes it."""
    sql = sql.replace("%", "%%").replace("?", "%s")
    if sql.lstrip().startswith("CREATE TABLE"):
        for theirs, ours in _TYPES:
            sql = sql.replace(theirs, ours)
    return sql.encode()


class Session:
    """A connection that takes the statements that SQLite takes."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows:
        """Run a statement."""
        return self.connection.execute(_spoken(sql), parameters)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> None:
        """Run it once for each."""
        with self.connection.cursor() as cursor:
            cursor.executemany(_spoken(sql), list(parameters))


@dataclass(slots=True)
class _Request(Generic[T]):
    """`begin` opens a transaction; "" for a single statement that needs none."""

    work: Callable[[Session], T]
    begin: str
    until: float
    soft: bool = False
    connection: psycopg.Connection[Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False

    def cut(self) -> None:
        """Nobody waits any more: wake the thread, whatever it waits for."""
        with self.lock:
            self.over = True
            if self.connection is None or self.connection.closed:
                return
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)


class Postgres:
    """One database. `seconds` bounds each request, its wait for a connection included.

    `up` says whether the last request was served.
    """

    def __init__(self, url: str, *, seconds: float) -> None:
        self.seconds = seconds
        self.up = False
        self._url = url
        self._local = threading.local()
        self._open: set[psycopg.Connection[Any]] = set()
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="postgres")
        self._down_until = 0.0
        self._closed = False

    @property
    def place(self) -> str:
        """Where it is, without the password."""
        try:
            known = conninfo.conninfo_to_dict(self._url)
        except psycopg.Error:
            return "(not a connection string)"
        return f"{known.get('host', 'localhost')}:{known.get('port', 5432)}/{known.get('dbname', '')}"

    def open(self) -> None:
        """Connect once, in the caller's thread; SharedUnusable where that can't be."""
        try:
            self._connect().close()
        except psycopg.Error as error:
            raise SharedUnusable(f"journal: can't connect to {self.place}: {_line(error)}") from None
        self.up = True

    def close(self) -> None:
        """End the connections once their requests have ended."""
        self._closed = True
        self._pool.shutdown()
        for connection in self._open:
            connection.close()

    async def prepare(self, schema: Callable[[AnySession], None]) -> None:
        """Make tables where they aren't yet; fronts that start together take turns.

        SharedUnusable for another version's. Tables that are there aren't touched: that would lock out who uses them.
        """
        part = schema.__module__

        def work(db: Session) -> None:
            db.execute(f"SET LOCAL statement_timeout = {round(START_SECONDS * 1000)}")
            db.execute("SELECT pg_advisory_xact_lock(?)", (_PREPARING,))
            db.execute(
                "CREATE TABLE IF NOT EXISTS service (one INTEGER PRIMARY KEY, version INTEGER NOT NULL, "
                "id TEXT NOT NULL)"
            )
            db.execute(
                "INSERT INTO service VALUES (1, ?, gen_random_uuid()::text) ON CONFLICT DO NOTHING",
                (VERSION,),
            )
            (version,) = db.execute("SELECT version FROM service").fetchone()
            if version != VERSION:
                raise SharedUnusable(
                    f"journal: {self.place} holds tables of version {version}; this service knows version {VERSION}"
                )
            db.execute("CREATE TABLE IF NOT EXISTS service_parts (part TEXT PRIMARY KEY)")
            if db.execute("SELECT 1 FROM service_parts WHERE part = ?", (part,)).fetchone() is None:
                schema(db)
                db.execute("INSERT INTO service_parts VALUES (?)", (part,))

        # The lock makes it alone; tables that another made meanwhile must be seen, so not SERIALIZABLE.
        await self._ask(work, "BEGIN", seconds=START_SECONDS)

    async def write(self, work: Callable[[AnySession], T], *, soft: bool = False) -> T:
        """Run `work` in a transaction, again where others were in its way. ServiceError unavailable, no_room."""
        return await self._ask(work, "BEGIN ISOLATION LEVEL SERIALIZABLE", soft=soft)

    async def read(self, work: Callable[[AnySession], T]) -> T:
        """Run statements that only read, each for itself. ServiceError unavailable."""
        return await self._ask(work, "")

    async def _ask(
        self, work: Callable[[Session], T], begin: str, *, soft: bool = False, seconds: float | None = None
    ) -> T:
        if self._closed:
            raise ServiceError("draining", "the service is shutting down")
        seconds = seconds or self.seconds
        request = _Request(work, begin, time.monotonic() + seconds, soft)
        asked = asyncio.get_running_loop().run_in_executor(self._pool, self._serve, request)
        asked.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # nobody may wait
        try:
            value = await asyncio.wait_for(asyncio.shield(asked), seconds)
        except TimeoutError:
            request.cut()
            self.up = False
            raise unavailable(f"it gave no answer within {seconds:g} s") from None
        except ServiceError as error:
            self.up = self.up and error.code != "unavailable"
            raise
        self.up = True
        return value

    # What follows runs in the threads.

    def _serve(self, request: _Request[T]) -> T:
        tries = 0
        while True:
            try:
                return self._attempt(request)
            except _IN_THE_WAY as error:
                if isinstance(error, errors.IntegrityError) and tries == _VIOLATIONS:
                    raise
                if time.monotonic() > request.until:
                    raise unavailable(f"others were in the way for too long ({_line(error)})") from error
                time.sleep(random.random() * min(0.002 * 2**tries, 0.1))
            except _Broken as error:
                # The first may be a connection that had been idle when the server went.
                if tries or time.monotonic() > request.until:
                    raise unavailable(_line(error.__cause__)) from error
            tries += 1

    def _attempt(self, request: _Request[T]) -> T:
        connection = self._connection(request)
        session = Session(connection)
        try:
            if not request.begin:
                return request.work(session)
            connection.execute(request.begin.encode())
            if request.soft:
                connection.execute("SET LOCAL synchronous_commit = off")
            value = request.work(session)
        except BaseException as error:
            self._undo(connection, error)
            raise
        try:
            connection.execute("COMMIT")
        except _IN_THE_WAY:
            raise
        except psycopg.Error as error:
            self._drop(connection)
            raise unavailable(f"whether it took the change isn't known ({_line(error)})") from error
        return value

    def _undo(self, connection: psycopg.Connection[Any], error: BaseException) -> None:
        """Roll back; _Broken or the refusal in place of what the database raised."""
        if not connection.closed:
            with contextlib.suppress(psycopg.Error):
                if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                    connection.execute("ROLLBACK")
        if connection.closed:
            self._drop(connection)
            raise _Broken from error
        if isinstance(error, errors.DiskFull):
            raise ServiceError("no_room", "the database's disk is full") from error
        if isinstance(error, psycopg.Error) and not isinstance(error, _IN_THE_WAY):
            # A standby that only reads, a right that was taken away, a limit: all for who runs the database.
            logger.error("the database refused: %s", _line(error))
            raise unavailable(_line(error)) from error

    def _connection(self, request: _Request[T]) -> psycopg.Connection[Any]:
        """This thread's connection."""
        connection: psycopg.Connection[Any] | None = getattr(self._local, "connection", None)
        if connection is None:
            if time.monotonic() < self._down_until:
                raise unavailable("it refused a connection a moment ago")
            if request.over:
                raise unavailable("nobody waits any more")
            try:
                connection = self._local.connection = self._connect()
            except psycopg.Error as error:
                self._down_until = time.monotonic() + DOWN_SECONDS
                raise unavailable(_line(error)) from error
            self._open.add(connection)
        with request.lock:
            if request.over:
                raise unavailable("nobody waits any more")
            request.connection = connection
        return connection

    def _connect(self) -> psycopg.Connection[Any]:
        patience = {
            "connect_timeout": str(max(2, round(self.seconds))),
            "tcp_user_timeout": str(round(self.seconds * 1000)),
            "keepalives_idle": "10",
            "keepalives_interval": "5",
            "application_name": "gemm-service",
        }
        known = conninfo.conninfo_to_dict(self._url)
        added = {name: value for name, value in patience.items() if name not in known}
        # Nothing is prepared, so that a pool of connections may stand between (pgbouncer).
        connection = psycopg.connect(
            conninfo.make_conninfo(self._url, **added), autocommit=True, prepare_threshold=None
        )
        limit = round(self.seconds * 1000)
        try:
            connection.execute(f"SET statement_timeout = {limit}")
            # What begins and doesn't end (a front that is stopped in its tracks) must not hold locks.
            connection.execute(f"SET idle_in_transaction_session_timeout = {2 * limit}")
            # Nor one whose node is gone, amid a statement of many: no timeout ends that, only the connection's end.
            for name, value in _KEEPALIVES.items():
                connection.execute(f"SET {name} = {value}")
        except psycopg.Error:
            connection.close()
            raise
        return connection

    def _drop(self, connection: psycopg.Connection[Any]) -> None:
        self._open.discard(connection)
        self._local.connection = None
        connection.close()


class _Broken(Exception):
    """The connection is gone, and nothing of the transaction can have been kept."""


def unavailable(why: str) -> ServiceError:
    """The refusal while the database can't be had."""
    return ServiceError(
        "unavailable", f"the jobs' and tensors' database can't be used now: {why}", retry_after=1.0
    )


def _line(error: BaseException | None) -> str:
    """An error's first line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
