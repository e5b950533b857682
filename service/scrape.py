"""/metrics on a port of its own: receives connections, hands on the exposition and nothing else.

For networks where scrapers may reach this port and must not reach the service's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SECONDS = 10.0  # for a scraper to send its head
_HEAD_BYTES = 16384


async def serve(host: str, port: int, exposition: Callable[[], bytes]) -> asyncio.Server:
    """Listen until the returned server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_reply(head, exposition))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=_HEAD_BYTES)


def _reply(head: bytes, exposition: Callable[[], bytes]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path != b"/metrics":
        status, body = "404 Not Found", b"only /metrics is here\n"
    elif method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed\r\nAllow: GET, HEAD", b""
    else:
        status, body = "200 OK", exposition()
    lines = (
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else body)
