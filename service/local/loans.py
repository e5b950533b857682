"""Stored tensors that a client borrows on its GPU: receives names, hands on loans, and ends each in time.

A loan is a copy of the tensor in the GPU's memory that the client opens by a CUDA IPC handle. It ends when it is
returned, with the session, with the worker, or after LOAN_SECONDS; the client must have closed it by then.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

from service.errors import ServiceError
from service.local.messages import Loan
from service.services import Services

#: Loans of one session at once.
MOST_LOANS = 16
#: Longest time of a loan.
LOAN_SECONDS = 600.0


@dataclass(slots=True)
class _Made:
    """A loan: the worker's number for it, and the clock that ends it."""

    worker: int
    life: int | None
    number: int
    timer: asyncio.TimerHandle


class Loans:
    """The loans of one session."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._made: dict[int, _Made] = {}
        self._numbers = itertools.count(1)
        self._making = 0
        self._closed = False

    async def lend(self, owner: str, name: str, message: int) -> Loan:
        """The answer to a client's packet `message`. ServiceError not_found, lost, no_room, not_implemented."""
        if len(self._made) + self._making >= MOST_LOANS:
            raise ServiceError("no_room", "a session borrows no more tensors", limit=MOST_LOANS)
        self._making += 1
        # To the end, whoever leaves: else nobody would know the loan's number.
        return await asyncio.shield(asyncio.ensure_future(self._lend(owner, name, message)))

    async def _lend(self, owner: str, name: str, message: int) -> Loan:
        supervisor = self._services.supervisor
        try:
            with await self._services.store.pin(owner, name) as pin:
                operand, etag = pin.operand, pin.etag
                await supervisor.kept.bring(operand.tensor)
                handle, told = await supervisor.lend(operand)
        finally:
            self._making -= 1
        number = next(self._numbers)
        timer = asyncio.get_running_loop().call_later(LOAN_SECONDS, self.end, number)
        self._made[number] = _Made(handle.index, handle.pid, told["loan"], timer)
        if self._closed:
            self.end(number)
        shape = tuple(operand.shape)
        return Loan(message, number, told["handle"], told["nbytes"], operand.dtype, shape, etag, handle.uuid)

    def end(self, number: int) -> None:
        """End one; again is no harm."""
        made = self._made.pop(number, None)
        if made is not None:
            made.timer.cancel()
            self._services.supervisor.end_loan(made.worker, made.life, made.number)

    def close(self) -> None:
        """End all, and what is being made."""
        self._closed = True
        for number in list(self._made):
            self.end(number)
