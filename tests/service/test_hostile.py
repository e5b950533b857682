"""Clients that mean harm or fail badly, against the real service: each is cut off by a limit, others don't notice."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.service.real import Service, raw, result, running

A = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((16, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data: Path = tmp_path_factory.mktemp("hostile") / "data"
    limits = ("--header-seconds", "1", "--write-stall-seconds", "1", "--body-bytes-per-second", "5000")
    with running(data, *limits, "--max-body-bytes", "64MiB") as one:
        yield one.ready()


class Others:
    """Somebody who meanwhile uses the service properly."""

    def __init__(self, service: Service) -> None:
        self.slowest = 0.0
        self.wrong = 0
        self._url = service.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Others:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self.wrong == 0
        assert self.slowest < 10, "others notice"

    def _run(self) -> None:
        want = A.astype("f8") @ B
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._stop.wait(0.01):
                began = time.monotonic()
                answer = http.post("/gemm", **raw(A, B))
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.wrong += answer.status_code != 200 or not np.allclose(result(answer), want, atol=1e-4)


class Alive(Others):
    """Somebody who meanwhile asks whether the service lives."""

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http:
            while not self._stop.wait(0.01):
                began = time.monotonic()
                self.wrong += http.get("/health/live").status_code != 200
                self.slowest = max(self.slowest, time.monotonic() - began)


def connect(service: Service) -> socket.socket:
    port = int(re.findall(r":(\d+)", service.url)[0])
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def head(length: int, query: str = "a_shape=1000x1000&b_shape=1000x1000&dtype=fp32") -> bytes:
    lines = f"POST /gemm?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n"
    return f"{lines}Content-Type: application/octet-stream\r\n\r\n".encode()


def status(sock: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and problem of a reply that ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            data += piece
    start, _, body = data.partition(b"\r\n\r\n")
    return int(start.split()[1]), json.loads(body)


def at_rest(service: Service) -> bool:
    return (
        service.metric("gemm_arena_bytes", state="request")
        + service.metric("gemm_arena_bytes", state="reply")
        == 0
    )


def test_endless_headers_are_431(service: Service) -> None:
    with Others(service), connect(service) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(2000):
                sock.sendall(b"X-Again: and again and again and again\r\n")
        code, problem = status(sock)
    assert (code, problem["code"], problem["limit"]) == (431, "headers_too_large", 32768)
    assert service.metric("gemm_requests_total", code="431") == 1


@pytest.mark.parametrize(
    "start", [b"GET /limits HTTP/1.1\r\nX: ", head(8_000_000), head(8_000_000) + bytes(100_000)]
)
def test_a_byte_now_and_then_is_408(service: Service, start: bytes) -> None:
    with Others(service), connect(service) as sock:
        sock.sendall(start)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while not select.select([sock], [], [], 0.1)[0] and time.monotonic() - began < 10:
                sock.sendall(b"x")
        code, problem = status(sock)
    assert (code, problem["code"]) == (408, "request_timeout")
    service.until(lambda: at_rest(service), what="the slow body's slots are free")


def test_replies_that_nobody_reads_are_cut_off(service: Service) -> None:
    socks = [connect(service) for _ in range(3)]
    with Others(service):
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head(16_000, "a_shape=2000x1&b_shape=1x2000&dtype=fp32") + bytes(16_000))
        service.until(
            lambda: service.metric("gemm_arena_bytes", state="reply") >= 16_000_000, what="replies wait"
        )
        service.until(lambda: at_rest(service), what="they are cut off")
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("cut", [0, 5000, 3_000_000])
def test_bodies_that_end_early_are_400_and_hold_nothing(service: Service, cut: int) -> None:
    with connect(service) as sock:
        sock.sendall(head(8_000_000) + bytes(cut))
        sock.shutdown(socket.SHUT_WR)
        code, problem = status(sock)
    assert (code, problem["code"]) == (400, "malformed")
    service.until(lambda: at_rest(service))


def test_uploads_that_break_off_hold_nothing(service: Service) -> None:
    socks = [connect(service) for _ in range(4)]
    for sock in socks:
        sock.sendall(head(8_000_000) + bytes(2_000_000))
    service.until(lambda: service.metric("gemm_arena_bytes", state="request") >= 32_000_000)
    for sock in socks:
        sock.close()
    service.until(lambda: at_rest(service))


def test_a_body_above_the_limit_is_refused_unread(service: Service) -> None:
    with connect(service) as sock:
        sock.sendall(head(1 << 40))
        sock.settimeout(2)
        data = sock.recv(4096)
    assert data.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in data.lower()


def test_noise_is_400_and_the_service_goes_on(service: Service) -> None:
    dice = np.random.default_rng(5)
    for _ in range(50):
        with connect(service) as sock:
            sock.sendall(dice.bytes(int(dice.integers(1, 4000))))
            sock.shutdown(socket.SHUT_WR)
            data = b""
            with contextlib.suppress(ConnectionError):
                while piece := sock.recv(4096):
                    data += piece
            assert data == b"" or data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert service.is_ready()


def test_connections_beyond_all_descriptors_end_and_the_service_goes_on(tmp_path: Path) -> None:
    few = ("sh", "-c", 'ulimit -n 128; exec "$0" "$@"')
    with (
        running(tmp_path / "data", "--header-seconds", "30", under=few) as service,
        contextlib.ExitStack() as held,
    ):
        service.ready()
        for _ in range(300):
            held.enter_context(connect(service))
        front = psutil.Process(service.process.pid)
        service.until(lambda: front.num_fds() >= 128, what="all descriptors are taken")
        assert service.gemm(A, B).status_code == 200, "a connection that was there is served"
        put = service.put("w", B)
        assert (put.status_code, put.json().get("code")) in ((201, None), (507, "no_room"))
        service.worker().kill()
        service.until(lambda: "can't be started" in service.output, what="no descriptors for a worker")
        assert service.http.get("/health/ready").status_code == 503
        held.close()
        service.ready()
        assert service.put("w", B).status_code in (200, 201)
        np.testing.assert_allclose(result(service.gemm(A, "w")), A @ B, atol=1e-4)


def large(start: bytes, piece: bytes, end: bytes, nbytes: int = 12 << 20) -> bytes:
    """A text of about so many bytes."""
    return start + b",".join([piece] * (nbytes // (len(piece) + 1))) + end


@pytest.mark.parametrize(
    ("text", "small"),
    [
        (large(b'{"a": [[', b"0.25", b']], "b": [[1]'), b'{"a": [[0.25]], "b": [[1]'),
        (large(b'{"a": [[', b"0.25", b"]]]}"), b'{"a": [[0.25]]]}'),
        (b"[" * (12 << 20), b"[" * 5000),
        (
            large(b'{"a": [', b"[" * 12 + b"1" + b"]" * 12, b"]}"),
            b'{"a": [' + b"[" * 12 + b"1" + b"]" * 12 + b"]}",
        ),
        (large(b'{"a": [', b"[1]", b'], "b": [[1]], "alpha": {}}'), b'{"a": [[1]], "b": [[1]], "alpha": {}}'),
        (b'{"a": [[1]], "x": "' + b"x" * (12 << 20) + b'\\ud800"}', b'{"a": [[1]], "x": "\\ud800"}'),
    ],
    ids=[
        "cut short",
        "one bracket more",
        "deep",
        "many deep lists",
        "refused after it was read",
        "half a pair",
    ],
)
def test_large_json_that_is_wrong_is_told_so_as_a_small_one_is(
    service: Service, text: bytes, small: bytes
) -> None:
    def told(body: bytes) -> tuple[int, str, str, str]:
        answer = service.http.post("/gemm", content=body, headers={"content-type": "application/json"})
        problem = answer.json()
        detail = re.sub(r"line 1 column \d+ \(char \d+\)", "there", problem["detail"])
        return answer.status_code, problem["code"], problem["field"], detail

    with Alive(service) as alive:
        assert told(text) == told(small)
    assert alive.slowest < 2, "everybody waits"


@pytest.mark.parametrize(
    "text",
    [
        large(b'{"a": [', b"{}", b"]}"),
        large(b'{"a": [', b"[]", b",{}]}"),
        large(b'{"a": [', b"1", b',{}], "b": [[1]]}'),
        b"{" + b",".join(b'"x%d":0' % number for number in range(1 << 19)) + b"}",
        b'{"a": {"handle": "x",' + b",".join(b'"x%d":0' % number for number in range(1 << 18)) + b"}}",
    ],
    ids=["objects", "empty lists", "an object among numbers", "fields", "fields of an operand"],
)
def test_large_json_of_no_form_that_is_taken_holds_nobody_up(service: Service, text: bytes) -> None:
    with Alive(service) as alive:
        answer = service.http.post("/gemm", content=text, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert alive.slowest < 2, "everybody waits"
