"""deploy/proxy with real proxies: a handle goes to one front, others are spread, one that refuses is passed over."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.service.shared import free_port, until_open

pytestmark = pytest.mark.ci
PROXY = Path(__file__).resolve().parents[1] / "deploy/proxy"


class Stub(ThreadingHTTPServer):
    """A front that says who it is; `draining` as a real one does."""

    draining = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Stub)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        ready = self.path == "/health/ready"
        self.send_response(503 if self.server.draining and not ready else 200)
        self.send_header("content-length", "0")
        self.send_header("x-front", str(self.server.server_port))
        self.end_headers()

    do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fronts() -> Iterator[list[Stub]]:
    made = [Stub(), Stub()]
    yield made
    for stub in made:
        stub.shutdown()
        stub.server_close()


@contextlib.contextmanager
def started(command: list[str], port: int, environ: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.DEVNULL)
    try:
        until_open(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=["haproxy", "nginx"])
def proxy(request: pytest.FixtureRequest, fronts: list[Stub], tmp_path: Path) -> Iterator[httpx.Client]:
    if shutil.which(request.param, path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(f"{request.param} isn't installed")
    port = free_port()
    environ: dict[str, str] = {}
    if request.param == "haproxy":
        environ = {"GEMM_PROXY": f"127.0.0.1:{port}", "GEMM_PROXY_SOCKET": str(tmp_path / "socket")}
        environ |= {f"GEMM_FRONT_{n}": f"127.0.0.1:{front.server_port}" for n, front in enumerate(fronts)}
        command = ["haproxy", "-db", "-f", str(PROXY / "haproxy.cfg")]
    else:
        text = (PROXY / "nginx.conf").read_text().replace("listen 8080", f"listen 127.0.0.1:{port}")
        for n, front in enumerate(fronts):
            assert f"gemm-{n}.gemm:8000" in text
            text = text.replace(f"gemm-{n}.gemm:8000", f"127.0.0.1:{front.server_port}")
        (tmp_path / "gemm.conf").write_text(text)
        folders = "".join(
            f"{kind}_temp_path {tmp_path}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
            f"http {{ access_log off; {folders} include {tmp_path}/gemm.conf; }}\n"
        )
        command = [
            shutil.which("nginx") or "/usr/sbin/nginx",
            "-p",
            str(tmp_path),
            "-c",
            str(tmp_path / "nginx.conf"),
        ]
    with started(command, port, environ) as url, httpx.Client(base_url=url) as client:
        yield client


def front_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.headers["x-front"]


def test_a_handle_goes_to_one_front_and_handles_are_spread(proxy: httpx.Client) -> None:
    seen = Counter()
    for n in range(40):
        headers = {"x-gemm-affinity": f"weight-{n}"}
        asks = [
            proxy.get(f"/tensors/weight-{n}", headers=headers),
            proxy.post("/gemm", params={"b": f"handle:weight-{n}"}, headers=headers),
        ]
        (front,) = {front_of(reply) for reply in asks}
        seen[front] += 1
    assert len(seen) == 2
    assert min(seen.values()) >= 8, seen


def test_requests_without_a_handle_are_spread(proxy: httpx.Client) -> None:
    seen = Counter(front_of(proxy.post("/gemm", content=b"x" * 100)) for _ in range(40))
    assert len(seen) == 2
    assert min(seen.values()) >= 8, seen


def test_one_that_refuses_is_passed_over(proxy: httpx.Client, fronts: list[Stub]) -> None:
    fronts[0].draining = True
    for _ in range(20):
        assert front_of(proxy.get("/tensors")) == str(fronts[1].server_port)


@pytest.mark.parametrize("proxy", ["haproxy"], indirect=True)
def test_haproxy_sends_a_small_body_again(proxy: httpx.Client, fronts: list[Stub]) -> None:
    fronts[0].draining = True
    for _ in range(20):
        assert front_of(proxy.post("/gemm", content=b"x" * 100)) == str(fronts[1].server_port)


@pytest.mark.parametrize("proxy", ["nginx"], indirect=True)
def test_nginx_finds_the_handle_in_path_and_query_too(proxy: httpx.Client) -> None:
    for n in range(20):
        asks = [
            proxy.get(f"/tensors/weight-{n}"),
            proxy.post(f"/gemm?a_shape=1x1&b=handle:weight-{n}"),
            proxy.post(f"/gemm?a_shape=1x1&b=handle%3Aweight-{n}"),
            proxy.get("/tensors", headers={"x-gemm-affinity": f"weight-{n}"}),
        ]
        assert len({front_of(reply) for reply in asks}) == 1
