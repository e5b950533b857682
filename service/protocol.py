"""HTTP/1.1 with the bounds that ASGI can't set: receives a socket's bytes, hands on `Exchange`s.

On top of uvicorn's protocol, for uvloop: header bytes and time (431, 408), a least body rate (408), a write
that stalls (abort), keep-alive; large bodies go from the socket into the arena (service.direct); memory of a
reply is free when the transport holds nothing more of it. One sweep for all connections keeps the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.bounds import HeaderMeter, Limits, Patience, Seen, Verdict
from service.direct import Filler, Head, Sink
from service.errors import ServiceError
from service.exchange import DIRECT_BYTES, Exchange
from service.transfer import EXTENSION, ClientGone

#: Requests of one connection that may wait behind the one being answered.
PIPELINE = 64

#: After a half-close, seconds until the second probe tells a client that listens from one that left.
PROBE_SECONDS = 0.05


#: SO_LINGER on, 0 seconds: close by reset.
_RESET = struct.pack("ii", 1, 0)


class Sweep:
    """The one timer: looks at every connection each interval, and rests while there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self.loop = loop
        self.interval = interval
        self._connections: set[GemmProtocol] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: GemmProtocol) -> None:
        """Look at `connection` from now on."""
        self._connections.add(connection)
        if self._timer is None:
            self._timer = self.loop.call_later(self.interval, self._tick)

    def discard(self, connection: GemmProtocol) -> None:
        """Forget it."""
        self._connections.discard(connection)

    def _tick(self) -> None:
        now = self.loop.time()
        for connection in tuple(self._connections):
            connection.sweep(now)
        self._timer = self.loop.call_later(self.interval, self._tick) if self._connections else None


