"""What fronts share, for tests: a real PostgreSQL, a real S3 server, and cables to them that can be cut.

Each is a process (or thread) of its own on a free port, ended by pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psycopg
import pytest

from benchmarks.load import free_port

#: Where Debian keeps PostgreSQL's server; the newest.
BIN = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda path: float(path.parent.name))


def until_open(port: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    """Wait until somebody listens there."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, f"{process.args} ended with {process.returncode}"
            assert time.monotonic() < end, f"{process.args} doesn't listen after {seconds} s"
            time.sleep(0.02)
        else:
            return


@dataclass
class Postgres:
    """A running server."""

    port: int
    folder: Path
    user: int | None
    process: subprocess.Popen[bytes]

    def database(self, *, port: int | None = None) -> str:
        """URL of a new database; through `port` where that is a cable's."""
        name = f"gemm_{secrets.token_hex(6)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name, port=port)

    def url(self, name: str, *, port: int | None = None) -> str:
        """URL of a database."""
        return f"postgresql://gemm:secret-word@127.0.0.1:{port or self.port}/{name}"

    def start(self) -> None:
        """Start the server on its folder."""
        options = ["-D", self.folder / "data", "-p", str(self.port), "-k", "", "-h", "127.0.0.1"]
        self.process = subprocess.Popen(
            # No machine crashes here, so the disk isn't waited for; a killed server keeps what it committed.
            [_program("postgres"), *options, "-c", "max_connections=200", "-c", "fsync=off"],
            user=self.user,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until_open(self.port, self.process)
        end = time.monotonic() + 120
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                assert time.monotonic() < end, "PostgreSQL takes no connection"
                time.sleep(0.05)
            else:
                return

    def stop(self, number: int = signal.SIGINT) -> None:
        """End it: SIGINT is a fast shutdown, SIGQUIT as a crash."""
        self.process.send_signal(number)
        self.process.wait(60)


def _program(name: str) -> Path:
    assert BIN is not None
    return BIN / name


@contextlib.contextmanager
def postgres() -> Iterator[Postgres]:
    """A new cluster in a folder of its own, run by an unprivileged user."""
    if BIN is None:
        pytest.skip("PostgreSQL's server isn't installed (Debian: postgresql)")
    user = pwd.getpwnam("postgres").pw_uid if os.getuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="gemm-postgres-"))
    try:
        if user is not None:
            os.chown(folder, user, -1)
        word = folder / "word"
        word.write_text("secret-word")
        word.chmod(0o644)
        make = [_program("initdb"), "-D", folder / "data", "-U", "gemm", "--no-sync", "-A", "scram-sha-256"]
        subprocess.run([*make, f"--pwfile={word}"], user=user, check=True, capture_output=True, cwd=folder)
        server = Postgres(free_port(), folder, user, None)  # type: ignore[arg-type]
        server.start()
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.stop(signal.SIGQUIT)  # its folder goes anyway
    finally:
        shutil.rmtree(folder)


@dataclass
class S3:
    """A running server that speaks S3."""

    port: int
    process: subprocess.Popen[bytes]

    def bucket(self) -> str:
        """URL of a new bucket."""
        name = f"gemm-{secrets.token_hex(6)}"
        ask = urllib.request.Request(f"http://127.0.0.1:{self.port}/{name}", method="PUT")
        urllib.request.urlopen(ask, timeout=60).close()
        return f"s3://{name}/tensors-of-tests"

    def environ(self, *, port: int | None = None) -> dict[str, str]:
        """What finds it, through `port` where that is a cable's."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "word",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
        }


@contextlib.contextmanager
def s3() -> Iterator[S3]:
    """moto's server, empty."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until_open(port, process)
        yield S3(port, process)
    finally:
        process.terminate()
        process.wait(60)


class Cable:
    """Forwards TCP from a port of its own; `cut` it, and nothing passes.

    "refuse": connections end and new ones are refused. "hold": all stays open, and nothing arrives. `came` counts
    the bytes that came from the far end.
    """

    def __init__(self, to: int) -> None:
        self.to = to
        self.came = 0
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._mend())

    def cut(self, how: Literal["refuse", "hold"] = "refuse") -> None:
        """Cut it."""
        self._run(self._cut(how))

    def mend(self) -> None:
        """Let all pass again."""
        self._run(self._mend())

    def close(self) -> None:
        """End it."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)  # type: ignore[arg-type]

    async def _mend(self) -> None:
        self._open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _cut(self, how: str) -> None:
        self._open.clear()
        if how == "hold":
            return
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        self._open.set()

    async def _end(self) -> None:
        while self._tasks:
            await self._cut("refuse")
            await asyncio.wait(self._tasks, timeout=0.1)
        await self._cut("refuse")
        await asyncio.sleep(0)  # transports that were aborted close

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        await self._open.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        try:
            # An end that is gone without a word ends the other: nobody else tells it.
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer))
                both.create_task(self._pump(far_reader, writer, count=True))
        except* OSError:
            pass
        finally:
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool = False
    ) -> None:
        while piece := await reader.read(1 << 16):
            await self._open.wait()
            self.came += len(piece) if count else 0
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


@contextlib.contextmanager
def cable(to: int) -> Iterator[Cable]:
    """A cable for the length of a block."""
    made = Cable(to)
    try:
        yield made
    finally:
        made.close()
