"""How near its datasheet each GPU works: receives products as they end, hands on a ratio. An estimate, not a reading.

What the hardware counts is gemm_tensor_active_ratio; this divides the FLOPs that were asked for by the time and by
the peak that the vendor states for their type, so it is there where nothing can be read, and only on chips whose
datasheet is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.batch import Work

#: Seconds that the ratio is taken over.
WINDOW = 10.0


def peaks(device: Mapping[str, Any]) -> Mapping[str, float]:
    """FLOP/s by type as the datasheet states them; empty where none is known, or nothing physical is there."""
    if device.get("rates") != "datasheet" or device.get("virtual") or device.get("arch") == "cpu":
        return {}
    found: Mapping[str, float] = device.get("peak_flops", {})
    return found


def ideal_seconds(works: Iterable[Work], peak: Mapping[str, float]) -> float:
    """Seconds that these products would take at the peak."""
    return sum(work.flops / peak[kind] for work in works if (kind := work.kind) in peak)


@dataclass(slots=True)
class FlopsRatio:
    """Of each GPU whose datasheet is known: seconds at the peak over seconds that passed."""

    _ended: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)

    def known(self, gpu: str, known: bool) -> None:
        """A worker is ready on `gpu`; `known`: whether its datasheet is."""
        if known:
            self._ended.setdefault(gpu, deque())
        else:
            self._ended.pop(gpu, None)

    def ended(self, gpu: str, at: float, seconds: float) -> None:
        """Work worth `seconds` at the peak ended at monotonic `at`."""
        if gpu in self._ended:
            self._ended[gpu].append((at, seconds))
            self._forget(self._ended[gpu], at)

    def read(self, at: float) -> dict[str, float]:
        """The ratio over the last WINDOW seconds, by GPU."""
        for events in self._ended.values():
            self._forget(events, at)
        return {gpu: sum(seconds for _, seconds in events) / WINDOW for gpu, events in self._ended.items()}

    @staticmethod
    def _forget(events: deque[tuple[float, float]], at: float) -> None:
        while events and events[0][0] < at - WINDOW:
            events.popleft()