class GemmProtocol(HttpToolsProtocol):
    """One connection. Use `with_limits` to make the class that uvicorn takes as `http`."""

    limits: ClassVar[Limits] = Limits()
    #: Called with the status of a request that was refused before the application saw it.
    on_refusal: ClassVar[tuple[Callable[[int], None], ...]] = ()
    _sweep: ClassVar[Sweep | None] = None
    #: The exchange parsed last; the base makes it, and makes it None before the first.
    cycle: Exchange

    @classmethod
    def with_limits(
        cls, limits: Limits, on_refusal: Callable[[int], None] | None = None
    ) -> type[GemmProtocol]:
        """A class of its own for one server."""
        hooks = () if on_refusal is None else (on_refusal,)
        return type(cls.__name__, (cls,), {"limits": limits, "on_refusal": hooks, "_sweep": None})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lost = asyncio.Event()
        self.direct: Filler | None = None
        #: The exchange whose application runs.
        self.active: Exchange | None = None
        self._filling: asyncio.Future[None] | None = None
        self._drained: list[Callable[[], None]] = []
        self._when_lost: list[Callable[[], None]] = []
        self._refusal: ServiceError | None = None
        self._head = Head(self)
        self._eof = False
        self._muted = False
        self._headers = HeaderMeter(self.limits.header_bytes)
        self._patience = Patience(self.limits, self.loop.time())

    # -- connection ------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_protocol(self._head)
        # Paused while anything is unsent, so that resume_writing says "drained". uvloop's TLS pauses at `high`,
        # its plain transport above it.
        transport.set_write_buffer_limits(high=int(self.scheme == "https"), low=0)
        cls = type(self)
        if cls._sweep is None or cls._sweep.loop is not self.loop:
            cls._sweep = Sweep(self.loop, self.limits.interval)
        cls._sweep.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._sweep is not None:
            self._sweep.discard(self)
        for exchange in (self.active, *(exchange for exchange, _ in self.pipeline)):
            if exchange is not None and not exchange.response_complete:
                exchange.disconnected = True
                exchange.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self.lost.set()
        for callback in tuple(self._when_lost):
            callback()
        self._end_fill(ClientGone())
        self._run_drained()

    def when_lost(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when the connection is lost, soon where it is; what is returned stops that."""
        if self.lost.is_set():
            return self.loop.call_soon(callback).cancel
        self._when_lost.append(callback)
        return lambda: self._when_lost.remove(callback)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. It may still read, so what it asked for is answered."""
        self._eof = True
        latest: Exchange | None = self.cycle
        if not self.transport.can_write_eof():
            return False  # TLS has no half-close: the connection is over
        if self.lost.is_set() or self._patience.lingering or latest is None or latest.response_complete:
            return False
        if latest.more_body:
            self._fail(
                latest, ServiceError("malformed", "the body is cut short: the client ended it", field="body")
            )
        elif latest.chunked_encoding and latest.response_started:
            return False  # a stream of events has no end that a client would wait for
        else:
            latest.keep_alive = False
            self._probe()
            self.loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def shutdown(self) -> None:
        """Graceful end: idle connections close now, others after their response."""
        if self.active is None and not self.pipeline:
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self._run_drained()

    # -- parsing ------------------------------------

    def data_received(self, data: bytes | memoryview) -> None:
        """Parse `data`, which may change afterwards."""
        if self._refusal is not None or self._patience.lingering:
            return
        between = not self._headers.open and (self.cycle is None or not self.cycle.more_body)
        self._headers.before()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._unparsable(self._refusal or ServiceError("malformed", "this isn't HTTP/1.1"))
            return
        if not self._headers.fed(len(data), between=between):
            self._refuse(self._headers_too_large())

    def _parse(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()
                if data:
                    continue
            return

    def _decline_upgrade(self) -> None:
        """Another protocol was offered. We go on in this one, though the parser takes it as accepted."""
        self.parser = self._new_parser()
        exchange = self.cycle
        if not exchange.more_body:
            return
        length = exchange.content_length
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        self._muted = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
        self._muted = False

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _should_upgrade(self) -> bool:
        return False

    def on_message_begin(self) -> None:
        if self._muted:
            return
        super().on_message_begin()
        self._headers.begin()
        self._patience.headers_begin(self.loop.time())

    def on_url(self, url: bytes) -> None:
        if self._muted:
            return
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._muted:
            return
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value.rstrip(b" \t"))  # the parser drops only what stands before it

    def _count_header(self, nbytes: int) -> None:
        if not self._headers.parsed(nbytes):
            self._refusal = self._headers_too_large()
            raise self._refusal

    def _headers_too_large(self) -> ServiceError:
        limit = self.limits.header_bytes
        return ServiceError(
            "headers_too_large", "the headers are above the limit", field="headers", limit=limit
        )

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        self._headers.end()
        self._patience.headers_end()
        if len(self.pipeline) >= PIPELINE:
            self._refusal = ServiceError(
                "malformed", "too many requests wait on this connection", limit=PIPELINE
            )
            raise self._refusal
        version = self.parser.get_http_version()
        target = httptools.parse_url(self.url)
        path = target.path.decode("ascii")
        scope: Any = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = self.root_path + (unquote(path) if "%" in path else path)
        scope["raw_path"] = self.root_path.encode("ascii") + target.path
        scope["query_string"] = target.query or b""
        exchange = self._exchange(keep_alive=version != "1.0" and self.parser.should_keep_alive())
        scope["extensions"] = {EXTENSION: exchange}
        waits = self.cycle is not None and not self.cycle.response_complete
        self.cycle = exchange
        if (exchange.content_length or 0) >= DIRECT_BYTES:
            self.flow.pause_reading()  # the application says where the body goes
        if waits:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self._application()))
        else:
            self._start_asgi_task(exchange, self._application())

    def _exchange(self, *, keep_alive: bool) -> Exchange:
        return Exchange(
            self,
            _declared_length(self.headers),
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )

    def _application(self) -> Any:
        limit = self.limit_concurrency
        busy = limit is not None and (len(self.connections) >= limit or len(self.tasks) >= limit)
        return service_unavailable if busy else self.app

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.active = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self.cycle.received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self.cycle.content_length != 0:
            return  # so the parser takes it; _decline_upgrade knows that the body is still to come
        self.cycle.more_body = False
        self.cycle.message_event.set()

    # -- the body past the parser ------------------------------------

    async def fill(self, views: list[memoryview]) -> None:
        """Fill `views` with the next bytes of the active exchange's body; none is empty."""
        if self.direct is None:
            self.direct = Filler(self)
            self.flow.pause_reading()
            self.transport.set_protocol(self.direct)
        self._filling = self.loop.create_future()
        self.direct.fill(views)
        self.flow.resume_reading()
        try:
            await self._filling
        finally:
            # Whatever happened, the views may be used for something else from here on.
            if self.direct is not None:
                self.flow.pause_reading()
                self.direct.forget()

    def filled(self) -> None:
        """The Filler's views are full."""
        assert self.direct is not None
        exchange = self.active
        assert exchange is not None
        exchange.received += self.direct.received
        self.direct.received = 0
        self.flow.pause_reading()
        if exchange.content_length == exchange.received:
            # The old parser still waits for this body; what follows is a new message.
            self.direct = None
            self.parser = self._new_parser()
            self.transport.set_protocol(self._head)
            self.on_message_complete()
            self.flow.resume_reading()  # to see the client leave
        self._end_fill(None)

    def _end_fill(self, error: Exception | None) -> None:
        if self._filling is not None and not self._filling.done():
            if error is None:
                self._filling.set_result(None)
            else:
                self._filling.set_exception(error)
        self._filling = None

    # -- responses ------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        done, self.active = self.active, None
        if self.transport.is_closing():
            return
        if done is not None and done.lingers:
            self._linger()
            return
        if self.pipeline:
            exchange, app = self.pipeline.pop()
            self._start_asgi_task(exchange, app)
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
            return
        elif self._eof:
            self.transport.close()
            return
        else:
            self._patience.idle(self.loop.time())
        if not self.pipeline:
            self.flow.resume_reading()

    def on_drained(self, callback: Callable[[], None]) -> None:
        """Call back once the transport refers to nothing of what was written."""
        if self.lost.is_set() or not self.transport.get_write_buffer_size():
            callback()
        else:
            self._drained.append(callback)

    def _run_drained(self) -> None:
        callbacks, self._drained = self._drained, []
        for callback in callbacks:
            callback()

    # -- refusals ------------------------------------

    def _fail(self, exchange: Exchange, error: ServiceError) -> None:
        """The rest of the exchange's body won't come."""
        exchange.fail(error)
        self._end_fill(error)

    def _unparsable(self, error: ServiceError) -> None:
        """The parser gave up: within a body its exchange answers, else a refusal does."""
        latest: Exchange | None = self.cycle
        if not self._headers.open and self._refusal is None and latest is not None and latest.more_body:
            if latest.response_complete:
                self.transport.close()
                return
            self._patience.linger(self.loop.time())
            self._fail(latest, ServiceError("malformed", "the chunked body can't be parsed", field="body"))
            return
        self._refuse(error)

    def _refuse(self, error: ServiceError) -> None:
        """Answer `error` once what came before it is answered, and end."""
        self._refusal = error
        self._headers.end()
        self._patience.headers_end()
        self.flow.pause_reading()
        if self.active is None and not self.pipeline:
            self._write_refusal(error)

    def _write_refusal(self, error: ServiceError) -> None:
        for tell in self.on_refusal:
            tell(error.status)
        body = error.body()
        lines = [STATUS_LINE[error.status]]
        lines += [b"%s: %s\r\n" % header for header in self.server_state.default_headers]
        lines.append(b"content-type: application/problem+json\r\ncontent-length: %d\r\n" % len(body))
        lines += [b"connection: close\r\n\r\n", body]
        self.transport.write(b"".join(lines))
        self._linger()

    def _linger(self) -> None:
        """End our side; drop what the client sends for a while, so that no reset destroys what we said."""
        self._patience.linger(self.loop.time())
        if self._eof:
            self.transport.close()
            return
        self.direct = None
        self.flow.pause_reading()
        self.transport.set_protocol(Sink(self))
        if self.transport.can_write_eof():  # TLS can't end one side; its client goes by the reply's length
            self.transport.write_eof()
        self.flow.resume_reading()

    def _probe(self) -> None:
        """Tell a client that closed only its sending side from one that left, which answers by reset.

        An interim response may come at any time before the final one, and every client must skip it.
        """
        exchange = self.active
        if exchange is None or exchange.response_started or self.lost.is_set() or self.transport.is_closing():
            return
        if exchange.scope["http_version"] == "1.1" and not self.transport.get_write_buffer_size():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def cut(self) -> None:
        """End the connection now, by reset: neither we nor the kernel keep what the client doesn't read."""
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # -- times ------------------------------------

    def sweep(self, now: float) -> None:
        """Hold the connection to its times."""
        verdict = self._patience.look(now, self._seen())
        if verdict is Verdict.CUT:
            self.cut()
        elif verdict is Verdict.CLOSE:
            self.transport.close()
        elif verdict is Verdict.LATE_HEADERS:
            detail, limit = "the headers took longer than the limit", self.limits.header_seconds
            self._refuse(ServiceError("request_timeout", detail, field="headers", limit=limit))
        elif verdict is Verdict.SLOW_BODY:
            rate, limit = self._patience.rate, self.limits.body_bytes_per_second
            detail = f"the body came at {rate:.0f} bytes a second, below the least rate"
            self._fail(self.cycle, ServiceError("request_timeout", detail, field="body", limit=limit))
        elif self._eof:
            self._probe()

    def _seen(self) -> Seen:
        latest: Exchange | None = self.cycle
        body = None
        if latest is not None and latest.more_body:
            body = latest.received + (self.direct.received if self.direct is not None else 0)
        return Seen(
            unsent=0 if self.lost.is_set() else self.transport.get_write_buffer_size(),
            pieces=0 if self.active is None else self.active.sent,
            paused=self.flow.read_paused,
            closing=self.transport.is_closing() or self._refusal is not None,
            body=body,
            awaited=latest is not None and latest.waiting,
        )


def _declared_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """Content-Length, which the parser has checked; None for a chunked body."""
    length = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value)
    return length
