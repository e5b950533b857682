"""What a thread that computes is to do next: receives the link's messages, hands on those for the device, in order.

That thread reads the link itself, whenever it has done what it knows of: no other has to be woken for a message. While
it hasn't come back to the link for a while, amid a long product, a deputy reads on its behalf, so that pings are
answered and the front's end is seen. Exactly one of them reads at a time. An idle worker's deputy sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from service.link import WorkerLink
from service.messages import ToWorker

#: How long the link goes unread until the deputy reads it: what a ping or a question may wait for amid a product.
PATIENCE = 0.02

Kept = TypeVar("Kept")


class Inbox(Generic[Kept]):
    """Messages in their order. `read` takes what came, on whichever thread read it (None: the front is gone), and
    gives to `put` what `next` shall hand on.
    """

    def __init__(self, link: WorkerLink, read: Callable[[list[ToWorker] | None], None]) -> None:
        self._link = link
        self._read = read
        self._ready: deque[Kept] = deque()
        self._reading = threading.Lock()
        self._turns = self._looks = 0
        # Each side first says what it is about to do, then looks whether the other has said so: one of them sees it.
        self._away = self._relieved = self._resting = self._closed = False
        self._work = threading.Event()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        threading.Thread(target=self._deputise, name="link", daemon=True).start()

    def put(self, message: Kept) -> None:
        """Queue what `read` found."""
        self._ready.append(message)

    def next(self) -> Kept:
        """The next message; waits for one."""
        if self._ready:
            self._come_back(away=True)
        else:
            self._come_back(away=False)
            with self._reading:
                while not self._ready:
                    self._read(self._link.receive())
            self._looks += 1
            self._away = True
            if self._resting:
                self._work.set()
        return self._ready.popleft()

    def close(self) -> None:
        """Close the link, which nobody reads then."""
        self._come_back(away=False)
        with self._reading:
            self._link.close()
        self._closed = True
        self._work.set()

    def _come_back(self, *, away: bool) -> None:
        """The thread that computes is alive; not `away`: it is about to read the link."""
        self._away = away
        self._turns += 1
        if self._relieved:
            os.eventfd_write(self._bell, 1)

    def _deputise(self) -> None:
        while not self._closed:
            looks = self._looks
            time.sleep(PATIENCE)
            if self._looks != looks:
                continue
            if self._away:
                self._relieve()
            else:
                self._rest()
        os.close(self._bell)

    def _relieve(self) -> None:
        """Read the link until the other thread shows itself."""
        with self._reading:
            self._relieved = True
            turn = self._turns
            while self._away and self._turns == turn:
                messages = self._link.receive_unless(self._bell)
                if messages != []:
                    self._read(messages)
            self._relieved = False

    def _rest(self) -> None:
        """Sleep until there is work."""
        self._work.clear()
        self._resting = True
        if not (self._away or self._closed):
            self._work.wait()
        self._resting = False
