"""Who stored and deleted what: receives changes of the tensor store, hands on one line each to the log `audit`.

A line holds time, action, outcome, owner, the key's public id, handle, ETag, bytes and request id; never a payload
and never a key. It is written whatever the log level. What a job stores after a restart has no key and no request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, Protocol

from service import logs
from service.errors import ServiceError

Action = Literal["store", "delete", "expire"]


class ContentRow(Protocol):
    """A stored content, as service.store has it."""

    @property
    def owner(self) -> str: ...
    @property
    def etag(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


_key: ContextVar[str] = ContextVar("gemm_audit_key", default="")
_log = logs.Log("audit")


def to_file(path: Path) -> None:
    """From here on lines go to `path` (made with mode 0600, appended to, opened again when it was rotated)."""
    logs.own_file("audit", path)


def acting(key_id: str) -> None:
    """The key that this task, and those that it starts, act for."""
    _key.set(key_id)


def changed(action: Action, row: ContentRow, handle: str) -> None:
    """A change that was made: `handle` means this content now, or no longer."""
    _record(action, row.owner, handle, "ok", row.etag, row.nbytes)


@contextlib.contextmanager
def refusals(action: Action, owner: str, handle: str, nbytes: int | None = None) -> Iterator[None]:
    """A refusal within the block is recorded, with its code of service.errors."""
    try:
        yield
    except ServiceError as error:
        _record(action, owner, handle, error.code, None, nbytes)
        raise


def _record(
    action: Action, owner: str, handle: str, outcome: str, etag: str | None, nbytes: int | None
) -> None:
    _log.always(action, outcome=outcome, owner=owner, key=_key.get(), handle=handle, etag=etag, bytes=nbytes)
