"""The HTTP server: receives the application and settings, serves until a signal, and drains before it leaves.

On the first SIGTERM or SIGINT new work is refused with 503 (readiness too) while accepted work finishes within
the grace period and open connections are served; then the sockets close and the process ends with status 0. A
second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn

log = logging.getLogger("gemm.server")


class Server(uvicorn.Server):
    """A uvicorn server whose exit waits for `drain` (a coroutine function, bounded by its own grace period)."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)  # type: ignore[arg-type]
        # What start-up made stays; without it each collection looks at what the requests under way hold only.
        gc.freeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        # uvicorn raises captured signals again when it has shut down; a drained exit has status 0 instead.
        if self._loop is None or self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        log.info("signal %d: draining", sig)
        self._draining = self._loop.create_task(self._leave())
        # A signal handler of Python runs between bytecodes; an idle loop must be woken to see the task.
        self._loop.call_soon_threadsafe(lambda: None)

    async def _leave(self) -> None:
        try:
            await self._drain()
        finally:
            self.should_exit = True
