"""The load generator: what it counts."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from benchmarks.clients import Clients


@pytest.fixture
def server():
    """Answers every request; a target that ends with 7 is refused."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        data = b""
        with connection, contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                data += piece
                while b"\r\n\r\nbody" in data:
                    head, _, data = data.partition(b"\r\n\r\nbody")
                    seen.append(head.split()[1])
                    status = b"500 no" if head.split()[1].endswith(b"7") else b"200 OK"
                    connection.sendall(b"HTTP/1.1 " + status + b"\r\ncontent-length: 2\r\n\r\nok")

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], seen
    listener.close()


def test_answers_are_counted_by_window_and_failures_are_told(server) -> None:
    port, seen = server
    clients = Clients(port, 4, "/gemm?n={}", b"body", processes=2)
    clients.window(0.1)
    first = len(seen)
    window = clients.window(0.5)
    assert 0 < window.answers <= len(seen) - first + 4  # four were on their way
    assert 0 < window.p50_seconds <= window.p99_seconds
    assert set(seen) == {b"/gemm?n=%d" % n for n in range(4)}
    clients.stop()
    last = len(seen)
    broken = Clients(port, 1, "/gemm?n=7", b"body")
    with pytest.raises(RuntimeError, match=r"failed, the first: HTTP/1\.1 500"):
        broken.window(0.2)
    broken.stop()
    assert last < len(seen)
