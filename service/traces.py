"""Traces for a collector: receives a finished request and its stages' times, hands on spans by OTLP over HTTP.

One span a request, in the caller's trace where it sent one, and below it one for each stage word. They are built
when the request has ended, and sent in batches from a thread: nothing waits for the collector. Needs the extra
`otel`; a caller that chose not to sample is not traced.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from service.logs import Trace
from service.settings import SettingsError


def check(endpoint: str) -> None:
    """SettingsError where what traces need isn't installed."""
    try:
        importlib.import_module("opentelemetry.sdk.trace.export")
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        raise SettingsError(
            f"otel_endpoint = {endpoint!r}: traces need the extra: pip install 'gemm-service[otel]'"
        ) from None


class Tracer:
    """Sends spans to the collector at `endpoint` until it is closed."""

    def __init__(self, endpoint: str) -> None:
        check(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if urlsplit(endpoint).path in ("", "/"):
            endpoint = f"{endpoint.rstrip('/')}/v1/traces"
        self._sdk = sdk
        self._resource = Resource.create({"service.name": "gemm-service"})
        self._processor: Any = BatchSpanProcessor(OTLPSpanExporter(endpoint))

    def request(
        self,
        name: str,
        trace: Trace,
        seconds: float,
        stages: Mapping[str, float],
        attributes: Mapping[str, Any],
        *,
        failed: bool,
    ) -> None:
        """A request ended now, after `seconds`; its stages came one after the other."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not trace.sampled:
            return
        ended = time.time_ns()
        began = ended - round(seconds * 1e9)
        context = _context(trace, trace.span_id)
        at = began
        for stage, took in stages.items():
            until = at + round(took * 1e9)
            inner = _context(trace, Trace.take(None).span_id)
            self._end(stage, inner, context, SpanKind.INTERNAL, at, until, {}, Status())
            at = until
        parent = _context(trace, trace.parent_id, remote=True) if trace.parent_id else None
        status = Status(StatusCode.ERROR) if failed else Status()
        self._end(name, context, parent, SpanKind.SERVER, began, ended, attributes, status)

    def _end(
        self,
        name: str,
        context: Any,
        parent: Any,
        kind: Any,
        began: int,
        ended: int,
        attributes: Mapping[str, Any],
        status: Any,
    ) -> None:
        self._processor.on_end(
            self._sdk.ReadableSpan(
                name,
                context,
                parent,
                self._resource,
                attributes,
                kind=kind,
                status=status,
                start_time=began,
                end_time=ended,
            )
        )

    def close(self) -> None:
        """Send what is left."""
        self._processor.shutdown()


def _context(trace: Trace, span_id: str, *, remote: bool = False) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(
        int(trace.trace_id, 16),
        int(span_id, 16),
        is_remote=remote,
        trace_flags=TraceFlags(int(trace.flags, 16)),
    )
