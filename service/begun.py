"""A product that somebody waits for who isn't a task: receives its outcome, hands it on in a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.outcome import Outcome

#: Is told an outcome, or why there is none; nothing where who waited has left.
Told = Callable[[Outcome | None, Exception | None], None]


class Begun:
    """A product that somebody waits for who isn't a task: told in a call, at once.

    What hangs on a future is called in the loop's next turn only.
    """

    __slots__ = ("_leave", "_told")

    def __init__(self, told: Told, leave: Callable[[], None]) -> None:
        self._told: Told | None = told
        self._leave = leave

    def done(self) -> bool:
        """Whether it is over, or was left."""
        return self._told is None

    def set_result(self, outcome: Outcome) -> None:
        """It is computed."""
        self._tell(outcome, None)

    def set_exception(self, error: Exception) -> None:
        """It won't be computed."""
        self._tell(None, error)

    def cancel(self) -> None:
        """Nobody waits for it any more; again, or once it is over, is no harm."""
        if self._told is not None:
            self._leave()
            self._tell(None, None)

    def end_with(self, task: asyncio.Task[Outcome]) -> None:
        """As a task that is over ended; for its callbacks."""
        if task.cancelled():
            self.cancel()
        elif isinstance(error := task.exception(), Exception):
            self.set_exception(error)
        else:
            self.set_result(task.result())

    def _tell(self, outcome: Outcome | None, error: Exception | None) -> None:
        told, self._told = self._told, None
        if told is not None:
            told(outcome, error)
