"""Structured logs: receives an event and its fields from any module, hands on a line of JSON or text.

Fields are stage words, times in seconds, counts and ids; never operands, results or keys. Within a request
every line also carries its id and trace, which `bind` puts into the context. An exception is told by type
and place; its text only where it can't quote what a client sent (`_SAFE`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from contextvars import ContextVar, Token
from typing import Any, ClassVar, NamedTuple, TextIO

import msgspec

#: Exceptions whose text comes from the system or from this code, not from a payload.
_SAFE = (OSError, MemoryError, AssertionError, RuntimeError)

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(NamedTuple):
    """A span of a W3C trace: ids as lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: str = "01"

    @property
    def traceparent(self) -> str:
        """What is handed on to whom this process calls."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @classmethod
    def take(cls, traceparent: str | None) -> Trace:
        """A new span in the caller's trace, or in a new trace where none (or a malformed one) was sent."""
        span_id = os.urandom(8).hex()
        match = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
        if match is None or not _valid(match):
            return cls(os.urandom(16).hex(), span_id)
        return cls(match[2], span_id, match[4])


def _valid(match: re.Match[str]) -> bool:
    version, trace_id, parent_id, _, rest = match.groups()
    return (
        version != "ff"
        and bool(trace_id.strip("0") and parent_id.strip("0"))
        and not (version == "00" and rest)
    )


class _Bound(NamedTuple):
    request_id: str
    trace: Trace


_context: ContextVar[_Bound | None] = ContextVar("gemm_request", default=None)


def bind(request_id: str, trace: Trace) -> Token[_Bound | None]:
    """From here on, lines of this task and of those it starts carry the request's id and trace."""
    return _context.set(_Bound(request_id, trace))


def unbind(token: Token[_Bound | None]) -> None:
    """Undo `bind`."""
    _context.reset(token)


class Log:
    """The log of one stage. `log.info("worker ready", pid=7, seconds=1.2)`."""

    __slots__ = ("_logger",)

    def __init__(self, stage: str) -> None:
        self._logger = logging.getLogger(f"gemm.{stage}")

    def debug(self, event: str, **fields: Any) -> None:
        """Of interest to who develops the service."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Normal course of events."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """The service goes on, less well."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, *, exception: BaseException | None = None, **fields: Any) -> None:
        """Something failed."""
        self._emit(logging.ERROR, event, fields, exception)

    def _emit(
        self, level: int, event: str, fields: dict[str, Any], exception: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=exception, extra={"fields": fields})


def setup(log_format: str = "auto", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all logs of this process, uvicorn's included, to `stream` (stderr) in the chosen form."""
    stream = stream or sys.stderr
    if log_format == "auto":
        log_format = "console" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if log_format == "json" else _Console(colour=stream.isatty()))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("gemm", "service"):
        logging.getLogger(name).setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


class _Json(logging.Formatter):
    """One object a line; non-finite numbers become null, other types their text."""

    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(_document(record), enc_hook=str).decode()


class _Console(logging.Formatter):
    """Time, level, stage, event and fields for people; control characters are escaped."""

    _COLOURS: ClassVar = {"DEBUG": "2", "INFO": "36", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        document = _document(record)
        stamp, level = document.pop("time")[11:23], document.pop("level")
        stage, event = document.pop("stage"), document.pop("event")
        document.pop("span_id", None)
        if self._colour:
            level = f"\x1b[{self._COLOURS[record.levelname]}m{level}\x1b[0m"
        fields = " ".join(f"{name}={_plain(value)}" for name, value in document.items())
        return f"{stamp} {level} {stage}: {_plain(event)}{'  ' if fields else ''}{fields}"


def _document(record: logging.LogRecord) -> dict[str, Any]:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    document: dict[str, Any] = {
        "time": f"{seconds}.{int(record.created % 1 * 1000):03}Z",
        "level": record.levelname.lower(),
        "stage": record.name.removeprefix("gemm.").removeprefix("service."),
        "event": record.getMessage(),
    }
    bound = _context.get()
    if bound is not None:
        document |= {
            "request_id": bound.request_id,
            "trace_id": bound.trace.trace_id,
            "span_id": bound.trace.span_id,
        }
    document |= getattr(record, "fields", {})
    if record.exc_info and record.exc_info[1] is not None:
        document |= describe(record.exc_info[1])
    return document


def describe(error: BaseException) -> dict[str, str]:
    """Type and place of an exception, with its text only where that can't hold what a client sent."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    described = {
        "error": type(error).__name__,
        "at": " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames)),
    }
    if isinstance(error, _SAFE):
        described["text"] = str(error)
    if error.__cause__ is not None:
        described["cause"] = type(error.__cause__).__name__
    return described


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text.isprintable() else repr(text)
