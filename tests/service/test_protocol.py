"""The protocol on real sockets: large bodies, pipelines, half-closes, every limit that cuts somebody off."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.arena import Arena, Slots
from service.bounds import Limits
from service.errors import ServiceError
from service.transfer import ClientGone, Transfer
from tests.service.servers import serving

#: Nobody is cut off because this computer is busy.
LIMITS = Limits(
    header_bytes=4096,
    header_seconds=60,
    body_bytes_per_second=20,
    body_window_seconds=60,
    write_stall_seconds=60,
    keep_alive_seconds=60,
)
#: For those who are to be cut off.
STRICT = replace(
    LIMITS,
    header_seconds=0.4,
    body_bytes_per_second=20_000,
    body_window_seconds=0.4,
    write_stall_seconds=0.5,
    keep_alive_seconds=0.6,
)


class App:
    """Paths of a tiny application; remembers what it saw."""

    def __init__(self) -> None:
        self.slots = Slots(Arena.create(1 << 26))
        self.left: list[str] = []
        self.bodies: list[int] = []
        self.gate = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        transfer = Transfer.of(scope, receive, send)
        assert scope["extensions"]["gemm.transfer"]
        try:
            await getattr(self, scope["path"].strip("/").replace("-", "_"))(transfer, scope)
        except ServiceError as error:
            await answer(transfer, error.body(), error.status)
        except ClientGone:
            self.left.append(scope["path"])

    async def digest(self, transfer: Transfer, scope: Any) -> None:
        """Receive the body into a slot in the pieces that the query names, and answer its SHA-256."""
        assert transfer.content_length is not None
        cuts = [int(cut) for cut in scope["query_string"].decode().split(",") if cut]
        slot = self.slots.allocate(transfer.content_length)
        try:
            view = slot.view(transfer.content_length)
            at = 0
            for cut in cuts:
                at += await transfer.receive_into(view[at : at + cut])
            half = at + (len(view) - at) // 2
            await transfer.receive_into(view[at:half], view[half:half], view[half:])
            await transfer.finish()
            self.bodies.append(len(view))
            await answer(transfer, hashlib.sha256(view).hexdigest().encode())
        finally:
            slot.release()

    async def plain(self, transfer: Transfer, scope: Any) -> None:
        """Read through ASGI's receive."""
        whole = await transfer.read_all(1 << 22)
        await answer(transfer, hashlib.sha256(whole).hexdigest().encode())

    async def refuse(self, transfer: Transfer, scope: Any) -> None:
        transfer.bound(1000)
        await answer(transfer, b"not read")

    async def reply(self, transfer: Transfer, scope: Any) -> None:
        """Answer as many bytes as the query says, from a slot that is wiped when it comes back."""
        size = int(scope["query_string"])
        slot = self.slots.allocate(size, state="reply")
        view = slot.view(size)
        view[:] = bytes([size % 251]) * size

        def wipe() -> None:
            view[:] = bytes(size)
            slot.release()

        try:
            await transfer.start(200, [(b"content-length", str(size).encode())])
            await transfer.write_view(view)
        finally:
            transfer.on_drained(wipe)

    async def empty(self, transfer: Transfer, scope: Any) -> None:
        """Answer nothing."""
        await answer(transfer, b"")

    async def slow(self, transfer: Transfer, scope: Any) -> None:
        """Answer after as many seconds as the query says, or note that the client left."""
        watch = asyncio.ensure_future(transfer.watch_disconnect())
        done, _ = await asyncio.wait({watch}, timeout=float(scope["query_string"]))
        watch.cancel()
        if done:
            raise ClientGone
        await answer(transfer, b"slow")


async def answer(transfer: Transfer, body: bytes, status: int = 200) -> None:
    await transfer.start(status, [(b"content-length", str(len(body)).encode())])
    await transfer.write(body, more=False)


