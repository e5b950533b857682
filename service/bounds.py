"""What a connection may take: receives what was seen and the time, hands on who is to be cut off and why.

Pure: no sockets, no clock. `Patience` keeps times, `HeaderMeter` the bytes of headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.settings import Settings

#: Seconds that a refused client may go on sending before its connection is cut, so that it reads the refusal.
LINGER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a connection, as Settings names them. A body's rate is taken over `body_window_seconds`."""

    header_bytes: int = 32768
    header_seconds: float = 10.0
    body_bytes_per_second: float = 1024.0
    body_window_seconds: float = 10.0
    write_stall_seconds: float = 30.0
    keep_alive_seconds: float = 75.0

    @classmethod
    def of(cls, settings: Settings) -> Limits:
        """The limits in the settings."""
        return cls(
            header_bytes=settings.header_bytes,
            header_seconds=settings.header_seconds,
            body_bytes_per_second=settings.body_bytes_per_second,
            body_window_seconds=settings.header_seconds,
            write_stall_seconds=settings.write_stall_seconds,
            keep_alive_seconds=settings.keep_alive_seconds,
        )

    @property
    def interval(self) -> float:
        """Seconds between sweeps: a quarter of the shortest time, at most half a second."""
        times = (
            self.header_seconds,
            self.body_window_seconds,
            self.write_stall_seconds,
            self.keep_alive_seconds,
        )
        return min(0.5, max(0.01, min(times) / 4))


class HeaderMeter:
    """Bytes of a message's headers: by the parser's count, and of those still unfinished by what was fed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open = False
        self._begun = 0
        self._parsed = 0
        self._fed = 0
        self._mark = (False, 0)

    @property
    def open(self) -> bool:
        """Headers have begun and not ended."""
        return self._open

    def begin(self) -> None:
        """A message begins."""
        self._open = True
        self._begun += 1
        self._parsed = 0

    def end(self) -> None:
        """Its headers are complete."""
        self._open = False

    def parsed(self, nbytes: int) -> bool:
        """The parser found `nbytes` more of them; whether they are within the limit."""
        self._parsed += nbytes
        return self._parsed <= self.limit

    def before(self) -> None:
        """Bytes are about to be fed."""
        self._mark = (self._open, self._begun)

    def fed(self, nbytes: int, *, between: bool) -> bool:
        """`nbytes` were fed, `between`: from the end of a message on. Whether unfinished headers are within it.

        Where other messages lie before them in the same bytes their length isn't known, and `parsed` bounds them.
        """
        if not self._open:
            return True
        was_open, begun = self._mark
        if was_open and self._begun == begun:
            self._fed += nbytes
        else:
            self._fed = nbytes if between and self._begun == begun + 1 else 0
        return self._fed <= self.limit


class Verdict(Enum):
    """What to do with a connection that went beyond a bound."""

    CUT = "reset it"
    CLOSE = "close it; nobody waits for an answer"
    LATE_HEADERS = "408: the headers took too long"
    SLOW_BODY = "408: the body came below the least rate"


@dataclass(frozen=True, slots=True)
class Seen:
    """A connection at the time of a sweep.

    `unsent` bytes wait for the client after `pieces` of the response; `paused`: we don't read; `body` bytes of
    an unfinished body came (None: there is none), for which the application waits if `awaited`.
    """

    unsent: int = 0
    pieces: int = 0
    paused: bool = False
    closing: bool = False
    body: int | None = None
    awaited: bool = False


class Patience:
    """How long a connection has been at what it does."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.limits = limits
        #: Bytes a second of the body in the last window.
        self.rate = 0.0
        self._allowed = limits.header_seconds
        self._idle: float | None = now
        self._headers: float | None = None
        self._linger: float | None = None
        self._window = 0.0
        self._window_mark = 0
        self._looked = now
        self._written = (0, 0)
        self._written_at = now

    @property
    def lingering(self) -> bool:
        """The end has begun: what still comes is dropped."""
        return self._linger is not None

    def headers_begin(self, now: float) -> None:
        """A request begins."""
        self._idle, self._headers = None, now

    def headers_end(self) -> None:
        """Its headers are complete, or given up."""
        self._headers = None

    def idle(self, now: float) -> None:
        """All was answered; the next request may take its time to begin."""
        self._idle, self._allowed = now, self.limits.keep_alive_seconds

    def linger(self, now: float) -> None:
        """The connection ends, once the client has seen why."""
        self._linger = now

    def look(self, now: float, seen: Seen) -> Verdict | None:
        """Whether a bound was passed."""
        elapsed, self._looked = now - self._looked, now
        if self._write_stalls(now, seen):
            return Verdict.CUT
        if self._linger is not None:
            return Verdict.CUT if now - self._linger > LINGER_SECONDS else None
        if seen.closing:
            return None
        if self._headers is not None:
            if seen.paused:
                self._headers = now  # it is us who don't read
            return Verdict.LATE_HEADERS if now - self._headers > self.limits.header_seconds else None
        if self._idle is not None:
            return Verdict.CLOSE if now - self._idle > self._allowed else None
        return Verdict.SLOW_BODY if self._body_is_slow(elapsed, seen) else None

    def _write_stalls(self, now: float, seen: Seen) -> bool:
        written = (seen.unsent, seen.pieces)
        if not seen.unsent or written != self._written:
            self._written, self._written_at = written, now
        return now - self._written_at > self.limits.write_stall_seconds

    def _body_is_slow(self, elapsed: float, seen: Seen) -> bool:
        """Over each window, counting only time in which someone waits for the body."""
        if seen.body is None:
            self._window, self._window_mark = 0.0, 0
            return False
        if not seen.awaited:
            return False
        self._window += elapsed
        if self._window < self.limits.body_window_seconds:
            return False
        self.rate = (seen.body - self._window_mark) / self._window
        self._window, self._window_mark = 0.0, seen.body
        return self.rate < self.limits.body_bytes_per_second
