"""/metrics and health on their own port."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from service import scrape


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /metrics HTTP/1.1", 200, b"gemm 1\n"),
        ("GET /metrics?x=1 HTTP/1.0", 200, b"gemm 1\n"),
        ("HEAD /metrics HTTP/1.1", 200, b""),
        ("GET /health/live HTTP/1.1", 200, b"ok\n"),
        ("GET /health/ready HTTP/1.1", 503, b"no worker takes work\n"),
        ("POST /metrics HTTP/1.1", 405, b""),
        ("GET /gemm HTTP/1.1", 404, b"only /metrics and /health are here\n"),
    ],
)
async def test_answers_metrics_and_health_only(request_line: str, status: int, body: bytes) -> None:
    server = await scrape.serve(listener(), lambda accept: (b"gemm 1\n", "text/plain"), lambda: False)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(f"{request_line}\r\nHost: x\r\n\r\n".encode())
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    assert int(head.split()[1]) == status
    assert rest == body


async def test_a_head_without_end_is_cut_off() -> None:
    server = await scrape.serve(listener(), lambda accept: (b"", "text/plain"), lambda: True)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
