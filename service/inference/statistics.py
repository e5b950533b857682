"""Counts of each model: receives how requests ended, hands on the protocol's statistics document.

The protocol has four parts of a request: in the queue, input, inference, output. Here input is decode (bytes into
slots), inference the worker's stages, output the reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from service.inference.models import MODELS, VERSION, Model

_PARTS = (
    *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
    *("cache_hit", "cache_miss"),
)
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


@dataclass(slots=True)
class Duration:
    """How often, and nanoseconds in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        """Once more."""
        self.count += 1
        self.ns += max(0, round(seconds * 1e9))

    def document(self) -> dict[str, int]:
        """As the protocol has it."""
        return {"count": self.count, "ns": self.ns}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one request, and how many ran in its batch."""

    queue: float
    input: float
    infer: float
    output: float
    batched: int


def _durations(names: Iterable[str]) -> dict[str, Duration]:
    return {name: Duration() for name in names}


@dataclass(slots=True)
class _Counts:
    """One model's. `executions`: each request adds its share of the batch that it ran in."""

    parts: dict[str, Duration] = field(default_factory=lambda: _durations(_PARTS))
    batches: dict[int, dict[str, Duration]] = field(default_factory=dict)
    executions: float = 0.0
    last_ms: int = 0


class Statistics:
    """Counts since the service started."""

    def __init__(self) -> None:
        self._counts = {name: _Counts() for name in MODELS}

    def succeeded(self, model: Model, times: Times, now: float) -> None:
        """A request was answered with a result at Unix time `now`."""
        counts = self._counts[model.name]
        seconds = {
            "queue": times.queue,
            "compute_input": times.input,
            "compute_infer": times.infer,
            "compute_output": times.output,
        }
        counts.parts["success"].add(sum(seconds.values()))
        batch = counts.batches.setdefault(times.batched, _durations(_COMPUTE))
        for part, took in seconds.items():
            counts.parts[part].add(took)
            if part in batch:
                batch[part].add(took)
        counts.executions += 1 / times.batched
        counts.last_ms = round(now * 1e3)

    def failed(self, model: Model, seconds: float) -> None:
        """A request was refused or its client left."""
        self._counts[model.name].parts["fail"].add(seconds)

    def document(self, models: Iterable[str]) -> dict[str, Any]:
        """The statistics of `models`."""
        return {"model_stats": [self._of(name) for name in models]}

    def _of(self, name: str) -> dict[str, Any]:
        counts = self._counts[name]
        return {
            "name": name,
            "version": VERSION,
            "last_inference": counts.last_ms,
            "inference_count": counts.parts["success"].count,
            "execution_count": round(counts.executions),
            "inference_stats": {part: one.document() for part, one in counts.parts.items()},
            "batch_stats": [
                {"batch_size": size, **{part: one.document() for part, one in parts.items()}}
                for size, parts in sorted(counts.batches.items())
            ],
            "memory_usage": [],
        }
