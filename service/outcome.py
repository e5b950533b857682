"""How a product went: made by the supervisor from what a worker says, handed on to whoever replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.metrics import STAGES


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ran and why, seconds waited, in the batch's stages and by stage word, and the batch's size."""

    variant: str
    reason: str
    why: str
    queue_seconds: float
    compute_seconds: float
    batched: int
    seconds: Mapping[str, float]

    def stages(self, spent: float) -> dict[str, float]:
        """The `spent` seconds of one who submitted it, by stage word in their order: for the log and for traces."""
        told = {**self.seconds, "link": max(0.0, spent - sum(self.seconds.values()))}
        return {stage: told[stage] for stage in STAGES if stage in told}
