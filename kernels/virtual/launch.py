"""What is to be run and how: receives nothing, hands on `Launch`, `Schedule` and `Options`.

Schedules say when asynchronous work is done: *early* at once, *late* only when no warp can go on, *random* in
between, in an order drawn from a seed, with warps preempted too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kernels.virtual.timing import Timing
from kernels.virtual.translate import Program


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host asked for."""

    program: Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_bytes: int
    params: tuple[bytes, ...]
    explicit_cluster: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """When asynchronous work is done: "late", "early" or "random"."""

    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"random {self.seed}" if self.kind == "random" else self.kind


LATE, EARLY = Schedule("late"), Schedule("early")


def schedules(count: int = 3) -> list[Schedule]:
    """Late, early and as many random ones as are left."""
    return [LATE, EARLY, *(Schedule("random", seed) for seed in range(1, count - 1))][:count]


@dataclass(slots=True)
class Options:
    """How to run."""

    schedule: Schedule = LATE
    detect: bool = True
    sms: int = 8
    roles: dict[int, str] = field(default_factory=dict)
    barriers: dict[int, str] = field(default_factory=dict)  # names by offset in shared memory
    timing: Timing | None = None  # the model's clock
    covered: set[int] | None = None  # takes the PTX lines that are run
