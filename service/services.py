"""What the routes share: receives the parts that app.py builds, hands them on by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from service.inference.state import State
from service.now import Now

if TYPE_CHECKING:
    from service.arena import Arena, Slots
    from service.jobs import Jobs
    from service.keys import Keys
    from service.local.server import LocalServer
    from service.metrics import Metrics
    from service.settings import Settings
    from service.store import TensorStore
    from service.supervisor import Supervisor
    from service.traces import Tracer


@dataclass(slots=True)
class Services:
    """One front's parts; routes find it at `scope["app"].state.services`."""

    settings: Settings
    metrics: Metrics
    keys: Keys
    arena: Arena
    slots: Slots
    supervisor: Supervisor
    store: TensorStore
    jobs: Jobs
    local: LocalServer | None = None
    inference: State = field(init=False)
    now: Now = field(default_factory=Now)
    #: Open while the app serves, where a collector is set.
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        self.inference = State(self.settings, self.keys.in_force)
