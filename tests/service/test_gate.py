"""Gate: who passes, and how everything ends, over a small app and (for connections) a real uvicorn."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from pydantic import BaseModel

from service import gate, keys
from service.errors import ServiceError
from service.gate import Gate
from service.keys import Keys, Quota
from service.settings import Settings, SettingsError, load
from service.transfer import ClientGone
from tests.service.real import running


@dataclass
class Counts:
    """Stands for the metrics: remembers what it was told."""

    requests: list[tuple[str, int]] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    def request(self, route: str, code: int, seconds: float) -> None:
        assert 0 <= seconds < 60
        self.requests.append((route, code))

    def reject(self, code: str) -> None:
        self.rejected.append(code)


@dataclass
class Parts:
    """The shared parts that the gate uses."""

    settings: Settings
    keys: Keys
    metrics: Counts = field(default_factory=Counts)
    tracer: Any = None


class Body(BaseModel):
    size: int


class Guarded(FastAPI):
    """A FastAPI app with the gate outermost, as the service's own."""

    def build_middleware_stack(self) -> Any:
        return Gate(AsyncExitStackMiddleware(self.router), self)


def app_with(settings: Settings) -> Guarded:
    app = Guarded(docs_url=None)
    app.state.services = Parts(settings, Keys(settings))

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/metrics")
    async def metrics() -> str:
        return ""

    @app.post("/gemm")
    async def gemm(request: Request) -> dict[str, Any]:
        state = request.scope["state"]
        state["stages"]["decode"] = 0.5
        return {"owner": state["principal"].owner, "traceparent": state["traceparent"]}

    @app.get("/tensors/{name}")
    async def tensor(name: str) -> dict[str, str]:
        return {"name": name}

    @app.post("/body")
    async def body(body: Body) -> dict[str, int]:
        return {"size": body.size}

    @app.get("/fail/{how}")
    async def fail(how: str) -> None:
        match how:
            case "service":
                raise ServiceError("queue_full", "no", limit=3, retry_after=1.2)
            case "gone":
                raise ClientGone
            case "bug":
                raise ValueError("SECRET")
        await asyncio.sleep(30)

    return app


def calling(app: Guarded, host: str = "localhost", **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}", headers=headers)


@pytest.fixture
def open_app() -> Guarded:
    return app_with(load(environ={}))


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[Guarded, dict[str, str]]:
    path = tmp_path / "keys.json"
    tokens = {
        "alice": keys.add(path, "alice", scopes=["gemm"])[1],
        "bob": keys.add(path, "bob", scopes=["tensors"], quota=Quota(requests_per_second=1))[1],
        "root": keys.add(path, "root", scopes=["admin"])[1],
    }
    return app_with(load({"keys_file": str(path), "host": "0.0.0.0"}, environ={})), tokens


def problem(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = reply.json()
    assert (document["code"], document["status"]) == (code, status)
    assert document["request_id"] == reply.headers["x-request-id"]
    return document


async def test_request_id_and_trace_pass_through(open_app: Guarded) -> None:
    async with calling(open_app) as client:
        traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
        reply = await client.post("/gemm", headers={"X-Request-Id": "mine-1", "traceparent": traceparent})
        assert reply.headers["x-request-id"] == "mine-1"
        assert reply.json()["owner"] == "local"
        assert reply.json()["traceparent"].split("-")[1] == "a" * 32
        assert reply.json()["traceparent"].split("-")[2] != "b" * 16
        assert reply.headers["traceresponse"] == reply.json()["traceparent"]
        made = (await client.post("/gemm", headers={"X-Request-Id": "a\tb"})).headers["x-request-id"]
        assert len(made) == 16
    counts = open_app.state.services.metrics
    assert counts.requests == [("/gemm", 200)] * 2


async def test_unknown_path_and_method(open_app: Guarded) -> None:
    async with calling(open_app) as client:
        problem(await client.get("/nowhere/at/all"), 404, "not_found")
        reply = await client.get("/gemm")
        assert "POST" in problem(reply, 405, "method_not_allowed")["detail"]
        assert reply.headers["allow"] == "POST"
        reply = await client.get("/v2/nowhere")
        assert reply.json() == {"error": "there is no such path; /docs lists all"}
        head = await client.head("/nowhere")
        assert (head.status_code, head.content) == (404, b"")
    counts = open_app.state.services.metrics
    assert counts.requests[0] == ("unmatched", 404)
    assert counts.rejected[0] == "not_found"


async def test_every_exception_is_a_clear_answer(open_app: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    async with calling(open_app) as client:
        reply = await client.get("/fail/service")
        assert problem(reply, 429, "queue_full")["limit"] == 3
        assert reply.headers["retry-after"] == "2"
        document = problem(await client.get("/fail/bug"), 500, "internal")
        assert "SECRET" not in json.dumps(document)
        document = problem(await client.post("/body", json={"size": "SECRET"}), 422, "invalid")
        assert document["field"] == "size"
        assert "SECRET" not in json.dumps(document)
    assert open_app.state.services.metrics.rejected == ["queue_full", "internal", "invalid"]


async def test_client_that_left_is_499_in_metrics_only(open_app: Guarded) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/fail/gone",
        "raw_path": b"/fail/gone",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("localhost", 80),
        "client": None,
    }
    await open_app(scope, receive, send)
    assert sent == []
    counts = open_app.state.services.metrics
    assert counts.requests == [("/fail/{how}", 499)]
    assert counts.rejected == ["client_gone"]


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "10.0.0.1", "[::2]:8000", "localhost:x@e"]
)
async def test_foreign_host_is_misdirected_except_for_probes(open_app: Guarded, host: str) -> None:
    async with calling(open_app) as client:
        reply = await client.post("/gemm", headers={"Host": host})
        if host != "localhost:x@e":
            problem(reply, 421, "misdirected")
        for path in ("/health/live", "/metrics"):
            assert (await client.get(path, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "localhost."])
