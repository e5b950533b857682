"""What the protocol keeps between requests: receives nothing, hands on models' states and statistics."""

from __future__ import annotations

from service.inference.models import Repository
from service.inference.statistics import Statistics


class State:
    """One front's."""

    def __init__(self) -> None:
        self.repository = Repository()
        self.statistics = Statistics()
