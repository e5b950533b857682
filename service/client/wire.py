"""HTTP/1.1 over sockets that never block: receives a `Call`, hands on a `Reply`, says what it waits for.

`connect` and `Connection.exchange` are generators that yield what a socket must get ready for; whoever
drives them waits in its own way (poll, an event loop), so that one implementation serves threads and
asyncio, TCP, TLS and Unix sockets. Bodies are sent from the caller's memory and received into it. A reply
that comes before the body is sent ends the sending.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from service.client.device import Bytes, OnDevice, nbytes_of, on_host
from service.client.errors import ConnectionFailed, GemmError

_HANDLES = re.compile(r"[?&](b|a|c|bias|out)=handle(?::|%3A)([A-Za-z0-9._-]+)")
_BUFFER = 65536
_VECTORS = 64  # buffers in one sendmsg, well below IOV_MAX
_PIECE = 1 << 20  # bytes in one TLS record run


class Need(NamedTuple):
    """A socket, by descriptor, and what it must get ready for."""

    descriptor: int
    read: bool
    write: bool


@dataclass(frozen=True, slots=True)
class Head:
    """A reply's status and headers, their names in lower case."""

    status: int
    headers: dict[str, str]


#: Decides from the head where a body goes; None collects it. Not asked for a body that is in place already.
Sink = Callable[[Head], memoryview | None]


