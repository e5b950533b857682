"""Cycles of a GPU under load, as an SM counts its own.

The clock that NVML tells is the one that was set; what hardware makes of it under a power cap shows in counts only.
"""

from __future__ import annotations

from typing import Any


class CycleCounter:
    """The clock of an SM as it counts its own cycles, beside whatever else runs: one thread on a stream of its own."""

    CYCLES = 20_000_000  # about 10 to 16 ms

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._running: tuple[Any, Any] | None = None
        #: MHz.
        self.clocks: list[float] = []

    def look(self) -> None:
        """Note the count that has ended, if one has, and begin the next."""
        torch: Any = self._torch
        if self._running is not None:
            begun, ended = self._running
            if not ended.query():
                return
            self.clocks.append(self.CYCLES / begun.elapsed_time(ended) / 1e3)
        self._running = begun, ended = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            torch.cuda._sleep(self.CYCLES)
            ended.record()
