"""What nobody waits for: receives accounts of what is over, gives them to metrics and log once others are served.

Who has its reply may ask again at once, sooner than its last product is counted. So that is done while a worker has
the next, or a moment later where there is none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

#: Longest that anything waits.
SECONDS = 0.002


class Aside:
    """Accounts that are still to be given, in their order; on one event loop."""

    def __init__(self) -> None:
        self._accounts: deque[Callable[[], object]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, account: Callable[[], object]) -> None:
        """Give it soon."""
        self._accounts.append(account)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SECONDS, self._due)

    def soon(self) -> None:
        """The loop has nothing better to do once it is through with what it was called for."""
        if self._accounts:
            asyncio.get_running_loop().call_soon(self.give)

    def give(self) -> None:
        """Give all now: somebody reads."""
        try:
            while self._accounts:
                self._accounts.popleft()()
        finally:
            self.soon()  # what one that failed has left

    def _due(self) -> None:
        self._timer = None
        self.give()
