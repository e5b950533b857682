"""Client: what goes over the wire and comes back, against a server that misbehaves on cue."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import ml_dtypes
import numpy as np
import pytest

from service.client import (
    AsyncClient,
    Busy,
    Client,
    ConnectionFailed,
    GemmError,
    Handle,
    Invalid,
    NotFound,
    Refused,
    Retries,
    Step,
    TimedOut,
    errors,
    jobs,
)

QUICK = Retries(attempts=3, first_pause=0.01, longest_pause=0.02)
rng = np.random.default_rng(7)


class Request:
    """What the scripted server read."""

    def __init__(self, head: bytes, body: bytes) -> None:
        line, *fields = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = line.split(" ")
        self.headers = dict(field.split(": ", 1) for field in fields)
        self.query = {k: v[0] for k, v in parse_qs(urlsplit(self.target).query).items()}
        self.body = body


class Wire:
    """One connection of the scripted server."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.file = connection.makefile("rb")

    def read_head(self) -> bytes:
        """A request's head; b"" at the end."""
        lines = []
        while line := self.file.readline():
            if line == b"\r\n":
                break
            lines.append(line)
        return b"".join(lines).removesuffix(b"\r\n")

    def read(self) -> Request | None:
        """A whole request."""
        head = self.read_head()
        if not head:
            return None
        length = int(Request(head, b"").headers.get("content-length", 0))
        return Request(head, self.file.read(length))

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.connection.sendall(data)


