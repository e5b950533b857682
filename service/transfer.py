"""A request's bytes in and out: receives an ASGI scope with its receive and send, hands on `Transfer`.

Under `service.protocol.GemmProtocol` a large body goes from the socket straight to where it belongs, and the
reply from there to the socket. Under any other ASGI server the same calls work with a copy each way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any, Protocol

from service.errors import ServiceError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

#: Key of the native side in `scope["extensions"]`.
EXTENSION = "gemm.transfer"

#: Bytes of one piece of a reply: the fastest size measured, and what a slow reader keeps pinned at once.
CHUNK = 1 << 20


class ClientGone(Exception):
    """The connection ended before the exchange did; there is nobody to answer."""


class Native(Protocol):
    """What the protocol class offers beyond ASGI."""

    @property
    def gone(self) -> bool:
        """The connection is lost."""

    async def receive_into(self, views: tuple[memoryview, ...]) -> None:
        """Fill the views with the next bytes of the body."""

    async def wait_gone(self) -> None:
        """Return when the connection is lost."""

    def when_gone(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the connection is lost, unless what is returned was called before."""

    def on_drained(self, callback: Callable[[], None]) -> None:
        """Call back once no byte given so far is referred to: sent, or the connection is lost."""

    def abort(self) -> None:
        """Cut the connection now."""


class Transfer:
    """One request's way in and out. The body is read once, front to back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.headers = joined(scope["headers"])
        self.content_length = _content_length(self.headers)
        self.received = 0
        self.started = False
        self._receive = receive
        self._send = send
        self._native: Native | None = (scope.get("extensions") or {}).get(EXTENSION)
        self._rest = memoryview(b"")
        self._more = True
        self._gone = False

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send) -> Transfer:
        """The transfer of a request."""
        return cls(scope, receive, send)

    @property
    def gone(self) -> bool:
        """The client left, as far as is known."""
        return self._gone or (self._native is not None and self._native.gone)

    def header(self, name: bytes) -> str | None:
        """A request header's text; `name` in lower case."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def bound(self, limit: int, *, field: str = "body") -> None:
        """Refuse a declared length above `limit`, before any of it is read."""
        if self.content_length is not None and self.content_length > limit:
            raise ServiceError(
                "too_large",
                f"a body of {self.content_length} bytes is above the limit",
                field=field,
                limit=limit,
            )

    async def receive_into(self, *views: memoryview) -> int:
        """Fill all `views` with the next bytes of the body, in order."""
        wanted = sum(map(len, views))
        if self.content_length is not None and self.received + wanted > self.content_length:
            raise ServiceError(
                "malformed",
                f"the body is too short: it has {self.content_length} bytes, "
                f"of which {self.received + wanted} or more are needed",
                field="body",
            )
        if self._native is not None and self.content_length is not None:
            await self._native.receive_into(views)
            self.received += wanted
        else:
            for view in views:
                await self._fill(view)
        return wanted

    async def read(self, nbytes: int) -> bytes:
        """The next `nbytes` of the body; for short pieces."""
        piece = bytearray(nbytes)
        await self.receive_into(memoryview(piece))
        return bytes(piece)

    async def fill(self, view: memoryview) -> int:
        """As much of the body's rest as there is, at most the view; the number of bytes."""
        if self.content_length is not None:
            return await self.receive_into(view[: self.content_length - self.received])
        at = 0
        while at < len(view) and await self._refill():
            at += self._move(view[at:])
        return at

    async def read_all(self, limit: int) -> bytearray:
        """The whole rest of the body, refused where it is longer than `limit`; for short bodies."""
        self.bound(limit)
        size = limit if self.content_length is None else self.content_length - self.received
        whole = bytearray(size)
        nbytes = await self.fill(memoryview(whole))
        if await self.more():
            raise ServiceError("too_large", "the body is above the limit", field="body", limit=limit)
        del whole[nbytes:]
        return whole

    async def more(self) -> bool:
        """Whether the body goes on."""
        if self.content_length is not None:
            return self.content_length > self.received
        return await self._refill()

    async def finish(self) -> None:
        """Refuse bytes that follow what was asked for."""
        if await self.more():
            raise ServiceError(
                "malformed", f"the body goes on after its {self.received} bytes of tensors", field="body"
            )

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, chunk: bytes | bytearray, *, more: bool = True) -> None:
        """Send a piece of the reply that nobody will change."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})

    async def write_pieces(self, pieces: Iterable[bytes], last: bytes) -> None:
        """Send pieces of which each takes a while to make, then the `last`; stops where the client left."""
        for piece in pieces:
            await self.write(piece)
            await asyncio.sleep(0)  # others' turn: a client that reads fast never makes `write` wait
            if self.gone:
                return
        await self.write(last, more=False)

    async def write_view(self, view: memoryview, *, more: bool = False) -> None:
        """Send memory that may change after `on_drained`, in pieces of CHUNK; stops where the client left."""
        for start in range(0, len(view), CHUNK):
            piece = view[start : start + CHUNK]
            last = start + CHUNK >= len(view) and not more
            body = piece if self._native is not None else bytes(piece)
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            if self.gone:
                return
        if not len(view) and not more:
            await self.write(b"", more=False)

    def on_drained(self, callback: Callable[[], None]) -> None:
        """Call back when memory given to `write_view` may change; only then may a slot be freed."""
        if self._native is not None:
            self._native.on_drained(callback)
        else:
            callback()

    def abort(self) -> None:
        """Cut the connection: a reply that can't be finished must not look finished."""
        if self._native is not None:
            self._native.abort()

    async def watch_disconnect(self) -> None:
        """Return when the client leaves; for use after the body was read, and safe to cancel."""
        if self._native is not None:
            await self._native.wait_gone()
            return
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True

    def when_gone(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the client leaves, as `watch_disconnect` has it; what is returned stops that."""
        if self._native is not None:
            return self._native.when_gone(callback)
        watch = asyncio.ensure_future(self.watch_disconnect())
        watch.add_done_callback(lambda task: None if task.cancelled() else callback())

        def stop() -> None:
            watch.cancel()

        return stop

    async def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            if not await self._refill():
                raise ServiceError(
                    "malformed", f"the body is cut short: it ends after {self.received} bytes", field="body"
                )
            at += self._move(view[at:])

    def _move(self, view: memoryview) -> int:
        """Copy what is here of `_rest` into the view."""
        n = min(len(self._rest), len(view))
        view[:n] = self._rest[:n]
        self._rest = self._rest[n:]
        self.received += n
        return n

    async def _refill(self) -> bool:
        """Have bytes in `_rest`; False at the end of the body."""
        while not self._rest:
            if not self._more:
                return False
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                raise ClientGone
            self._rest = memoryview(message.get("body", b""))
            self._more = message.get("more_body", False)
        return True


def joined(headers: Collection[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Headers by name; one that came several times is a list, as RFC 9110 has it."""
    found = dict(headers)
    if len(found) == len(headers):
        return found
    lists: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        lists.setdefault(name, []).append(value)
    return {name: b", ".join(values) for name, values in lists.items()}


def _content_length(headers: dict[bytes, bytes]) -> int | None:
    """Declared length; None for a chunked body. No header at all means no body."""
    if b"transfer-encoding" in headers:
        return None
    text = headers.get(b"content-length", b"0")
    if not text.isdigit() or len(text) > 19:
        raise ServiceError("malformed", "Content-Length isn't a whole number", field="content-length")
    return int(text)
