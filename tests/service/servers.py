"""A real server in a thread: receives an ASGI application and limits, hands on its address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
import uvloop

from service.bounds import Limits
from service.protocol import GemmProtocol


@contextlib.contextmanager
def serving(
    app: Any, limits: Limits, refused: list[int] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, int]]:
    """Serve `app` on a free port of 127.0.0.1; `refused` collects the statuses that the protocol answered."""
    hook = None if refused is None else refused.append
    config = uvicorn.Config(
        app,
        http=GemmProtocol.with_limits(limits, hook),
        ssl_context_factory=None if tls is None else lambda *_: tls,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_run, args=(server, listener))
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # Not `serve`: that takes over signals, which only a main thread may.
        runner.run(server._serve([listener]))
