"""Unusual but right HTTP against the real service, on /gemm and on /v2: each product is answered, and is right."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.real import Service, running

SIDE = 200
A = np.random.default_rng(1).standard_normal((SIDE, SIDE)).astype(np.float32)
B = np.random.default_rng(2).standard_normal((SIDE, SIDE)).astype(np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data: Path = tmp_path_factory.mktemp("odd") / "data"
    with running(data, "--keep-alive-seconds", "30", "--log-level", "warning") as one:
        yield one.ready()


@pytest.fixture
def sock(service: Service) -> Iterator[socket.socket]:
    port = int(re.findall(r":(\d+)", service.url)[0])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as made:
        yield made


class Route:
    """A way to ask for A·B: head and body, and D in the answer."""

    def __init__(
        self, path: str, headers: dict[str, str], body: bytes, skip: Callable[[http.client.HTTPResponse], int]
    ) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self._skip = skip

    def head(self, **more: str) -> bytes:
        lines = [f"POST {self.path} HTTP/1.1", "host: 127.0.0.1"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in {**self.headers, **more}.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    @property
    def sized(self) -> bytes:
        """The request with its length told."""
        return self.head(content_length=str(len(self.body))) + self.body

    def check(self, answer: http.client.HTTPResponse, *, pause: float = 0.0) -> None:
        """D is A·B; read in pieces with pauses."""
        content = b""
        while piece := answer.read(20_000 if pause else None):
            content += piece
            time.sleep(pause)
        assert answer.status == 200, content
        d = np.frombuffer(content[self._skip(answer) :], np.float32).reshape(SIDE, SIDE)
        np.testing.assert_allclose(d, A.astype(np.float64) @ B, rtol=1e-4, atol=1e-3)


def gemm() -> Route:
    query = f"a_shape={SIDE}x{SIDE}&b_shape={SIDE}x{SIDE}&dtype=fp32"
    headers = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}
    return Route(f"/gemm?{query}", headers, A.tobytes() + B.tobytes(), lambda answer: 0)


def infer() -> Route:
    inputs = [
        {
            "name": name,
            "datatype": "FP32",
            "shape": list(x.shape),
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in (("A", A), ("B", B))
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    return Route(
        "/v2/models/gemm_fp32/infer",
        headers,
        head + A.tobytes() + B.tobytes(),
        lambda answer: int(answer.headers["inference-header-content-length"]),
    )


@pytest.fixture(params=[gemm, infer], ids=["gemm", "v2"])
def route(request: pytest.FixtureRequest) -> Route:
    made: Route = request.param()
    return made


class Buffered:
    """In place of a socket: all answers are read from one file, which none of them closes."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def makefile(self, mode: str) -> Any:
        return io.BufferedReader(_Unclosed(self._file), 1)


class _Unclosed(io.RawIOBase):
    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto1(buffer)


def answered(sock: Any) -> http.client.HTTPResponse:
    answer = http.client.HTTPResponse(sock, method="POST")
    answer.begin()
    return answer


@pytest.mark.parametrize("piece", [7_001, 1 << 20])
def test_chunked_bodies(sock: socket.socket, route: Route, piece: int) -> None:
    sock.sendall(route.head(transfer_encoding="chunked"))
    for start in range(0, len(route.body), piece):
        chunk = route.body[start : start + piece]
        sock.sendall(f"{len(chunk):x};note=1\r\n".encode() + chunk + b"\r\n")
    sock.sendall(b"0\r\nx-checksum: none\r\n\r\n")
    route.check(answered(sock))


def test_expect_100_continue(sock: socket.socket, route: Route) -> None:
    sock.sendall(route.head(content_length=str(len(route.body)), expect="100-continue"))
    assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(route.body)
    route.check(answered(sock))


def test_expect_100_continue_of_what_is_refused(sock: socket.socket) -> None:
    sock.sendall(
        b"POST /gemm?a_shape=2x2&b_shape=2x2&dtype=fp32 HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\n"
        b"content-type: application/octet-stream\r\ncontent-length: 99\r\n\r\n"
    )
    assert answered(sock).status == 400  # at once: its body isn't waited for


def test_pipelined_requests_are_answered_in_their_order(sock: socket.socket) -> None:
    routes = [gemm(), infer(), gemm(), infer()]
    sock.sendall(b"".join(route.sized for route in routes))
    with sock.makefile("rb") as file:
        for route in routes:
            route.check(answered(Buffered(file)))


def test_who_ends_sending_is_answered(sock: socket.socket, route: Route) -> None:
    sock.sendall(route.sized)
    sock.shutdown(socket.SHUT_WR)
    route.check(answered(sock))


def test_who_reads_slowly_gets_all(sock: socket.socket, route: Route) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    sock.sendall(route.sized)
    route.check(answered(sock), pause=0.05)


@pytest.mark.ci
def test_pools_of_idle_connections_are_kept(service: Service) -> None:
    limits = httpx.Limits(max_keepalive_connections=6, keepalive_expiry=60)

    def used(http: httpx.Client) -> set[tuple[str, int]]:
        """Ports of six connections at once."""
        answers = [http.send(http.build_request("GET", "/limits"), stream=True) for _ in range(6)]
        for one in answers:
            assert one.status_code == 200
            one.read()
        return {one.extensions["network_stream"].get_extra_info("client_addr") for one in answers}

    with httpx.Client(base_url=service.url, limits=limits) as http:
        before = used(http)
        time.sleep(6)  # longer than uvicorn's own default
        assert used(http) == before
    assert len(before) == 6