async def test_own_names(open_app: Guarded, host: str) -> None:
    async with calling(open_app) as client:
        assert (await client.post("/gemm", headers={"Host": host})).status_code == 200


def test_hosts_beyond_loopback() -> None:
    names = gate.allowed_hosts(load({"host": "0.0.0.0", "hosts": "gemm.example"}, environ={}))
    for host in (
        "gemm.example",
        "GEMM.example:80",
        "10.1.2.3:8000",
        "[fe80::1]",
        socket.gethostname(),
        "localhost",
    ):
        gate.check_host(host, names)
    with pytest.raises(ServiceError):
        gate.check_host("evil.example", names)
    gate.check_host("evil.example", gate.allowed_hosts(load({"hosts": "*"}, environ={})))


async def test_foreign_origin_is_refused(open_app: Guarded) -> None:
    async with calling(open_app) as client:
        for origin in ("http://evil.example", "null", "http://localhost:8001", "file://"):
            problem(await client.post("/gemm", headers={"Origin": origin}), 403, "forbidden")
        assert (await client.post("/gemm", headers={"Origin": "http://localhost"})).status_code == 200


async def test_keys_scopes_and_open_paths(keyed: tuple[Guarded, dict[str, str]]) -> None:
    app, tokens = keyed
    async with calling(app, "127.0.0.1") as client:

        async def call(method: str, path: str, who: str | None) -> httpx.Response:
            headers = {"Authorization": f"Bearer {tokens[who]}"} if who else {}
            return await client.request(method, path, headers=headers)

        for path in ("/health/live", "/metrics"):
            assert (await call("GET", path, None)).status_code == 200
        for path in (
            "/gemm",
            "/tensors/a",
            "/docs/x",
            "/openapi.json",
            "/nowhere",
            "/limits",
            "/healthy",
            "/v2",
        ):
            reply = await call("POST", path, None)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"].startswith("Bearer")
        for path in ("/", "/page/app.js", "/docs", "/docs/static/swagger-ui.css"):
            assert (await call("GET", path, None)).status_code == 404
        assert (await call("POST", "/gemm", "alice")).json()["owner"] == "alice"
        problem(await call("GET", "/tensors/a", "alice"), 403, "forbidden")
        assert (await call("GET", "/tensors/a", "root")).status_code == 200
        assert (await call("GET", "/tensors/a", "bob")).status_code == 200
        reply = await call("GET", "/tensors/a", "bob")
        problem(reply, 429, "quota")
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/gemm", "gemm"),
        ("/gemm/", "gemm"),
        ("/variants/choose", "gemm"),
        ("/tensors", "tensors"),
        ("/jobs/1/events", "jobs"),
        ("/limits", None),
        ("/v2/models/gemm/infer", "gemm"),
        ("/v2/models/gemm/config", None),
        ("/v2/repository/index", None),
        ("/v2/repository/models/gemm/load", "admin"),
        ("/v2/systemsharedmemory/region/a/register", "admin"),
        ("/v2/cudasharedmemory/unregister", "admin"),
    ],
)
def test_scope_of_a_path(path: str, scope: str | None) -> None:
    assert gate.wanted_scope(path) == scope