def http(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A reply with a Content-Length."""
    fields = {"content-length": str(len(body))} | {k.replace("_", "-"): v for k, v in headers.items()}
    return f"HTTP/1.1 {status} X\r\n".encode() + _fields(fields) + body


def _fields(fields: dict[str, str]) -> bytes:
    return "".join(f"{k}: {v}\r\n" for k, v in fields.items()).encode() + b"\r\n"


def array_reply(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    """A product in the raw form."""
    shape = "x".join(map(str, array.shape))
    return http(
        200,
        array.tobytes(),
        x_gemm_shape=shape,
        x_gemm_dtype=dtype,
        x_gemm_variant="cpu_reference",
        x_gemm_reason="only_candidate",
        x_request_id="r1",
        server_timing="queue;dur=1.500, compute;dur=20.000",
    )


Script = Callable[[Wire], None]


class Scripted:
    """A server whose n-th connection runs the n-th script, the last one from then on."""

    def __init__(self, listener: socket.socket, *scripts: Script, tls: ssl.SSLContext | None = None) -> None:
        self.listener = listener
        self.scripts = list(scripts)
        self.connections = 0
        self.requests: list[Request] = []
        self._tls = tls
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            script = self.scripts[min(self.connections, len(self.scripts) - 1)]
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, script))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, script: Script) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            wire = Wire(connection)
            wire.seen = self.requests  # type: ignore[attr-defined]
            script(wire)
        except OSError:
            pass
        finally:
            connection.close()

    def close(self) -> None:
        """End; every connection must have ended by itself or by its client."""
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._accepting.join()
        for thread in self._threads:
            thread.join(timeout=10)


def answering(*replies: bytes) -> Script:
    """Answer each request of a connection with the next reply, then close."""

    def script(wire: Wire) -> None:
        for reply in replies:
            request = wire.read()
            if request is None:
                return
            wire.seen.append(request)  # type: ignore[attr-defined]
            wire.send(reply)

    return script


Serve = Callable[..., tuple[Scripted, str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Scripted] = []

    def start(*scripts: Script, tls: ssl.SSLContext | None = None) -> tuple[Scripted, str]:
        listener = socket.create_server(("127.0.0.1", 0))
        servers.append(Scripted(listener, *scripts, tls=tls))
        scheme = "https" if tls else "http"
        return servers[-1], f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


A = rng.standard_normal((3, 4)).astype(np.float32)
B = rng.standard_normal((4, 5)).astype(np.float32)
D = A @ B


def test_request_carries_raw_operands_and_reply_becomes_an_array(serve: Serve) -> None:
    server, url = serve(answering(array_reply(D, "fp32")))
    bias = np.ones(5, np.float64)
    with Client(url, key="gemm_1_x") as client:
        result = client.gemm_result(A, B, D, bias, alpha=0.5, trans_b=False, activation="relu")
    np.testing.assert_array_equal(result.array, D)
    assert (result.variant, result.reason, result.request_id) == ("cpu_reference", "only_candidate", "r1")
    assert (result.queue_seconds, result.compute_seconds) == pytest.approx((0.0015, 0.02))
    (request,) = server.requests
    assert request.headers["authorization"] == "Bearer gemm_1_x"
    assert request.headers["content-type"] == request.headers["accept"] == "application/octet-stream"
    assert request.body == A.tobytes() + B.tobytes() + D.tobytes() + bias.tobytes()
    assert request.query == {
        "a_shape": "3x4",
        "b_shape": "4x5",
        "c_shape": "3x5",
        "dtype": "fp32",
        "c_dtype": "fp32",
        "bias_dtype": "fp64",
        "alpha": "0.5",
        "trans_b": "false",
        "activation": "relu",
    }


def test_query_is_what_the_service_takes(serve: Serve) -> None:
    from service.model import GemmQuery, validate_query

    server, url = serve(answering(array_reply(D, "fp32")))
    with Client(url) as client:
        client.gemm(
            A,
            Handle("w"),
            "c",
            deadline_ms=5.5,
            priority=1,
            ttl_seconds=None,
            alpha=float("inf"),
            trans_a=True,
        )
    fields = validate_query(GemmQuery, server.requests[0].query)
    assert (fields.b, fields.c, fields.deadline_ms, fields.priority) == ("handle:w", "handle:c", 5.5, 1)
    assert (fields.alpha, fields.trans_a, fields.a_shape, fields.dtype) == (float("inf"), True, "3x4", "fp32")


def test_transposed_operands_go_as_they_lie(serve: Serve) -> None:
    server, url = serve(answering(*[array_reply(D, "fp32")] * 3))
    a, b = np.asfortranarray(A), np.asfortranarray(B)
    with Client(url) as client:
        client.gemm(a, b)
        client.gemm(a.T, B[:, ::2], trans_a=True)
    first, second = server.requests
    assert (first.query["a_shape"], first.query["trans_a"], first.query["trans_b"]) == ("4x3", "true", "true")
    assert first.body == A.T.tobytes() + B.T.tobytes()
    assert (second.query["a_shape"], second.query["trans_a"]) == ("4x3", "true")
    assert second.query["b_shape"] == "4x3"
    assert second.body == A.T.tobytes() + np.ascontiguousarray(B[:, ::2]).tobytes()


def test_result_goes_into_the_given_array(serve: Serve) -> None:
    server, url = serve(answering(*[array_reply(D, "fp32")] * 3))
    out = np.empty((3, 5), np.float32)
    with Client(url) as client:
        assert client.gemm(A, B, out=out) is out
        np.testing.assert_array_equal(out, D)
        assert server.requests[0].query["out_dtype"] == "fp32"
        with pytest.raises(ValueError, match=r"the result is fp32 of shape \(3, 5\), out is fp64"):
            client.gemm(A, B, out=np.empty((3, 5), np.float64))
        with pytest.raises(ValueError, match="C-contiguous"):
            client.gemm(A, B, out=np.empty((5, 3), np.float32).T)
        with pytest.raises(TypeError, match="int64"):
            client.gemm(A, B, out=np.empty((3, 5), np.int64))
        with pytest.raises(TypeError, match="list"):
            client.gemm(A, B, out=[[0.0]])


def test_dtypes(serve: Serve) -> None:
    halves = D.astype(ml_dtypes.bfloat16)
    server, url = serve(answering(*[array_reply(halves, "bf16")] * 9))
    with Client(url) as client:
        d = client.gemm(A.astype(ml_dtypes.bfloat16), B.astype(ml_dtypes.bfloat16))
        assert d.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(d, halves)
        client.gemm(A.astype(">f8"), B.astype(">f8"))
        assert server.requests[-1].body[:8] == np.float64(A[0, 0]).tobytes()
        client.gemm([[1, 2]], [[3], [4]])
        assert server.requests[-1].body == np.array([1, 2, 3, 4], np.float32).tobytes()
        for single in (np.float32(3), 3.0, None):
            with pytest.raises(TypeError, match="a is no array: it has no dimensions"):
                client.gemm(single, B)
        with pytest.raises(ValueError, match=r"a is no array of numbers: .*inhomogeneous"):
            client.gemm([[1, 2], [3]], B)
        with pytest.raises(TypeError, match="a has dtype int64"):
            client.gemm(np.ones((2, 2), np.int64), B)
        with pytest.raises(TypeError, match="share a dtype"):
            client.gemm(A, B.astype(np.float16))


def test_subclasses_of_numpys_array(serve: Serve, tmp_path: Path) -> None:
    d = np.arange(4, dtype=np.float32).reshape(2, 2)
    server, url = serve(answering(*[array_reply(d, "fp32")] * 3))
    mapped = np.memmap(tmp_path / "d", np.float32, "w+", shape=(2, 2))
    with Client(url) as client:
        made = client.gemm(d.view(np.matrix), d.view(np.matrix))
        assert type(made) is np.ndarray
        assert server.requests[0].body == d.tobytes() * 2
        for out in (np.zeros_like(d).view(np.matrix), mapped):
            assert client.gemm(d, d, out=out) is out
            assert np.array_equal(out, d)
        masked = np.ma.array(d, mask=d > 1)
        for arguments in ({"a": masked}, {"c": masked}, {"out": masked}):
            with pytest.raises(TypeError, match="masked"):
                client.gemm(**{"a": d, "b": d, **arguments})


def test_torch_tensors_in_and_out(serve: Serve) -> None:
    torch = pytest.importorskip("torch")
    halves = D.astype(ml_dtypes.bfloat16)
    server, url = serve(answering(*[array_reply(halves, "bf16")] * 2))
    a, b = torch.from_numpy(A).bfloat16(), torch.from_numpy(B).bfloat16()
    out = torch.empty(3, 5, dtype=torch.bfloat16)
    with Client(url) as client:
        d = client.gemm(a, b)
        assert client.gemm(a.requires_grad_(), b, out=out) is out
    expected = torch.from_numpy(halves.astype(np.float32)).bfloat16()
    assert torch.equal(d, expected)
    assert torch.equal(out, expected)
    assert (
        server.requests[0].body
        == a.detach().view(torch.int16).numpy().tobytes() + b.view(torch.int16).numpy().tobytes()
    )


def test_empty_operands_and_results(serve: Serve) -> None:
    _, url = serve(answering(array_reply(np.empty((0, 5), np.float32), "fp32")))
    with Client(url) as client:
        assert client.gemm(np.empty((0, 4), np.float32), B).shape == (0, 5)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_replies_in_pieces_and_chunks(serve: Serve, piece: int) -> None:
    whole = array_reply(D, "fp32")

    def dribbling(wire: Wire) -> None:
        wire.read()
        for at in range(0, len(whole), piece):
            wire.send(whole[at : at + piece])

    def chunked(wire: Wire) -> None:
        wire.read()
        body = D.tobytes()
        head = {"transfer-encoding": "chunked", "x-gemm-shape": "3x5", "x-gemm-dtype": "fp32"}
        wire.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + _fields(head))
        for at in range(0, len(body), piece):
            part = body[at : at + piece]
            wire.send(f"{len(part):X};x=y\r\n".encode() + part + b"\r\n")
        wire.send(b"0\r\nTrailer: t\r\n\r\n")

    def until_closed(wire: Wire) -> None:
        wire.read()
        wire.send(b"HTTP/1.0 200 OK\r\n" + _fields({"x-gemm-shape": "3x5", "x-gemm-dtype": "fp32"}))
        wire.send(D.tobytes())

    server, url = serve(dribbling, chunked, until_closed)
    with Client(url) as client:
        for _ in range(3):
            np.testing.assert_array_equal(client.gemm(A, B), D)
    assert server.connections == 3


def test_connection_is_kept_and_a_closed_one_replaced(serve: Serve) -> None:
    reply = array_reply(D, "fp32")
    server, url = serve(answering(reply, reply), answering(reply))
    with Client(url, retries=1) as client:
        for _ in range(3):
            np.testing.assert_array_equal(client.gemm(A, B), D)
    assert server.connections == 2


@pytest.mark.parametrize(("asked", "longest", "least"), [("1", 2.0, 1.0), ("60", 0.02, 0.0)])
def test_busy_is_tried_again_as_the_service_asks_within_the_longest_pause(
    serve: Serve, asked: str, longest: float, least: float
) -> None:
    problem = json.dumps({"code": "queue_full", "detail": "full", "limit": 4}).encode()
    busy = http(429, problem, retry_after=asked, content_type="application/problem+json")
    server, url = serve(answering(busy, array_reply(D, "fp32")))
    started = time.monotonic()
    with Client(url, timeout=100.0, retries=replace(QUICK, longest_pause=longest)) as client:
        np.testing.assert_array_equal(client.gemm(A, B), D)
    assert least <= time.monotonic() - started < 30.0
    assert len(server.requests) == 2


def test_busy_to_the_end_says_so(serve: Serve) -> None:
    problem = json.dumps({"code": "no_worker", "detail": "none is ready"}).encode()
    server, url = serve(answering(*[http(503, problem)] * 3))
    with Client(url, retries=QUICK) as client, pytest.raises(Busy) as caught:
        client.gemm(A, B)
    assert (caught.value.status, caught.value.code) == (503, "no_worker")
    assert len(server.requests) == 3


def test_refusal_carries_code_field_and_limit_and_is_not_tried_again(serve: Serve) -> None:
    problem = json.dumps({"code": "too_large", "detail": "no", "field": "body", "limit": 10}).encode()
    server, url = serve(answering(http(413, problem, x_request_id="r9")))
    with Client(url, retries=QUICK) as client, pytest.raises(Invalid) as caught:
        client.gemm(A, B)
    error = caught.value
    assert (error.code, error.field, error.limit, error.request_id) == ("too_large", "body", 10, "r9")
    assert str(error) == "413 too_large: no (field body) (limit 10) [request r9]"
    assert len(server.requests) == 1


def test_refusal_that_a_proxy_wrote(serve: Serve) -> None:
    _, url = serve(answering(http(404, b"<html>nginx</html>")))
    with Client(url) as client, pytest.raises(NotFound, match="<html>nginx"):
        client.get("w")


def test_redirection_is_told_and_not_followed(serve: Serve) -> None:
    server, url = serve(answering(http(308, location="https://elsewhere/gemm")))
    with Client(url) as client, pytest.raises(Refused, match="sent on to https://elsewhere/gemm"):
        client.gemm(A, B)
    assert len(server.requests) == 1


def test_reply_before_the_body_was_sent_ends_the_sending(serve: Serve) -> None:
    problem = http(413, json.dumps({"code": "too_large", "detail": "no", "limit": 1}).encode())

    def early(wire: Wire) -> None:
        wire.read_head()
        wire.send(problem)
        wire.connection.recv(1)  # and then reads no more
        time.sleep(0.3)

    server, url = serve(early)
    big = np.zeros((4096, 4096), np.float32)
    client = Client(url, retries=QUICK, timeout=20, local=False)
    with client, pytest.raises(Invalid, match="413 too_large"):
        client.gemm(big, big)
    assert server.connections == 1


def test_reply_cut_short_is_tried_again(serve: Serve) -> None:
    whole = array_reply(D, "fp32")
    server, url = serve(answering(whole[:-1]), answering(whole))
    with Client(url, retries=QUICK) as client:
        np.testing.assert_array_equal(client.gemm(A, B), D)
    assert server.connections == 2


def test_conditional_put_is_not_repeated_when_its_reply_is_lost(serve: Serve) -> None:
    server, url = serve(answering(b"HTTP/1.1 2"))
    with Client(url, retries=QUICK) as client, pytest.raises(ConnectionFailed):
        client.put("w", A, replace=False)
    assert len(server.requests) == 1
    assert server.requests[0].headers["if-none-match"] == "*"


def test_wrong_lengths_and_dtypes_are_told(serve: Serve) -> None:
    bad = http(200, b"12", x_gemm_shape="3x5", x_gemm_dtype="fp32")
    odd = http(200, b"12", x_gemm_shape="1", x_gemm_dtype="fp8")
    none = http(200, b"{}")
    _, url = serve(answering(bad), answering(odd), answering(none), answering(b"SSH-2.0\r\n\r\n"))
    with Client(url) as client:
        for message in ("sent 2 bytes", "fp8", "say its shape", "doesn't speak HTTP"):
            with pytest.raises(GemmError, match=message):
                client.gemm(A, B)


def test_time_given_for_a_call(serve: Serve) -> None:
    def silent(wire: Wire) -> None:
        wire.read()
        wire.connection.recv(1)

    _, url = serve(silent)
    started = time.monotonic()
    with Client(url, retries=QUICK) as client, pytest.raises(TimedOut):
        client.gemm(A, B, timeout=0.3)
    assert time.monotonic() - started > 0.25

    async def late() -> None:
        async with AsyncClient(url, retries=QUICK) as client:
            await client.gemm(A, B, timeout=0.3)

    with pytest.raises(TimedOut):
        asyncio.run(late())


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", retries=QUICK) as client:
        with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}|Connection refused"):
            client.variants()
        assert not client.ready()
    with (
        Client("unix:/nonexistent/socket", retries=1) as client,
        pytest.raises(ConnectionFailed, match="No such"),
    ):
        client.variants()


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "http://", "http://h/?q=1"])
def test_urls(url: str) -> None:
    with pytest.raises(ValueError, match="url must be"):
        Client(url)


@pytest.mark.parametrize("url", ["http://h:port", "http://h:99999"])
def test_a_port_that_is_none_is_told_with_its_url(url: str) -> None:
    with pytest.raises(ValueError, match=f"url '{url}': "):
        Client(url)


def test_a_name_as_out_is_told_how_d_is_kept() -> None:
    with (
        Client("http://127.0.0.1:9", retries=1) as client,
        pytest.raises(TypeError, match=r"Handle\(NAME\) keeps"),
    ):
        client.gemm(A, B, out="d")  # type: ignore[arg-type]


def test_headers_cannot_be_smuggled(serve: Serve) -> None:
    _, url = serve(answering(http(200)))
    with pytest.raises(ValueError, match="line break"):
        Client(url, key="x\r\nEvil: 1").variants()


def test_unix_socket(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    server = Scripted(listener, answering(array_reply(D, "fp32")))
    with Client(f"unix:{tmp_path / 's'}") as client:
        np.testing.assert_array_equal(client.gemm(A, B), D)
    server.close()
    assert server.requests[0].headers["host"] == "localhost"


def test_tls(serve: Serve, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl isn't installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(key), "-out", str(cert), "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    big = rng.standard_normal((512, 1024)).astype(np.float32)
    replies = [array_reply(big, "fp32")] * 2
    server, url = serve(answering(*replies), tls=tls)
    trusted = ssl.create_default_context(cafile=cert)
    with Client(url, verify=trusted) as client:
        for _ in range(2):
            np.testing.assert_array_equal(client.gemm(big, big.T), big)
    assert server.connections == 1
    assert server.requests[0].body == big.tobytes() * 2
    with Client(url, retries=1) as client, pytest.raises(ConnectionFailed, match=r"TLS with .* failed"):
        client.gemm(A, B)

    async def call() -> None:
        async with AsyncClient(url, verify=trusted) as client:
            np.testing.assert_array_equal(await client.gemm(big, big.T), big)

    asyncio.run(call())


async def test_async_client_runs_calls_side_by_side(serve: Serve) -> None:
    barrier = threading.Barrier(8, timeout=10)

    def together(wire: Wire) -> None:
        wire.read()
        barrier.wait()
        wire.send(array_reply(D, "fp32"))

    server, url = serve(together)
    async with AsyncClient(url) as client:
        for d in await asyncio.gather(*(client.gemm(A, B) for _ in range(8))):
            np.testing.assert_array_equal(d, D)
    assert server.connections == 8


async def test_async_client_sends_large_bodies_and_cancels(serve: Serve) -> None:
    big = rng.standard_normal((1024, 2048)).astype(np.float32)

    def slow(wire: Wire) -> None:
        wire.read()
        wire.connection.recv(1)

    server, url = serve(answering(array_reply(big, "fp32")), slow)
    out = np.empty_like(big)
    async with AsyncClient(url, local=False) as client:
        assert await client.gemm(big, big.T, out=out) is out
        np.testing.assert_array_equal(out, big)
        assert server.requests[0].body == big.tobytes() * 2
        task = asyncio.create_task(client.gemm(A, B))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_uvloop_drives_the_async_client_too(serve: Serve) -> None:
    import uvloop

    big = rng.standard_normal((1024, 1024)).astype(np.float32)
    _, url = serve(answering(*[array_reply(big, "fp32")] * 3))

    async def calls() -> None:
        async with AsyncClient(url) as client:
            for _ in range(3):
                np.testing.assert_array_equal(await client.gemm(big, big), big)

    await asyncio.to_thread(uvloop.run, calls())


def test_threads_share_a_client(serve: Serve) -> None:
    reply = array_reply(D, "fp32")
    _, url = serve(answering(*[reply] * 200))
    wrong: list[Any] = []

    def work(client: Client) -> None:
        for _ in range(20):
            if not np.array_equal(client.gemm(A, B), D):
                wrong.append(1)

    with Client(url, connections=3) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_job_document() -> None:
    w = np.asfortranarray(B)
    first = Step("first", A, w, options={"activation": "relu"})
    second = Step("second", first, Handle("v"), bias=np.ones(2, np.float32), out=Handle("kept"))
    one, two = jobs.document([first, second])["steps"]
    assert (one["id"], one["activation"], one["trans_b"]) == ("first", "relu", True)
    assert one["b"]["shape"] == (5, 4)
    assert two["a"] == {"step": "first"}
    assert two["b"] == {"handle": "v"}
    assert two["bias"] == {"b64": "AACAPwAAgD8=", "dtype": "fp32", "shape": (2,)}
    assert two["out"] == {"handle": "kept"}


def test_job_steps_are_what_the_service_takes() -> None:
    from service.model import StepBody, validate

    first = Step("first", A, B)
    document = json.loads(json.dumps(jobs.document([first, Step("second", first, "w", out=Handle("o"))])))
    for row in document["steps"]:
        validate(StepBody, row)


def test_submit_repeats_with_the_same_key(serve: Serve) -> None:
    arriving = http(409, json.dumps({"code": "conflict", "detail": "arriving"}).encode())
    taken = http(202, json.dumps({"id": "j1", "state": "queued", "steps": []}).encode())
    server, url = serve(answering(b"HT"), answering(arriving, taken))
    with Client(url, retries=QUICK) as client:
        assert client.submit([Step("s", A, B)]).id == "j1"
    keys = {request.headers["idempotency-key"] for request in server.requests}
    assert (len(server.requests), len(keys)) == (3, 1)


def public(kind: type) -> dict[str, Any]:
    """What a class offers, its blocks' methods among it by their common names."""
    methods = {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}
    prefix = "a" if kind is AsyncClient else ""
    return methods | {name: getattr(kind, f"__{prefix}{name}__") for name in ("enter", "exit")}


@pytest.mark.parametrize("name", sorted(public(Client) | public(AsyncClient)))
def test_both_clients_offer_the_same(name: str) -> None:
    blocking, awaited = public(Client)[name], public(AsyncClient)[name]
    assert inspect.signature(blocking) == inspect.signature(awaited)
    assert not inspect.iscoroutinefunction(blocking)
    assert inspect.iscoroutinefunction(awaited) is (name != "empty")  # which waits for nothing
    if name in ("enter", "exit"):
        return
    assert blocking.__doc__
    # borrow's example alone differs, as its blocks do.
    assert blocking.__doc__ == awaited.__doc__.replace("async with await", "with")


def test_both_clients_are_made_alike() -> None:
    def parameters(kind: type) -> dict[str, inspect.Parameter]:
        found = dict(inspect.signature(kind).parameters)
        del found["transport"]  # of each kind's own
        return found

    assert parameters(Client) == parameters(AsyncClient)


@pytest.mark.parametrize(
    "error",
    [
        errors.Invalid(422, "invalid", "must be positive", field="m", limit=3, request_id="r"),
        errors.Busy(503, "unavailable", "not now", retry_after=2.0),
        errors.TimedOut("no reply", sent=True),
        errors.JobFailed("it failed", {"id": "j"}),
        errors.GemmError("odd"),
    ],
)
def test_a_failure_crosses_to_another_process(error: errors.GemmError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
