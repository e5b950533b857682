"""What all drills share: receives functions that bring on a mishap, hands on rows of how it ended.

A drill is a function that returns what it saw in one line and raises `Failed` where the service did what it
must not. `@drill("name", seconds=…)` registers it; it has to end within its seconds, or counts as failed. One that
goes on for a while is given that while: `@drill("name", seconds=…, lasts=600)` calls it with 600, or with what the
command line says instead, and allows that on top.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import httpx

Row = dict[str, Any]


class Failed(Exception):
    """The service did what it must not; the text says what."""


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill: its name, what it does, the seconds that bound it (beyond `lasts`, which `run` is called with)."""

    name: str
    run: Callable[..., str]
    seconds: float
    lasts: float = 0.0


DRILLS: dict[str, Drill] = {}


Run = TypeVar("Run", bound=Callable[..., str])


def drill(name: str, *, seconds: float, lasts: float = 0.0) -> Callable[[Run], Run]:
    """Register a drill under `name`, bounded by `seconds`, or by these beyond what it `lasts`."""

    def register(run: Run) -> Run:
        if name in DRILLS:
            raise ValueError(f"there is a drill {name!r} already")
        DRILLS[name] = Drill(name, run, seconds, lasts)
        return run

    return register


def check(true: object, what: str) -> None:
    """Failed, saying `what`, unless it is true."""
    if not true:
        raise Failed(what)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Failed if the block takes longer. For the main thread."""

    def late(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback()
        raise Failed(f"didn't end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def perform(drill: Drill) -> Row:
    """Run it; the row says "passed" or "failed" and what was seen."""
    began = time.monotonic()
    try:
        with bounded(drill.seconds + drill.lasts):
            outcome, detail = "passed", drill.run(drill.lasts) if drill.lasts else drill.run()
    except (Failed, AssertionError) as error:
        outcome, detail = "failed", str(error)
    except (OSError, httpx.HTTPError) as error:
        # A process, a port or a connection that a drill needs and doesn't get.
        outcome, detail = "failed", f"{type(error).__name__}: {error}"
    return {
        "name": drill.name,
        "outcome": outcome,
        "detail": detail,
        "seconds": round(time.monotonic() - began, 1),
    }
