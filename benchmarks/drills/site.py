"""Two fronts that share everything, behind a proxy: receives nothing, hands on a site that drills can hurt.

PostgreSQL, an S3 server (moto's), HAProxy with deploy/proxy/haproxy.cfg, and `gemm-service serve` twice: processes
of their own, ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.service import shared
from tests.service.real import ROOT, Service

#: Time limit of the fronts for one request to what they share, seconds.
SHARED_SECONDS = 4.0
LEASE_SECONDS = 3.0


@dataclass
class Site:
    """What a drill works with; `fronts` by place."""

    folder: Path
    environ: dict[str, str]
    ports: tuple[int, int]
    postgres: shared.Postgres
    to_postgres: shared.Cable
    to_s3: shared.Cable
    proxy: str = ""
    socket: Path = Path()
    fronts: list[Service] = field(default_factory=list)

    def start(self, place: int) -> Service:
        """A front, once it takes work."""
        flags = ("--port", str(self.ports[place]), "--log-level", "warning", "--grace-seconds", "20")
        light = ("--backend", "numpy", "--arena-bytes", "128MiB", "--local", "false")
        return Service(self.folder / str(place), *light, *flags, environ=self.environ).ready()

    def tell_proxy(self, command: str) -> str:
        """One command on HAProxy's socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(os.fspath(self.socket))
            line.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: line.recv(4096), b"")).decode()

    def until_proxied(self, place: int, seconds: float = 10) -> None:
        """Wait until the proxy sends requests to a front."""
        until(lambda: f"gemm-{place}" in self._up(), seconds, f"front {place} in the proxy")

    def _up(self) -> list[str]:
        try:
            told = self.tell_proxy("show stat")
        except (FileNotFoundError, ConnectionRefusedError):
            return []  # HAProxy opens its ports before its socket
        rows = [row.split(",") for row in told.splitlines()]
        return [row[1] for row in rows if len(row) > 17 and row[17].startswith("UP")]


def until(true: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def site(*, proxy: bool = True) -> Iterator[Site]:
    """The site for the length of a block."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(shared.postgres())
        s3 = stack.enter_context(shared.s3())
        to_postgres = stack.enter_context(shared.cable(postgres.port))
        to_s3 = stack.enter_context(shared.cable(s3.port))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gemm-drill-")))
        environ = s3.environ(port=to_s3.port) | {
            "GEMM_STORE": s3.bucket(),
            "GEMM_JOURNAL": postgres.database(port=to_postgres.port),
            "GEMM_SHARED_SECONDS": str(SHARED_SECONDS),
            "GEMM_LEASE_SECONDS": str(LEASE_SECONDS),
        }
        ports = (shared.free_port(), shared.free_port())
        made = Site(folder, environ, ports, postgres, to_postgres, to_s3)
        stack.callback(lambda: [front.close() for front in made.fronts])
        for place in range(2):
            made.fronts.append(made.start(place))
        if proxy:
            stack.enter_context(haproxy(made))
        yield made


@contextlib.contextmanager
def haproxy(made: Site) -> Iterator[None]:
    """HAProxy before the site's fronts, as deploy/ has it."""
    port = shared.free_port()
    made.proxy, made.socket = f"http://127.0.0.1:{port}", made.folder / "haproxy.sock"
    environ = {
        "GEMM_PROXY": f"127.0.0.1:{port}",
        "GEMM_PROXY_SOCKET": os.fspath(made.socket),
        "GEMM_FRONT_0": f"127.0.0.1:{made.ports[0]}",
        "GEMM_FRONT_1": f"127.0.0.1:{made.ports[1]}",
    }
    process = subprocess.Popen(
        ["haproxy", "-db", "-f", ROOT / "deploy/proxy/haproxy.cfg"],
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        shared.until_open(port, process)
        for place in range(2):
            made.until_proxied(place)
        yield
    finally:
        process.terminate()
        process.wait(10)