@contextlib.contextmanager
def served_by(limits: Limits) -> Iterator[tuple[App, tuple[str, int], list[int]]]:
    app, refused = App(), []
    with serving(app, limits, refused) as address:
        yield app, address, refused
    assert app.slots.bytes_by_state == {"request": 0, "reply": 0, "tensor": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[App, tuple[str, int], list[int]]]:
    with served_by(LIMITS) as made:
        yield made


@pytest.fixture(scope="module")
def strict() -> Iterator[tuple[App, tuple[str, int], list[int]]]:
    with served_by(STRICT) as made:
        yield made


@pytest.fixture
def app(served: Any) -> App:
    found: App = served[0]
    return found


@pytest.fixture
def address(served: Any) -> tuple[str, int]:
    found: tuple[str, int] = served[1]
    return found


@pytest.fixture
def sock(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=30) as made:
        yield made


@pytest.fixture
def hurried(strict: Any) -> Iterator[socket.socket]:
    """A connection to the server that cuts off soon."""
    with socket.create_connection(strict[1], timeout=30) as made:
        yield made


def read_reply(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One response, read byte by byte as far as its headers go, so that the next one stays on the socket."""
    while True:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = sock.recv(1)
            if not byte:
                raise EOFError(head)
            head += byte
        lines = head.decode().split("\r\n")
        status = int(lines[0].split()[1])
        if status >= 200:
            break
    headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
    body = b""
    while missing := int(headers["content-length"]) - len(body):
        piece = sock.recv(min(missing, 1 << 20))
        assert piece
        body += piece
    return status, headers, body


def ended(sock: socket.socket) -> bool:
    """Whether the server closes within the socket's timeout."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def sha(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def eventually(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- bodies ------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, 65535, 65536, 200_000, 1 << 20, 9_000_001])
@pytest.mark.parametrize("cuts", ["", "8,100", "8,50000,1"])
def test_bodies_arrive_whole_and_the_connection_goes_on(sock: socket.socket, size: int, cuts: str) -> None:
    if size < 50_009 and cuts:
        size += 50_009
    body = os.urandom(size)
    for _ in range(2):
        sock.sendall(post(f"/digest?{cuts}", body))
        assert read_reply(sock)[2] == sha(body)
    sock.sendall(post("/plain", body[:5000]))
    assert read_reply(sock)[2] == sha(body[:5000])


def test_the_servers_own_memory_does_not_grow_with_the_body(sock: socket.socket) -> None:
    size = 60_000_000
    block = bytes(1_000_000)
    sock.sendall(post("/digest", b""))
    read_reply(sock)
    before = anonymous_bytes()
    sock.sendall(post("/digest", b"").replace(b"Length: 0", b"Length: %d" % size))
    highest = 0
    for _ in range(size // len(block)):
        sock.sendall(block)
        highest = max(highest, anonymous_bytes())
    assert read_reply(sock)[2] == sha(bytes(size))
    assert highest - before < 4_000_000


def anonymous_bytes() -> int:
    """Memory of this process (the server is a thread of it) that isn't the arena's."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) * 1024


def test_replies_without_a_body_are_sent_at_once(sock: socket.socket) -> None:
    for _ in range(2):
        sock.sendall(b"HEAD /reply?1000 HTTP/1.1\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += sock.recv(1)
        assert b"content-length: 1000" in head
        sock.sendall(b"GET /empty HTTP/1.1\r\n\r\n")
        assert read_reply(sock)[2] == b""


def test_a_body_in_small_pieces_arrives_whole(sock: socket.socket) -> None:
    body = os.urandom(300_000)
    data = post("/digest?8,90000", body)
    for start in range(0, len(data), 7001):
        sock.sendall(data[start : start + 7001])
        time.sleep(0.001)
    assert read_reply(sock)[2] == sha(body)


def test_pipelined_requests_are_answered_in_order(sock: socket.socket) -> None:
    bodies = [os.urandom(size) for size in (10, 150_000, 0, 70_000, 300_000, 3)]
    data = b"".join(post("/digest", body) for body in bodies)
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    for body in bodies:
        assert read_reply(sock)[2] == sha(body)
    sender.join()


def test_pipelines_are_bounded(sock: socket.socket) -> None:
    sock.sendall(post("/slow?0.2", b"") + b"GET /slow?0 HTTP/1.1\r\n\r\n" * 500)
    assert [read_reply(sock)[0] for _ in range(66)] == [200] * 65 + [400]
    assert ended(sock)


def test_expect_100_continue(sock: socket.socket) -> None:
    body = os.urandom(100_000)
    head, _, _ = post("/digest", body, "Expect: 100-continue").partition(b"\r\n\r\n")
    sock.sendall(head + b"\r\n\r\n")
    assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(body)
    assert read_reply(sock)[2] == sha(body)
    # A refusal comes in place of the 100, and the body isn't awaited.
    sock.sendall(head.replace(b"/digest", b"/refuse") + b"\r\n\r\n")
    status, headers, _ = read_reply(sock)
    assert (status, headers["connection"]) == (413, "close")
    assert ended(sock)


def test_spaces_around_a_headers_value_are_no_part_of_it(sock: socket.socket) -> None:
    body = os.urandom(100_000)
    lines = (b"POST /digest HTTP/1.1", b"Host:x \t", b"Content-Length: \t 100000 ", b"Expect: 100-continue\t")
    sock.sendall(b"\r\n".join(lines) + b"\r\n\r\n")
    assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(body)
    assert read_reply(sock)[::2] == (200, sha(body))


def test_a_refused_body_is_let_in_so_that_the_refusal_is_read(address: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*address, timeout=10)
    connection.request("POST", "/refuse", bytes(50_000_000))
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.loads(reply.read())["limit"] == 1000
    connection.close()


def test_a_small_unread_body_costs_no_connection(sock: socket.socket) -> None:
    head, _, body = post("/refuse", bytes(2000)).partition(b"\r\n\r\n")
    sock.sendall(head + b"\r\n\r\n")
    status, headers, _ = read_reply(sock)
    assert status == 413
    assert "connection" not in headers
    sock.sendall(body + post("/plain", b"next"))
    assert read_reply(sock)[2] == sha(b"next")


def test_chunked_bodies_are_read_and_bounded(sock: socket.socket) -> None:
    body = os.urandom(500_000)
    head = b"POST /plain HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(body[i : i + 9999]), body[i : i + 9999]) for i in range(0, len(body), 9999)
    )
    for _ in range(2):
        sock.sendall(head + chunks + b"0\r\n\r\n")
        assert read_reply(sock)[2] == sha(body)
    sock.sendall(head)
    sender = threading.Thread(target=send_until_cut, args=(sock, chunks * 20))
    sender.start()
    status, _, reply = read_reply(sock)
    assert (status, json.loads(reply)["limit"]) == (413, 1 << 22)
    sender.join()


def send_until_cut(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


def test_a_chunked_body_that_cannot_be_parsed_is_400(sock: socket.socket) -> None:
    sock.sendall(b"POST /plain HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\nzzz\r\n")
    status, headers, _ = read_reply(sock)
    assert (status, headers["connection"]) == (400, "close")
    assert ended(sock)


def test_an_offered_upgrade_is_declined(sock: socket.socket) -> None:
    for _ in range(2):
        sock.sendall(post("/plain", b"x" * 500, "Connection: Upgrade", "Upgrade: h2c"))
        assert read_reply(sock)[2] == sha(b"x" * 500)


# -- ends of the connection ------------------------------------


@pytest.mark.parametrize("size", [5000, 400_000])
def test_a_body_that_is_cut_short_is_400(sock: socket.socket, size: int) -> None:
    sock.sendall(post("/digest", bytes(size))[:-100])
    sock.shutdown(socket.SHUT_WR)
    status, headers, body = read_reply(sock)
    assert (status, headers["connection"]) == (400, "close")
    assert "cut short" in json.loads(body)["detail"]
    assert ended(sock)


def test_who_only_ends_sending_is_answered(app: App, sock: socket.socket) -> None:
    sock.sendall(post("/digest", bytes(100_000)) + b"GET /slow?0.3 HTTP/1.1\r\n\r\n")
    sock.shutdown(socket.SHUT_WR)
    assert read_reply(sock)[2] == sha(bytes(100_000))
    status, headers, body = read_reply(sock)
    assert (status, headers["connection"], body) == (200, "close", b"slow")
    assert ended(sock)
    assert not app.left


@pytest.mark.parametrize("prefix", [b"", b"GET /slow?0 HTTP/1.1\r\n\r\n"])
def test_who_leaves_is_noticed_while_the_work_runs(app: App, sock: socket.socket, prefix: bytes) -> None:
    app.left.clear()
    sock.sendall(prefix + b"GET /slow?30 HTTP/1.1\r\n\r\n")
    if prefix:
        read_reply(sock)
    else:
        time.sleep(0.1)
    sock.close()
    eventually(lambda: app.left == ["/slow"])
    app.left.clear()


@pytest.mark.parametrize("size", [5000, 5_000_000])
def test_who_leaves_amid_a_body_by_reset_is_noticed(app: App, sock: socket.socket, size: int) -> None:
    app.left.clear()
    sock.sendall(post("/digest", bytes(size))[:-1000])
    time.sleep(0.05)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    eventually(lambda: app.left == ["/digest"])
    eventually(lambda: app.slots.bytes_by_state["request"] == 0)
    app.left.clear()


def test_idle_connections_are_closed(hurried: socket.socket, strict: Any) -> None:
    began = time.monotonic()
    with socket.create_connection(strict[1], timeout=30) as silent:
        hurried.sendall(post("/plain", b""))
        read_reply(hurried)
        assert ended(silent)
        assert time.monotonic() - began > 0.3
        assert ended(hurried)
        assert time.monotonic() - began > 0.5


# -- limits ------------------------------------


def test_endless_headers_are_431(sock: socket.socket, served: Any) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 5000)
    status, headers, body = read_reply(sock)
    assert (status, headers["content-type"]) == (431, "application/problem+json")
    assert json.loads(body)["limit"] == 4096
    assert ended(sock)
    assert served[2][-1] == 431


def test_many_whole_headers_are_431(address: tuple[str, int]) -> None:
    lines = b"".join(b"X-%d: aaaaaaaaaaaaaaaaaaaaaaaa\r\n" % i for i in range(200))
    for head in (b"GET / HTTP/1.1\r\n" + lines + b"\r\n", b"GET /" + b"u" * 5000 + b" HTTP/1.1\r\n\r\n"):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(post("/plain", b"before") + head)
            assert read_reply(sock)[2] == sha(b"before")
            assert read_reply(sock)[0] == 431
            assert ended(sock)


def test_a_long_body_is_no_long_header(sock: socket.socket) -> None:
    for body in (bytes(4000), bytes(60_000)):
        sock.sendall(post("/plain", body) + post("/plain", body)[:50])
        assert read_reply(sock)[2] == sha(body)
        sock.sendall(post("/plain", body)[50:])
        assert read_reply(sock)[2] == sha(body)


def test_headers_that_take_too_long_are_408(hurried: socket.socket) -> None:
    stop = threading.Event()
    hurried.sendall(b"GET / HTTP/1.1\r\n")
    dripping = threading.Thread(target=drip, args=(hurried, b"X-A: b\r\n", stop))
    dripping.start()
    status, headers, body = read_reply(hurried)
    stop.set()
    dripping.join()
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["field"] == "headers"


def drip(sock: socket.socket, piece: bytes, stop: threading.Event) -> None:
    while not stop.wait(0.03):
        try:
            sock.sendall(piece)
        except OSError:
            return


@pytest.mark.parametrize(
    ("path", "size"), [("/digest", 400_000), ("/digest", 30_000), ("/digest?8", 400_000), ("/plain", 400_000)]
)
def test_a_body_that_comes_too_slowly_is_408(
    strict: Any, hurried: socket.socket, path: str, size: int
) -> None:
    stop = threading.Event()
    hurried.sendall(post(path, bytes(size))[: -size + 200])
    dripping = threading.Thread(target=drip, args=(hurried, b"x", stop))
    dripping.start()
    status, headers, body = read_reply(hurried)
    stop.set()
    dripping.join()
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["limit"] == 20_000
    eventually(lambda: strict[0].slots.bytes_by_state["request"] == 0)


def test_a_body_at_the_least_rate_goes_through() -> None:
    """For longer than a window, whatever a pause takes here: the least rate is a five-hundredth of what is sent."""
    body = os.urandom(120_000)
    data = post("/digest", body)
    limits = replace(STRICT, body_bytes_per_second=100, body_window_seconds=2)
    with served_by(limits) as (_, address, _), socket.create_connection(address, timeout=30) as sock:
        for start in range(0, len(data), 2000):
            sock.sendall(data[start : start + 2000])
            time.sleep(0.04)
        assert read_reply(sock)[2] == sha(body)


def test_a_reply_that_nobody_reads_is_cut_off(strict: Any) -> None:
    app, address, _ = strict
    with socket.create_connection(address, timeout=30) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /reply?30000000 HTTP/1.1\r\n\r\n")
        eventually(lambda: app.slots.bytes_by_state["reply"] == 0)
        with pytest.raises((ConnectionError, AssertionError)):
            read_reply(sock)


def test_a_reply_that_nobody_reads_holds_nobody_else_up(app: App, address: tuple[str, int]) -> None:
    with socket.create_connection(address, timeout=30) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET /reply?30000000 HTTP/1.1\r\n\r\n")
        eventually(lambda: app.slots.bytes_by_state["reply"] > 0)
        with socket.create_connection(address, timeout=30) as other:
            for _ in range(20):
                other.sendall(post("/plain", b"x"))
                assert read_reply(other)[2] == sha(b"x")
        assert app.slots.bytes_by_state["reply"] > 0
    eventually(lambda: app.slots.bytes_by_state["reply"] == 0)


def test_a_reply_that_is_read_slowly_is_whole(app: App, sock: socket.socket) -> None:
    size = 20_000_000
    sock.sendall(f"GET /reply?{size} HTTP/1.1\r\n\r\n".encode())
    received = 0
    while received < size:
        piece = sock.recv(1 << 20)
        assert piece
        if received == 0:
            piece = piece.partition(b"\r\n\r\n")[2]
        # The slot is wiped when it comes back, so bytes of a freed slot would show as zeros.
        assert piece.count(size % 251) == len(piece)
        received += len(piece)
        time.sleep(0.01)
    eventually(lambda: app.slots.bytes_by_state["reply"] == 0)


def test_bytes_of_one_reply_never_reach_another(address: tuple[str, int]) -> None:
    wrong: list[str] = []

    def read_many(size: int) -> None:
        with socket.create_connection(address, timeout=20) as sock:
            for _ in range(12):
                sock.sendall(f"GET /reply?{size} HTTP/1.1\r\n\r\n".encode())
                if size % 3 == 0:
                    time.sleep(0.01)
                body = read_reply(sock)[2]
                if body.count(size % 251) != size:
                    wrong.append(f"{size}: foreign bytes")

    threads = [threading.Thread(target=read_many, args=(1_000_000 + 37 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_not_http_is_400(address: tuple[str, int]) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET \xff HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(data)
            assert read_reply(sock)[0] == 400
            assert ended(sock)


def test_conflicting_lengths_are_400(address: tuple[str, int]) -> None:
    for lines in (
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: -5",
        "Content-Length: 99999999999999999999999",
    ):
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(f"POST /plain HTTP/1.1\r\n{lines}\r\n\r\nhello".encode())
            assert read_reply(sock)[0] == 400
