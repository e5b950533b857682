"""/metrics and health on a port of their own: receives connections, hands on these and nothing else.

For networks where scrapers and probes may reach this port and must not reach the service's, or can't show the
client certificate that it asks for.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable

_SECONDS = 10.0  # for a scraper to send its head
_HEAD_BYTES = 16384


async def serve(
    listener: socket.socket, exposition: Callable[[str], tuple[bytes, str]], ready: Callable[[], bool]
) -> asyncio.Server:
    """Answer on `listener` until the returned server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_reply(head, exposition, ready))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(answer, sock=listener, limit=_HEAD_BYTES)


_ACCEPT = re.compile(rb"\r\naccept:([^\r\n]*)", re.IGNORECASE)


def _reply(head: bytes, exposition: Callable[[str], tuple[bytes, str]], ready: Callable[[], bool]) -> bytes:
    kind = "text/plain; charset=utf-8"
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if path not in (b"/metrics", b"/health/live", b"/health/ready"):
        status, body = "404 Not Found", b"only /metrics and /health are here\n"
    elif method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed\r\nAllow: GET, HEAD", b""
    elif path == b"/metrics":
        accept = b",".join(_ACCEPT.findall(head)).decode("latin-1")
        status, (body, kind) = "200 OK", exposition(accept)
    elif path == b"/health/live" or ready():
        status, body = "200 OK", b"ok\n"
    else:
        status, body = "503 Service Unavailable", b"no worker takes work\n"
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else body)
