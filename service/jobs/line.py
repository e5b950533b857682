"""FLOPs of jobs' steps: receives what a step takes and its key's quota, hands on when the key has so much.

Steps of one key wait in a line, so that each has its turn and only the first looks at the bucket. Who waits here holds
no memory and none of the places of those that compute, so others' steps go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from weakref import WeakValueDictionary

from service.admit import Rates
from service.batch import Rate


class Line:
    """The lines of all keys, over the buckets that requests take from too."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._turns: WeakValueDictionary[Rate, asyncio.Lock] = WeakValueDictionary()

    async def pay(self, rate: Rate, flops: float, stop: asyncio.Event) -> None:
        """Take `flops` from the key's bucket as soon as it permits; nothing is taken where `stop` is set first."""
        turn = self._turns.setdefault(rate, asyncio.Lock())
        async with turn:
            while not stop.is_set():
                seconds = self._rates.wait(rate, flops, time.monotonic())
                if not seconds:
                    self._rates.spend(rate, flops, time.monotonic())
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), seconds)
