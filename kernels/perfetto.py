"""A timeline as a file: receives spans of lanes, hands on a Chrome trace that https://ui.perfetto.dev opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Span:
    """Something that took time: which SM (by its rank in the cluster), which warp or engine, what, when (cycles)."""

    sm: int
    lane: str
    name: str
    begin: float
    end: float


def document(spans: Sequence[Span], clock_hz: float, note: str) -> dict[str, Any]:
    """A process an SM, a thread a lane in the order of `spans`; cycles of `clock_hz` become microseconds."""
    scale = 1e6 / clock_hz
    rows = {(s.sm, s.lane): n for n, s in enumerate({(s.sm, s.lane): s for s in spans}.values())}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": sm, "args": {"name": f"SM of cluster rank {sm}"}}
        for sm in sorted({sm for sm, _ in rows})
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": sm, "tid": n, "args": {"name": lane}}
        for (sm, lane), n in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": s.name,
            "pid": s.sm,
            "tid": rows[s.sm, s.lane],
            "ts": round(s.begin * scale, 4),
            "dur": round(max(s.end - s.begin, 1.0) * scale, 4),
        }
        for s in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"note": note}}
