"""One request and its response: receives parsed pieces from the protocol, hands them to the ASGI application.

Besides ASGI's receive and send it is the `Native` side of `service.transfer`: bodies into memory of the
caller's, and word when memory of a reply is no longer referred to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.errors import ServiceError
from service.transfer import ClientGone

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

    from service.protocol import GemmProtocol

#: Missing parts shorter than this come through the parser: switching costs more than it saves.
DIRECT_BYTES = 1 << 16

#: An unread rest of a body up to this is read and dropped, so that the connection can be used again.
DISCARD_BYTES = 1 << 16


class Corked:
    """A transport that holds a response's head back, so that head and first piece leave in one call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._hold = False
        self._head = b""
        self.is_closing = transport.is_closing

    def hold(self) -> None:
        """The next write is a head: keep it."""
        self._hold = True

    def write(self, data: bytes | memoryview) -> None:
        """Write what is held, then `data`."""
        if self._hold:
            self._hold, self._head = False, bytes(data)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data) if len(data) else (head,))
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write what is held."""
        if self._head and not self._transport.is_closing():
            self.write(b"")
        self._hold, self._head = False, b""

    def close(self) -> None:
        """Close when all is written."""
        self.flush()
        self._transport.close()


class Exchange(RequestResponseCycle):
    """A request on its way. `received` counts its body's bytes from the socket."""

    def __init__(self, protocol: GemmProtocol, content_length: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.protocol = protocol
        self.transport: Any = Corked(self.transport)
        self.content_length = content_length
        self.received = 0
        #: Whether the application waits for bytes of the body: only then is the client held to a rate.
        self.waiting = False
        #: Why the rest of the body won't come.
        self.failure: ServiceError | None = None
        #: The response was complete before the body: drop the rest, then close.
        self.lingers = False
        #: Pieces of the response so far; shows the sweep that writing goes on.
        self.sent = 0
        self._told_end = False

    @property
    def gone(self) -> bool:
        """The connection is lost."""
        return self.disconnected

    @property
    def unread(self) -> int | None:
        """Bytes of the body that the socket still has to bring; None for an unknown number."""
        if not self.more_body:
            return 0
        return None if self.content_length is None else self.content_length - self.received

    def fail(self, error: ServiceError) -> None:
        """The rest of the body won't come: its reader is told, and the connection ends with the reply."""
        self.failure = self.failure or error
        self.keep_alive = False
        self.message_event.set()

    # -- ASGI ------------------------------------

    async def receive(self) -> ASGIReceiveEvent:
        """The next piece of the body; after its end, the disconnect."""
        while True:
            if self.disconnected or self.response_complete:
                return {"type": "http.disconnect"}
            if self.protocol.direct is not None and self.more_body:
                raise RuntimeError("receive_into has begun to read this body")
            if self._told_end:
                await self._wait()
            elif self.body or not self.more_body:
                piece = bytes(self.body)
                self.body = bytearray()
                self._told_end = not self.more_body
                return {"type": "http.request", "body": piece, "more_body": self.more_body}
            else:
                await self._wait_for_body()

    async def send(self, message: ASGISendEvent) -> None:
        """Send a piece of the response. What is left of the body decides whether the connection can go on."""
        if message["type"] == "http.response.start":
            if not self._reusable():
                self.keep_alive = False
            if self.scope["method"] != "HEAD" and any(
                name == b"content-length" for name, _ in message["headers"]
            ):
                self.transport.hold()
        elif self.response_started and self.more_body and not message.get("more_body", False):
            # The base would close at once; with bytes unread that is a reset, which destroys the response.
            self.lingers = not (self.keep_alive and self._reusable()) and not self.disconnected
            self.keep_alive = self.keep_alive or self.lingers
        self.sent += 1
        await super().send(message)

    # -- service.transfer.Native ------------------------------------

    async def receive_into(self, views: tuple[memoryview, ...]) -> None:
        """Fill the views; ClientGone or ServiceError where the body won't come."""
        rest = [view for view in views if len(view)]
        while True:
            rest = self._take(rest)
            if not rest:
                return
            if self.disconnected:
                raise ClientGone
            if self.protocol.direct or sum(map(len, rest)) >= DIRECT_BYTES:
                await self._receive_directly(rest)
                return
            await self._wait_for_body()

    async def wait_gone(self) -> None:
        """Return when the connection is lost."""
        await self.protocol.lost.wait()

    def when_gone(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the connection is lost; what is returned stops that."""
        return self.protocol.when_lost(callback)

    def on_drained(self, callback: Callable[[], None]) -> None:
        """Call back once the transport holds nothing of what was written."""
        self.protocol.on_drained(callback)

    def abort(self) -> None:
        """Cut the connection."""
        self.protocol.cut()

    # -- parts ------------------------------------

    def _reusable(self) -> bool:
        """Whether another request can follow: nothing of the body is left, or little enough to drop."""
        if not self.more_body:
            return True
        unread = self.unread
        small = unread is not None and unread <= DISCARD_BYTES
        return small and not self.waiting_for_100_continue and self.protocol.direct is None

    def _take(self, views: list[memoryview]) -> list[memoryview]:
        """Fill views from what the parser brought; hands on those, or the part, still empty."""
        at, have = 0, memoryview(self.body)
        rest = list(views)
        while rest and at < len(have):
            n = min(len(rest[0]), len(have) - at)
            rest[0][:n] = have[at : at + n]
            at += n
            rest[0] = rest[0][n:]
            if not len(rest[0]):
                rest.pop(0)
        have.release()
        del self.body[:at]
        return rest

    async def _receive_directly(self, views: list[memoryview]) -> None:
        self._ask_for_body()
        if self.failure is not None:
            raise self.failure
        self.waiting = True
        try:
            await self.protocol.fill(views)
        finally:
            self.waiting = False

    async def _wait_for_body(self) -> None:
        """Wait for the parser to bring more, or for news that it won't."""
        if self.failure is not None:
            raise self.failure
        self._ask_for_body()
        self.flow.resume_reading()
        self.waiting = True
        try:
            await self._wait()
        finally:
            self.waiting = False

    async def _wait(self) -> None:
        await self.message_event.wait()
        self.message_event.clear()

    def _ask_for_body(self) -> None:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.waiting_for_100_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
