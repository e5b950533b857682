"""What is asked of a database: receives functions over a session, which take SQL, hands on what they return.

Both databases, SQLite's and PostgreSQL's, take the same statements: ON CONFLICT for OR REPLACE and OR IGNORE,
no numbered parameters, `?` for a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class SharedUnusable(OSError):
    """What fronts share can't be reached, or is another service's: start-up stops."""


class Rows(Protocol):
    """What a statement gave."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Session(Protocol):
    """A connection within a transaction."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object: ...


class Transactions(Protocol):
    """A database.

    Functions run in order of asking (SQLite), or side by side as if in some order (PostgreSQL).
    """

    async def prepare(self, schema: Callable[[Session], None]) -> None:
        """Make tables."""

    async def write(self, work: Callable[[Session], T], *, soft: bool = False) -> T:
        """Run `work` in a transaction of its own; returns once it is committed. It may run more than once.

        `soft`: survives the death of this process, not that of the database's machine.
        """

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run `work`, which only reads, after the writes that returned before."""
