"""What the store does beside the loop: receives work, hands on tasks that end whoever leaves, and threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from service.errors import ServiceError

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Files that are read or written at once.
POOL_THREADS = 4


class Effects:
    """Tasks and a small pool of threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="store")
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run to the end even if who waits for it is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work that goes on if the waiting is cancelled."""
        return await asyncio.shield(self.spawn(work))

    async def in_pool(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def settle(self) -> None:
        """Until no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Whoever waited was told; what nobody may have waited for is in the log."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.DEBUG if isinstance(error, ServiceError) else logging.ERROR
            logger.log(level, "work of the store failed", exc_info=error)