async def test_without_keys_other_machines_are_refused_under_any_server(open_app: Guarded) -> None:
    for address, status in [("10.0.0.5", 403), ("127.0.0.9", 200), ("::ffff:127.0.0.1", 200), ("odd", 403)]:
        transport = httpx.ASGITransport(open_app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.post("/gemm")).status_code == status, address
    insecure = app_with(load({"insecure": "true"}, environ={}))
    transport = httpx.ASGITransport(insecure, client=("10.0.0.5", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/gemm")).status_code == 200


async def test_websockets_are_closed(open_app: Guarded) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await open_app({"type": "websocket", "path": "/gemm", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close"}]


def test_exposure(tmp_path: Path) -> None:
    def expose(**flags: str) -> None:
        settings = load(flags, environ={})
        gate.check_exposure(settings, Keys(settings))

    expose()
    expose(uds=str(tmp_path / "s"), host="0.0.0.0")
    expose(host="0.0.0.0", insecure="true")
    keys.add(tmp_path / "keys.json", "alice")
    expose(host="0.0.0.0", keys_file=str(tmp_path / "keys.json"))
    with pytest.raises(SettingsError, match="--insecure"):
        expose(host="0.0.0.0")


@pytest.fixture
def served(open_app: Guarded) -> Iterator[tuple[str, int]]:
    """The open app behind a real uvicorn, in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        config = uvicorn.Config(open_app, log_config=None, lifespan="off", ws="none", http="httptools")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def test_connection_stays_usable_after_each_kind_of_refusal(served: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*served, timeout=10)
    for _ in range(2):
        for method, path, headers, status in [
            ("POST", "/fail/bug", {}, 405),
            ("GET", "/fail/bug", {}, 500),
            ("GET", "/fail/service", {}, 429),
            ("GET", "/nowhere", {}, 404),
            ("POST", "/gemm", {"Host": "evil.example"}, 421),
            ("POST", "/gemm", {"Origin": "http://evil.example"}, 403),
            ("POST", "/gemm", {}, 200),
        ]:
            connection.request(method, path, body=b"x" * 1000 if method == "POST" else None, headers=headers)
            used = connection.sock
            reply = connection.getresponse()
            reply.read()
            assert (reply.status, connection.sock) == (status, used)
    connection.close()


def test_http_1_1_needs_one_host(served: tuple[str, int]) -> None:
    for head in (
        b"GET /nowhere HTTP/1.1\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nHost: x\r\n\r\n",
    ):
        with socket.create_connection(served, timeout=10) as connection:
            connection.sendall(head)
            assert b" 400 " in connection.recv(4096).splitlines()[0]


@pytest.mark.parametrize(("encoding", "status"), [("gzip, chunked", 501), ("Chunked", 200)])
def test_a_transfer_that_is_encoded_is_not_taken_as_it_is(
    served: tuple[str, int], encoding: str, status: int
) -> None:
    with socket.create_connection(served, timeout=10) as connection:
        head = f"POST /gemm HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: {encoding}\r\n\r\n"
        connection.sendall(head.encode() + b"1\r\nx\r\n0\r\n\r\n")
        assert f" {status} ".encode() in connection.recv(4096).splitlines()[0]


@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding", "Idempotency-Key", "Authorization"])
def test_a_header_that_may_come_once_is_refused_twice(served: tuple[str, int], name: str) -> None:
    with socket.create_connection(served, timeout=10) as connection:
        connection.sendall(
            f"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n{name}: a\r\n{name}: b\r\n\r\n".encode()
        )
        reply = connection.recv(4096)
    assert b" 400 " in reply.splitlines()[0]
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["field"] == name.lower()


def test_bytes_a_second_of_a_key_are_held_on_a_real_service(tmp_path: Path) -> None:
    quota = keys.Quota(bytes_per_second=100_000)
    _, secret = keys.add(tmp_path / "keys.json", "ann", quota=quota)
    large = np.ones((100, 300), np.float32)  # 120,000 bytes: more than a second's worth
    with running(tmp_path / "data", "--keys-file", str(tmp_path / "keys.json")) as service:
        service.http.headers["authorization"] = f"Bearer {secret}"
        service.ready()
        assert service.put("w", large).status_code == 201
        refused = service.put("w", large)
        assert (refused.status_code, refused.json()["code"]) == (429, "quota")
        assert int(refused.headers["retry-after"]) >= 1
        read = {"accept": "application/octet-stream"}
        service.until(
            lambda: service.http.get("/tensors/w", headers=read).status_code == 200,
            20,
            "the bucket fills again",
        )
        # The reply has to be paid for as well.
        assert service.http.get("/tensors/w", headers=read).status_code == 429
