"""Bytes in and out over a plain socket: receives sizes, hands on seconds; and the raw sockets to compare with."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from service.arena import Arena

CHUNK = 1 << 20


class Peer:
    """A kept connection that speaks just enough HTTP/1.1 to send and receive without copies of its own."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(
        self,
        method: str,
        target: str,
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        *,
        accept: str = "application/octet-stream",
    ) -> float:
        """Send a request, receive its reply's body into `into`; seconds from the first byte to the last."""
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        started = time.perf_counter()
        self.socket.sendall(head.encode())
        self.socket.sendall(body)
        self._receive(into)
        return time.perf_counter() - started

    def _receive(self, into: memoryview | None) -> None:
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            piece = self.socket.recv(65536)
            if not piece:
                raise RuntimeError("the connection was closed")
            data += piece
        head, rest = bytes(data[:end]).decode(), memoryview(data)[end + 4 :]
        if not re.match(r"HTTP/1.1 20[01] ", head):
            raise RuntimeError(head + bytes(rest).decode(errors="replace"))
        length = next(
            int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length")
        )
        target = into if into is not None else memoryview(bytearray(length))
        if len(target) != length:
            raise RuntimeError(f"{length} bytes came, {len(target)} were due")
        target[: len(rest)] = rest
        _fill(self.socket, target[len(rest) :])

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def _fill(source: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        n = source.recv_into(view[at:])
        if n == 0:
            raise RuntimeError("the connection was closed")
        at += n


class Raw:
    """A process that receives into shared memory and sends from it with bare socket calls: what to compare with."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_raw_server, args=(theirs, nbytes), daemon=True)
        self._process.start()
        self.socket = socket.create_connection(("127.0.0.1", ours.recv()))

    def receive(self, body: memoryview) -> float:
        """Seconds in which the process received `body` and said so."""
        started = time.perf_counter()
        self.socket.sendall(b"r" + len(body).to_bytes(8, "little"))
        self.socket.sendall(body)
        self.socket.recv(1)
        return time.perf_counter() - started

    def send(self, into: memoryview) -> float:
        """Seconds in which the process sent `into`'s length in pieces of 1 MB."""
        started = time.perf_counter()
        self.socket.sendall(b"s" + len(into).to_bytes(8, "little"))
        _fill(self.socket, into)
        return time.perf_counter() - started

    def close(self) -> None:
        """End the process."""
        self.socket.close()
        self._process.join(10)


def _raw_server(pipe: Connection[Any, Any], nbytes: int) -> None:
    arena = Arena.create(nbytes)
    for start in range(0, nbytes, os.sysconf("SC_PAGE_SIZE")):
        arena.memory[start] = 0
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    while True:
        order = bytearray(9)
        try:
            _fill(connection, memoryview(order))
        except RuntimeError:
            return
        view = arena.memory[: int.from_bytes(order[1:], "little")]
        if order[:1] == b"r":
            _fill(connection, view)
            connection.sendall(b".")
        else:
            for start in range(0, len(view), CHUNK):
                connection.sendall(view[start : start + CHUNK])
