"""CUDA events: receives flights that need some, hands on events, each again once its flight has been told of.

To create and destroy one takes the driver longer than to record it.
"""

from __future__ import annotations

from typing import Any

from service.drivers.flight import Flight


class Events:
    """Timing events of one GPU; for one thread. `torch` makes them."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._free: list[Any] = []

    def take(self, flight: Flight) -> Any:
        """An event that is the flight's until `give_back`."""
        event = self._free.pop() if self._free else self._torch.cuda.Event(enable_timing=True)
        flight.events.append(event)
        return event

    def give_back(self, flight: Flight) -> None:
        """The flight is over, and has read all times from its events."""
        self._free += flight.events
        flight.events.clear()
