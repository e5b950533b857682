"""Which batch goes to which worker, and when: receives queued work, hands batches to workers that have room for one.

What runs together is the queue's to say (batch.py), where it costs least is place.py's; here is when a worker is
sent more: while it computes the queue grows, so it is sent ahead only what hides the link and the copies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import partial

from service.awake import WakefulLoop
from service.batch import Queue, Taken, Work
from service.handle import SLOWEST_BYTES_PER_SECOND, Flight, Handle, State
from service.kept import Kept
from service.messages import Batch
from service.metrics import Metrics
from service.place import Seat, Why, place

#: What the link may take at worst while both sides run.
LINK_SECONDS = 0.002


class Dispatcher:
    """Sends what is in `queue` to `handles`, on the front's event loop.

    `ahead`: batches that a worker may have; `hang`: seconds beyond any estimate after which one counts as hung.
    """

    def __init__(
        self,
        queue: Queue,
        handles: Sequence[Handle],
        kept: Kept,
        metrics: Metrics,
        awake: WakefulLoop,
        *,
        ahead: int,
        hang: float,
    ) -> None:
        self.queue = queue
        self.handles = handles
        self.kept = kept
        self.metrics = metrics
        self._awake = awake
        self._ahead = ahead
        self._hang = hang
        self._batches = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._due = False

    def ready(self) -> list[Handle]:
        """Workers that take work."""
        return [handle for handle in self.handles if handle.state is State.READY]

    def put(self, work: Work) -> None:
        """Queue new work, and send it when that does any good."""
        if self._goes_at_once(work):
            self._launch(self.handles[0], Taken((work,), stacked=False), time.monotonic())
            self.metrics.placed(0, Why.ONLY)
            return
        self.queue.put(work)
        if work.stack_key is None:  # has nothing to gain by waiting for company
            self.run()
        else:
            self._run_soon()

    def run(self) -> None:
        """Give batches to workers that have room for one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self.queue.depth:
            found = self._next()
            if found is None:
                return
            head, seats = found
            now = time.monotonic()
            wait = self.queue.wait(now)
            if wait > 0:
                self._timer = asyncio.get_running_loop().call_later(wait, self.run)
                return
            handle, why = self._seat(head, seats)
            assert handle.ready is not None
            fits = partial(self._fits, [handle])
            together = handle.residency is not None
            taken = self.queue.take(head, stacking=handle.ready.stacking, together=together, fits=fits)
            if taken is not None:
                self._launch(handle, taken, now)
            self.metrics.placed(handle.index, why)

    # -- when ---------------------------------------------------------------------------------------------------

    def _goes_at_once(self, work: Work) -> bool:
        """Whether the queue would only hand it on: nothing waits, there is one worker, and room with it."""
        handle = self.handles[0]
        return (
            not self.queue.depth
            and work.stack_key is None
            and not work.stored
            and len(self.handles) == 1
            and not self.queue.limits.delay
            and handle.state is State.READY
            and self._has_room(handle)
        )

    def _run_soon(self) -> None:
        """Run once all requests that this turn of the loop has read are in the queue, so that they can stack.

        They are tasks that run in the next turn, some of them after what is called soon now: hence two turns.
        """
        if not self._due:
            self._due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._run_due)

    def _run_due(self) -> None:
        self._due = False
        self.run()

    def _next(self) -> tuple[Work, list[Handle]] | None:
        """The work that heads the next batch and the workers that may have it; None where nobody is to be sent more."""
        ready = self.ready()
        seats = [handle for handle in ready if self._has_room(handle)]
        head = self.queue.first(partial(self._fits, seats)) if seats else None
        if head is not None:
            return head, seats
        head = self.queue.head
        assert head is not None
        seats = [handle for handle in ready if self._has_room_for_one_more(handle, head)]
        return (head, seats) if seats and self._fits(seats, head) else None

    def _has_room(self, handle: Handle) -> bool:
        """Whether a batch sent now would do any good.

        Work sent ahead can no longer be stacked with what comes. It hides the link's latency, and on a GPU the
        copies; a CPU that has work for longer than the link takes is sent nothing more.
        """
        if len(handle.flights) >= self._ahead:
            return False
        return handle.residency is not None or handle.queued_seconds < LINK_SECONDS

    def _has_room_for_one_more(self, handle: Handle, work: Work) -> bool:
        """Whether a GPU that has its batches takes another, whose head is this work.

        One that nothing could be stacked with has nothing to wait for in the queue, and a GPU whose first batch
        ends still has two while the clients who are answered ask again.
        """
        if handle.residency is None or not self.queue.is_long(work):
            return False
        seconds = self._ahead * self.queue.limits.group_seconds
        return len(handle.flights) == self._ahead and handle.queued_seconds + work.seconds <= seconds

    # -- where --------------------------------------------------------------------------------------------------

    def _fits(self, handles: Sequence[Handle], work: Work) -> bool:
        """Whether one of the workers has what only a device has of the work's operands."""
        homes = self.kept.homes(work.stored)
        return not homes or any(homes == {handle.index} for handle in handles)

    def _seat(self, work: Work, seats: Sequence[Handle]) -> tuple[Handle, Why]:
        """Where it runs: where its operands are, if they are nowhere else, or at the cheapest place."""
        homes = self.kept.homes(work.stored)
        if homes:
            return self.handles[homes.pop()], Why.RESIDENT
        index, why = place(work, [Seat(h.index, h.queued_seconds, h.residency) for h in seats])
        return self.handles[index], why

    def _launch(self, handle: Handle, taken: Taken, now: float) -> None:
        works = taken.works
        batch = Batch(
            next(self._batches),
            tuple([self.kept.placed(work.item()) for work in works]),
            taken.stacked,
            any(work.retries for work in works),
        )
        # A batch behind others waits for them too; a hang is far beyond any estimate.
        estimated = handle.queued_seconds + sum([work.seconds for work in works])
        moving = sum([work.nbytes for work in works]) / SLOWEST_BYTES_PER_SECOND
        handle.send(Flight(batch, works, now, now + self._hang + 20 * estimated + moving))
        # What is counted is counted while the worker has it, and so is what was over before.
        for work in works:
            self.metrics.waited(now - work.arrived, work.trace)
        self.metrics.batched(len(works))
        self.metrics.aside.soon()
        if handle.residency is not None:
            self._awake.began()
