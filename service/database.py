"""SQLite in a thread of its own: receives functions over a connection, hands on their results once committed.

Write-ahead log, synchronous=FULL: what was awaited has reached the disk. Writes that wait together share one
commit, so their fsync too; each runs in a savepoint, so that one's failure leaves the others whole.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from service.errors import ServiceError
from service.folder import refusal

T = TypeVar("T")
GROUP = 64  # writes that share a commit


@dataclass(slots=True)
class _Request:
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    writes: bool
    soft: bool
    value: Any = None
    error: BaseException | None = None

    def settle(self) -> None:
        """Runs on the loop."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class Database:
    """One file, one connection, one thread. Read-only where the folder is (and empty, if it has none)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writable = True
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="database", daemon=True)
        self._opened: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._closed = True

    def open(self, *, writable: bool = True) -> None:
        """Start the thread; raises what opening the file raised."""
        self.writable = writable
        self._thread.start()
        error = self._opened.get()
        if error is not None:
            self._thread.join()
            raise error
        self._closed = False

    def close(self) -> None:
        """Finish what was asked, then close the file."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    async def prepare(self, schema: Callable[[sqlite3.Connection], None]) -> None:
        """Make tables, unless there is a file that can't be written."""
        if self.writable or not self.path.exists():
            await self._ask(schema, writes=True, soft=False)

    async def write(self, work: Callable[[sqlite3.Connection], T], *, soft: bool = False) -> T:
        """Run `work` in a transaction; returns once it is committed.

        `soft`: survives the death of this process, not that of the machine (no fsync waits for it alone).
        Refused by the disk: ServiceError no_room or read_only.
        """
        if not self.writable:
            raise ServiceError("read_only", "the data folder can't be written")
        return await self._ask(work, writes=True, soft=soft)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, which only reads, after the writes asked before."""
        return await self._ask(work, writes=False, soft=False)

    async def _ask(self, work: Callable[[sqlite3.Connection], T], *, writes: bool, soft: bool) -> T:
        if self._closed:
            raise ServiceError("draining", "the service is shutting down")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Request(work, future, loop, writes, soft))
        return await future

    # What follows runs in the thread.

    def _connect(self) -> sqlite3.Connection:
        if self.writable:
            connection = sqlite3.connect(self.path, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
        elif not self.path.exists():
            connection = sqlite3.connect(":memory:", isolation_level=None)
        else:
            # A log left by a front that died is read with the file; without one nobody can be writing.
            log = self.path.with_name(self.path.name + "-wal").exists()
            mode = "mode=ro" if log else "immutable=1"
            connection = sqlite3.connect(f"file:{self.path}?{mode}", uri=True, isolation_level=None)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _main(self) -> None:
        try:
            connection = self._connect()
        except sqlite3.Error as error:
            self._opened.put(error)
            return
        self._opened.put(None)
        group: list[_Request] = []
        while True:
            request = self._queue.get()
            if request is None:
                break
            group = [request]
            stop = self._gather(group)
            self._serve(connection, group)
            if stop:
                break
        connection.close()

    def _gather(self, group: list[_Request]) -> bool:
        """Add what waits already; true where the end was among it."""
        while len(group) < GROUP:
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return False
            if request is None:
                return True
            group.append(request)
        return False

    def _serve(self, connection: sqlite3.Connection, group: list[_Request]) -> None:
        writes = [request for request in group if request.writes]
        if writes:
            self._transact(connection, writes)
        for request in group:
            if not request.writes:
                _run(connection, request)
        for request in group:
            try:
                request.loop.call_soon_threadsafe(request.settle)
            except RuntimeError:  # its loop is closed: nobody waits any more
                continue

    def _transact(self, connection: sqlite3.Connection, group: list[_Request]) -> None:
        soft = all(request.soft for request in group)
        try:
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if soft else 'FULL'}")
            connection.execute("BEGIN IMMEDIATE")
            for request in group:
                connection.execute("SAVEPOINT work")
                _run(connection, request)
                if not connection.in_transaction:  # the disk refused: SQLite rolled everything back
                    raise sqlite3.OperationalError("the transaction was rolled back")
                if request.error is not None:
                    connection.execute("ROLLBACK TO work")
                connection.execute("RELEASE work")
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            first = next((r.error for r in group if isinstance(r.error, ServiceError)), None)
            for request in group:
                request.error = request.error or first or refusal(error)


def _run(connection: sqlite3.Connection, request: _Request) -> None:
    try:
        request.value = request.work(connection)
    except (sqlite3.OperationalError, sqlite3.InternalError) as error:
        request.error = refusal(error)
    except Exception as error:  # handed to whoever awaits: the thread serves the others
        request.error = error
