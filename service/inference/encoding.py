"""Compressed bodies: receives a transfer, hands on what it expands to; and pieces of a reply, compressed.

What a body expands to is bounded before it is held: a megabyte of zeros fits in a kilobyte. `deflate` is the
zlib form, as HTTP means it. Long pieces are worked on in a thread, where zlib runs beside the event loop.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from service.decode import Arriving
from service.errors import ServiceError
from service.transfer import Transfer

#: zlib's name for each form: the largest window, and 16 for gzip's frame.
_WINDOW = {"gzip": 31, "deflate": 15}
#: Accept-Encoding that names one, with or without a weight (RFC 9110, 12.4.2).
_ONE_ENCODING = re.compile(r"([a-z]+)\s*(?:;\s*q=([01](?:\.\d{0,3})?))?")
#: The fastest level: elements of matrices hardly shrink, whatever is spent on them.
_LEVEL = 1
_READ = 1 << 16
_EXPAND = 1 << 20
#: Pieces shorter than this are cheaper to work on than to hand over to a thread.
_SHORT = 1 << 13


class Body(Arriving, Protocol):
    """One that brings tensors too."""

    async def receive_into(self, *views: memoryview) -> int: ...
    async def finish(self) -> None: ...


def body_of(transfer: Transfer, limit: int) -> Body:
    """The body as it was before the client compressed it; at most `limit` bytes."""
    transfer.bound(limit)
    encoding = (transfer.header(b"content-encoding") or "identity").strip().lower()
    if encoding in ("", "identity"):
        return transfer
    if encoding not in _WINDOW:
        raise ServiceError(
            "unsupported_media_type",
            f"Content-Encoding {encoding[:40]!r} isn't one of gzip, deflate, identity",
            field="content-encoding",
        )
    return Expanded(transfer, encoding, limit)


class Expanded:
    """What a compressed body holds."""

    content_length: int | None = None

    def __init__(self, transfer: Transfer, encoding: str, limit: int) -> None:
        self._transfer = transfer
        self._encoding = encoding
        self._limit = limit
        self._zlib = zlib.decompressobj(_WINDOW[encoding])
        self._packed = b""
        self._rest = memoryview(b"")
        self._expanded = 0

    async def receive_into(self, *views: memoryview) -> int:
        """Fill all `views`."""
        wanted = 0
        for view in views:
            wanted += len(view)
            if await self.fill(view) < len(view):
                raise ServiceError(
                    "malformed", f"the body ends after {self._expanded} expanded bytes", field="body"
                )
        return wanted

    async def fill(self, view: memoryview) -> int:
        """As much of the rest as there is, at most the view; the number of bytes."""
        at = 0
        while at < len(view) and await self.more():
            n = min(len(self._rest), len(view) - at)
            view[at : at + n] = self._rest[:n]
            self._rest = self._rest[n:]
            at += n
        return at

    async def more(self) -> bool:
        """Whether anything is left."""
        while not self._rest:
            if self._zlib.eof and not await self._next_member():
                return False
            if not self._packed:
                self._packed = await self._read()
                if not self._packed:
                    raise ServiceError("malformed", "the compressed body is cut short", field="body")
            await self._expand()
        return True

    async def finish(self) -> None:
        """Refuse what follows."""
        if await self.more():
            raise ServiceError("malformed", "the body goes on after its tensors", field="body")

    async def _expand(self) -> None:
        packed, self._packed = self._packed, b""
        try:
            if len(packed) < _SHORT:
                piece = self._zlib.decompress(packed, _EXPAND)
            else:
                piece = await asyncio.to_thread(self._zlib.decompress, packed, _EXPAND)
        except zlib.error:
            raise ServiceError("malformed", f"the body isn't {self._encoding}", field="body") from None
        self._packed = self._zlib.unconsumed_tail
        self._rest = memoryview(piece)
        self._expanded += len(piece)
        if self._expanded > self._limit:
            raise ServiceError(
                "too_large", "the body expands beyond the limit", field="body", limit=self._limit
            )

    async def _next_member(self) -> bool:
        """Go on to gzip's next member; False at the body's end."""
        rest = self._zlib.unused_data or await self._read()
        if not rest:
            return False
        if self._encoding != "gzip":
            raise ServiceError("malformed", "bytes follow the compressed body", field="body")
        self._zlib = zlib.decompressobj(_WINDOW[self._encoding])
        self._packed = rest
        return True

    async def _read(self) -> bytes:
        piece = bytearray(_READ)
        n = await self._transfer.fill(memoryview(piece))
        return bytes(piece[:n])


def reply_encoding(accept: str | None) -> str | None:
    """The encoding to reply in, None for as it is.

    A client that names one encoding wants it. HTTP libraries name all they know on every request, and to
    compress elements costs more than to send them, so a list is answered as it is.
    """
    named = _ONE_ENCODING.fullmatch((accept or "").strip().lower())
    return named[1] if named and named[1] in _WINDOW and float(named[2] or 1) > 0 else None


async def compressed(pieces: Iterable[bytes | memoryview], encoding: str) -> AsyncIterator[bytes]:
    """The pieces in the encoding's form."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    for piece in pieces:
        packed = (
            packer.compress(piece) if len(piece) < _SHORT else await asyncio.to_thread(packer.compress, piece)
        )
        if packed:
            yield packed
    yield packer.flush()
