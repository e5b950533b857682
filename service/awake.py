"""Waiting without falling asleep: receives when things came, hands on whether who waits for the next stays awake.

A thread that sleeps is woken in microseconds on bare metal and in a tenth of a millisecond on a virtual machine whose
core was halted, and whoever wakes it pays as much. So front and worker of a GPU look again and again for the next
message, for a short time, and only while what they waited for has lately come within that time: at low rates nobody
stays awake, and an idle service takes no processor time. Between two looks they yield the processor: whoever else could
run on it (the one that is waited for, where cores are few) does.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

#: How long it may take until the next message: a product of some hundred microseconds and a client's turn.
SECONDS = 0.002


class Awake:
    """One waiter, who looks for at most `seconds` at a time; 0: never. Pure: it is told the time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since = float("-inf")
        self._busy = False
        self._soon = False

    def began(self, now: float) -> None:
        """Work came, soon after the last or not."""
        if not self._busy:
            self._soon = now - self._since <= self.seconds
        self._since, self._busy = now, True

    def ended(self, now: float, *, busy: bool) -> None:
        """Work is done; `busy`: other work isn't."""
        self._since, self._busy = now, busy

    def waited(self, now: float) -> float:
        """Seconds since the last of both."""
        return now - self._since

    def stays(self, now: float) -> bool:
        """Whether to look again rather than to sleep: for work's end, and for work where it lately came soon."""
        return (self._busy or self._soon) and now - self._since < self.seconds


class WakefulLoop:
    """Keeps an event loop awake: it looks for input without waiting as long as `Awake` says so."""

    def __init__(self, seconds: float) -> None:
        self._awake = Awake(seconds)
        self._looking = False

    def began(self) -> None:
        """A device was given work."""
        if self._awake.seconds:
            self._awake.began(time.monotonic())
            self._look_again()

    def ended(self, *, busy: bool) -> None:
        """Work came back; `busy`: other work is still away."""
        if self._awake.seconds:
            self._awake.ended(time.monotonic(), busy=busy)
            self._look_again()

    def _look_again(self) -> None:
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """A loop that has something to call polls its descriptors with no time-out."""
        self._looking = False
        if self._awake.stays(time.monotonic()):
            os.sched_yield()
            self._look_again()


def seconds_for(workers: int, cores: float) -> float:
    """How long to stay awake: only where front, workers and their clients have a core each to do so."""
    return SECONDS if cores >= 2 * (workers + 1) else 0.0


def cores() -> float:
    """Processors that this process may use: its affinity, within the cgroup's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))
