"""Rings of mbarriers: receives a barrier and a `PipelineState`, hands on the right to touch one stage.

An mbarrier counts arrivals (and, for TMA, bytes) and flips its phase bit when all are in; `wait` with phase P
passes once the bit differs from P. A ring has two barriers a stage: producer to consumer (*full*) and
consumer to producer (*empty*). Both sides walk it with the same `PipelineState` from opposite phases:

- the consumer starts at phase 0: nothing is there, its first wait blocks until the first flip;
- the producer starts at phase 1: every stage is free, its first lap passes without anybody arriving.

The names say who signals whom: `tma2mma` (stage loaded), `mma2tma` (stage read), `mma2ld` (accumulator
ready), `ld2mma` (accumulator drained).

`dsl_user_op` makes an instruction belong to the line that calls these functions: reports and profiles then name
the kernel's line and, by it, the barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as prims

PRODUCER_PHASE = 1
CONSUMER_PHASE = 0


class PipelineState:
    """Place of one side in a ring of `depth` stages: stage, and phase, which flips once a lap."""

    def __init__(self, depth: int, phase: int | Int32, stage: int | Int32 = 0) -> None:
        self.depth = depth
        self.stage = Int32(stage)
        self.phase = Int32(phase)

    def advance(self) -> None:
        """One stage on. Without a branch: it sits in the innermost loops."""
        if self.depth == 1:
            self.phase = self.phase ^ 1
            return
        following = self.stage + 1
        wrapped = Int32(following == self.depth)
        self.stage = following - wrapped * self.depth
        self.phase = self.phase ^ wrapped

    # What the compiler needs to carry the state through loops and branches.

    def __extract_mlir_values__(self) -> list[Any]:
        return [self.stage.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> PipelineState:
        return PipelineState(self.depth, Int32(values[1]), Int32(values[0]))


def producer(depth: int) -> PipelineState:
    """State of the side that fills the ring."""
    return PipelineState(depth, PRODUCER_PHASE)


def consumer(depth: int) -> PipelineState:
    """State of the side that empties the ring."""
    return PipelineState(depth, CONSUMER_PHASE)


def barriers(count: int) -> cutlass.Array:
    """`count` mbarriers of 8 bytes in shared memory."""
    return cutlass.Array(cutlass.Int64, count, space=cutlass.AddressSpace.smem, alignment=8)


@dsl_user_op
def init(ring: cutlass.Array, count: int, arrivals: int, *, loc: Any = None, ip: Any = None) -> None:
    """Set how many arrivals flip each barrier of a ring. One thread calls this; then fence and meet."""
    for stage in range(count):
        prims.mbarrier_init(ring.subview(stage), arrivals, loc=loc, ip=ip)


@dsl_user_op
def wait(
    ring: cutlass.Array, state: PipelineState, scope: str = "cta", *, loc: Any = None, ip: Any = None
) -> None:
    """Block until the state's stage of a ring has passed the state's phase.

    scope: "cluster" where another CTA arrives, or its TMA or tensor core; else what it did may not be seen.
    """
    _spin(ring.subview(state.stage), state.phase, scope, loc)


@dsl_user_op
def wait_phase(
    barrier: cutlass.Array, phase: int | Int32, scope: str = "cta", *, loc: Any = None, ip: Any = None
) -> None:
    """Block until one barrier has passed a phase."""
    _spin(barrier, phase, scope, loc)


@cute.jit
def _spin(
    barrier: cutlass.Array, phase: int | Int32, scope: cutlass.Constexpr, loc: cutlass.Constexpr
) -> None:
    while not prims.mbarrier_try_wait_parity(barrier, phase, scope=scope, loc=loc):
        pass


@dsl_user_op
def wait_all(
    ring: cutlass.Array, state: PipelineState, scope: str = "cta", *, loc: Any = None, ip: Any = None
) -> None:
    """Wait once for each stage: a producer leaves its cluster when nobody will signal it any more."""
    for _ in range(state.depth):
        wait(ring, state, scope, loc=loc, ip=ip)
        state.advance()


@dsl_user_op
def arrive_at(barrier: cutlass.Array, rank: int, *, loc: Any = None, ip: Any = None) -> None:
    """One arrival, with cluster scope, on the barrier at the same offset in CTA `rank` of the cluster."""
    prims.mbarrier_arrive(prims.mapa(barrier, rank, loc=loc, ip=ip), loc=loc, ip=ip)