class Call(msgspec.Struct, frozen=True, eq=False):
    """A request: `target` is path and query, encoded; `parts` are the body, sent one after the other.

    `into` is the caller's memory for the result, where `sink` will take it to; a path that writes there itself
    needs to know it first.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    parts: tuple[Bytes, ...] = ()
    sink: Sink | None = None
    idempotent: bool = True
    into: memoryview | OnDevice | None = None

    @property
    def nbytes(self) -> int:
        """Length of the body."""
        return sum(map(nbytes_of, self.parts))


@dataclass(slots=True)
class Reply:
    """What came back. `body` is empty where a sink took it; `in_place`: the result is where the caller wants it."""

    head: Head
    body: bytes = b""
    reusable: bool = True
    in_place: bool = False

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.head.status


Waiting = Generator[Need, None, Any]
Address = tuple[int, Any]  # family, address


@dataclass(slots=True)
class Connection:
    """One connection; `used` counts its exchanges."""

    sock: socket.socket
    used: int = 0
    answered: bool = False
    _buffer: bytearray = field(default_factory=lambda: bytearray(_BUFFER))
    _have: int = 0
    _at: int = 0

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def exchange(self, call: Call, authority: str, headers: tuple[tuple[str, str], ...]) -> Waiting:
        """Send the request, receive the reply. Returns a Reply."""
        self._have = self._at = 0
        self.answered = False
        self.used += 1
        whole = yield from self._send([_head(call, authority, headers), *map(on_host, call.parts)])
        while True:
            head, version = yield from self._receive_head()
            if head.status >= 200:
                break
        reply = yield from self._receive_body(call, head)
        reply.reusable = whole and _kept_open(head, version)
        return reply

    def _send(self, parts: list[bytes | memoryview]) -> Generator[Need, None, bool]:
        """Send all parts; False where the reply began first."""
        views = [view.cast("B") for part in parts if (view := memoryview(part)).nbytes]
        while views:
            try:
                sent = self._push(views)
            except (BlockingIOError, ssl.SSLWantWriteError):
                yield Need(self.sock.fileno(), True, True)
                if self._readable():
                    return False
                continue
            except ssl.SSLWantReadError:
                yield Need(self.sock.fileno(), True, False)
                continue
            except (BrokenPipeError, ConnectionResetError):
                # The service may have answered before it closed; what it said is in the receive buffer.
                return False
            while sent:
                if sent < len(views[0]):
                    views[0] = views[0][sent:]
                    break
                sent -= len(views.pop(0))
        return True

    def _push(self, views: list[memoryview]) -> int:
        if isinstance(self.sock, ssl.SSLSocket):
            return self.sock.send(views[0][:_PIECE])
        return self.sock.sendmsg(views[:_VECTORS])

    def _readable(self) -> bool:
        """Whether bytes (or the end) have arrived; TLS has traffic of its own, so there it isn't asked."""
        if isinstance(self.sock, ssl.SSLSocket):
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _receive(self, view: memoryview) -> Generator[Need, None, int]:
        """Some bytes into `view`; 0 at the end."""
        while True:
            try:
                return self.sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                yield Need(self.sock.fileno(), True, False)
            except ssl.SSLWantWriteError:
                yield Need(self.sock.fileno(), False, True)
            except OSError as error:
                raise ConnectionFailed(
                    f"the connection broke: {error.strerror or error}", sent=True
                ) from None

    def _more(self) -> Generator[Need, None, None]:
        """More bytes into the buffer, whose consumed part is dropped where there is no space."""
        if self._have == len(self._buffer):
            if self._at == 0:
                raise GemmError(f"a line or head of the reply is longer than {_BUFFER} bytes")
            rest = self._buffer[self._at : self._have]
            self._buffer[: len(rest)] = rest
            self._at, self._have = 0, len(rest)
        got = yield from self._receive(memoryview(self._buffer)[self._have :])
        if not got:
            raise ConnectionFailed(
                "the service closed the connection before its reply was complete", sent=True
            )
        self.answered = True
        self._have += got

    def _until(self, mark: bytes) -> Generator[Need, None, bytes]:
        """Bytes up to `mark`, which is dropped."""
        searched = self._at
        while (end := self._buffer.find(mark, searched, self._have)) < 0:
            behind = self._have - self._at
            yield from self._more()
            searched = max(self._at, self._at + behind - len(mark) + 1)
        found = bytes(self._buffer[self._at : end])
        self._at = end + len(mark)
        return found

    def _receive_head(self) -> Generator[Need, None, tuple[Head, str]]:
        lines = (yield from self._until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        status = rest[:3]
        if not version.startswith("HTTP/1.") or not status.isdigit():
            raise GemmError("what answered doesn't speak HTTP/1.1")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Head(int(status), headers), version

    def _receive_body(self, call: Call, head: Head) -> Generator[Need, None, Reply]:
        if call.method == "HEAD" or head.status in (204, 304):
            return Reply(head)
        if "chunked" in head.headers.get("transfer-encoding", "").lower():
            return Reply(head, (yield from self._chunks()))
        length = head.headers.get("content-length")
        if length is None:
            body = yield from self._to_the_end()
            return Reply(head, body)
        taken = call.sink(head) if call.sink is not None else None
        if taken is None:
            whole = bytearray(int(length))
            yield from self._fill(memoryview(whole))
            return Reply(head, bytes(whole))
        if taken.nbytes != int(length):
            raise GemmError(f"the service sent {length} bytes where its headers describe {taken.nbytes}")
        yield from self._fill(taken)
        return Reply(head)

    def _fill(self, view: memoryview) -> Generator[Need, None, None]:
        """Fill `view` with the next bytes: the buffered ones first, then straight from the socket."""
        at = min(self._have - self._at, len(view))
        if at:  # an empty view may be read-only
            view[:at] = memoryview(self._buffer)[self._at : self._at + at]
            self._at += at
        while at < len(view):
            got = yield from self._receive(view[at:])
            if not got:
                raise ConnectionFailed(f"the reply was cut short after {at} of {len(view)} bytes", sent=True)
            at += got

    def _chunks(self) -> Generator[Need, None, bytes]:
        body = bytearray()
        while True:
            size = int((yield from self._until(b"\r\n")).partition(b";")[0], 16)
            if size == 0:
                break
            piece = bytearray(size)
            yield from self._fill(memoryview(piece))
            body += piece
            yield from self._until(b"\r\n")
        while (yield from self._until(b"\r\n")):  # trailers
            pass
        return bytes(body)

    def _to_the_end(self) -> Generator[Need, None, bytes]:
        body = bytearray(self._buffer[self._at : self._have])
        while got := (yield from self._receive(memoryview(self._buffer))):
            body += self._buffer[:got]
        return bytes(body)

    def stale(self) -> bool:
        """Whether the service has closed an idle connection (or sent what nobody asked for)."""
        try:
            self.sock.recv(1, 0 if isinstance(self.sock, ssl.SSLSocket) else socket.MSG_PEEK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        return True


def connect(addresses: list[Address], tls: ssl.SSLContext | None, name: str) -> Waiting:
    """Open a connection to the first address that takes it. Returns a Connection."""
    failure = ConnectionFailed(f"{name} has no address", sent=False)
    for family, address in addresses:
        try:
            return (yield from _connect(family, address, tls, name))
        except ConnectionFailed as error:
            failure = error
    raise failure


def _connect(family: int, address: Any, tls: ssl.SSLContext | None, name: str) -> Waiting:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        while code == errno.EINPROGRESS:
            yield Need(sock.fileno(), False, True)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            where = name if family == socket.AF_UNIX else f"{name} port {address[1]}"
            raise ConnectionFailed(f"can't connect to {where}: {os.strerror(code)}", sent=False)
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
            yield from _handshake(sock, name)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


def _handshake(sock: ssl.SSLSocket, name: str) -> Generator[Need, None, None]:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            yield Need(sock.fileno(), True, False)
        except ssl.SSLWantWriteError:
            yield Need(sock.fileno(), False, True)
        except OSError as error:
            raise ConnectionFailed(f"TLS with {name} failed: {error.strerror or error}", sent=False) from None
        else:
            return


def affinity(target: str) -> str:
    """The handle by which a request is best sent, for proxies and for clients of several fronts; "" for none.

    That of the path, else of B, which is what products share; else of another operand, or of what D is kept as.
    """
    if target.startswith("/tensors/"):
        return target[len("/tensors/") :].partition("?")[0]
    if "handle" not in target:
        return ""
    found = dict(_HANDLES.findall(target))
    return next((found[name] for name in ("b", "a", "c", "bias", "out") if name in found), "")


def _head(call: Call, authority: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = [f"{call.method} {call.target} HTTP/1.1", f"host: {authority}"]
    lines += [f"{name}: {value}" for name, value in (*headers, *call.headers)]
    if key := affinity(call.target):
        lines.append(f"x-gemm-affinity: {key}")
    if call.parts or call.method in ("POST", "PUT"):
        lines.append(f"content-length: {call.nbytes}")
    text = "\r\n".join(lines)
    if text.count("\r") != len(lines) - 1 or text.count("\n") != len(lines) - 1:
        raise ValueError("a line break in a header or target")
    return text.encode("latin-1") + b"\r\n\r\n"


def _kept_open(head: Head, version: str) -> bool:
    connection = head.headers.get("connection", "").lower()
    framed = (
        "content-length" in head.headers or "transfer-encoding" in head.headers or head.status in (204, 304)
    )
    return framed and "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)
