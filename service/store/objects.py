"""Tensors as objects of S3: receives bytes in memory, hands on whole, durable objects, and reads them back.

An object is a safetensors file under "tensors/". Large ones go and come in pieces, a few at once; one that
isn't whole is never visible, since S3 shows an object once all its parts are there. Each request is bounded in
time by the client, so what was begun also ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from service.errors import ServiceError
from service.session import SharedUnusable
from service.store import files

#: Bytes of one request; S3 takes parts of 5 MiB and more.
PIECE = 8 << 20
#: Pieces of one tensor that are under way at once.
AT_ONCE = 4
#: Says whose tensors lie beside it.
MARK = "gemm-store.json"
FORMAT = 1
_TENSORS = "tensors"


def mark_of(database: str) -> bytes:
    """What says whose tensors lie here."""
    return json.dumps({"format": FORMAT, "database": database}).encode()


def compare(mark: bytes, database: str, url: str) -> None:
    """SharedUnusable where the mark is of another form or another database."""
    try:
        told = json.loads(mark)
        form, holder = told["format"], told["database"]
    except (ValueError, TypeError, KeyError):
        raise SharedUnusable(f"store: {url}/{MARK} can't be understood") from None
    if form != FORMAT:
        raise SharedUnusable(f"store: {url} has form {form!r}; this service knows {FORMAT}")
    if holder != database:
        raise SharedUnusable(
            f"store: {url} holds the tensors of another database; give this one a prefix of its own"
        )


class ObjectFiles:
    """Objects of a bucket, under a prefix. Credentials and endpoint come from the environment, as AWS names them."""

    writable = True

    def __init__(self, url: str, *, seconds: float) -> None:
        self.url = url
        self.up = False
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
        self._store = S3Store.from_url(
            url,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=seconds / 2),
                "timeout": timedelta(seconds=seconds / 2),
            },
            retry_config={
                "max_retries": 1,
                "retry_timeout": timedelta(seconds=seconds),
                "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1)},
            },
        )

    async def claim(self, database: str) -> None:
        """Make the store this database's, or see that it is. SharedUnusable where it is another's."""
        try:
            await obstore.put_async(self._store, MARK, mark_of(database), mode="create")
        except AlreadyExistsError:
            await self._check(database)
        except (BaseError, OSError) as error:
            raise SharedUnusable(f"store: can't write to {self.url}: {_line(error)}") from None
        self.up = True

    async def _check(self, database: str) -> None:
        try:
            text = bytes(await (await obstore.get_async(self._store, MARK)).bytes_async())
        except (BaseError, OSError) as error:
            raise SharedUnusable(f"store: can't read {self.url}/{MARK}: {_line(error)}") from None
        compare(text, database, self.url)

    async def write(self, id_: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Put the object: at once where it is small, else in parts."""
        head = files.header(dtype, shape)
        try:
            if len(head) + len(data) <= PIECE:
                await obstore.put_async(self._store, _path(id_), b"".join((head, data)), use_multipart=False)
            else:
                await obstore.put_async(
                    self._store, _path(id_), _pieces(head, data), chunk_size=PIECE, max_concurrency=AT_ONCE
                )
        except (BaseError, OSError) as error:
            raise self._refusal(error) from error
        self.up = True

    async def read_into(self, id_: str, start: int, view: memoryview) -> None:
        """Fill `view`, piece by piece; when it returns, whatever way, nothing more is written to it."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def fetch(at: int) -> None:
            async with turns:
                piece = view[at : at + PIECE]
                got = await obstore.get_range_async(
                    self._store, _path(id_), start=start + at, length=len(piece)
                )
                if len(got) != len(piece):
                    raise EOFError(f"{self.url}/{_path(id_)} ends early")
                piece[:] = memoryview(got)

        try:
            async with asyncio.TaskGroup() as group:
                for at in range(0, len(view), PIECE):
                    group.create_task(fetch(at))
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, FileNotFoundError | EOFError):
                raise error from None
            raise self._refusal(error) from error
        self.up = True

    async def remove(self, id_: str) -> None:
        """Delete the object."""
        try:
            await obstore.delete_async(self._store, _path(id_))
        except FileNotFoundError:
            return
        except (BaseError, OSError) as error:
            raise self._refusal(error) from error

    async def older(self, seconds: float) -> AsyncIterator[list[str]]:
        """Ids of objects that were put more than `seconds` ago, in pages."""
        limit = time.time() - seconds
        try:
            async for page in obstore.list(self._store, _TENSORS):
                old = [o["path"] for o in page if o["last_modified"].timestamp() < limit]
                yield [path.removeprefix(f"{_TENSORS}/").removesuffix(files.SUFFIX) for path in old]
        except (BaseError, OSError) as error:
            raise self._refusal(error) from error

    def _refusal(self, error: BaseException) -> ServiceError:
        self.up = False
        return ServiceError(
            "unavailable", f"the tensors' store can't be used now: {_line(error)}", retry_after=1.0
        )


def _path(id_: str) -> str:
    return f"{_TENSORS}/{id_}{files.SUFFIX}"


def _pieces(head: bytes, data: memoryview) -> Iterator[bytes | memoryview]:
    """The file without a copy of the whole."""
    yield head
    for at in range(0, len(data), PIECE):
        yield data[at : at + PIECE]


def _line(error: BaseException) -> str:
    """An error's first line, which names no more than the address."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
