"""What the protocol keeps between requests: receives settings, hands on models' states, statistics and regions."""

from __future__ import annotations

from collections.abc import Callable

from service.inference.models import Repository
from service.inference.regions import Regions
from service.inference.statistics import Statistics
from service.settings import Settings


class State:
    """One front's."""

    def __init__(self, settings: Settings, in_force: Callable[[str], bool]) -> None:
        #: Where gRPC listens, while it does.
        self.grpc_port: int | None = None
        self.repository = Repository()
        self.statistics = Statistics()
        self.regions = Regions(settings.shared_memory_lease_seconds, in_force)
