"""Ring of shared-memory stages and order of tiles: receives barriers and sizes, hands on stages and tiles.

Barriers of the ring (scope: cluster, since operands are multicast):
  full[s]   1 arrival (this block's producer) and the bytes of A and B, its own TMA's and its peers'
  empty[s]  one arrival a consumer warp of every block that this block's producer writes to, itself included
The producer starts at phase 1 (nothing to wait for), the consumer at phase 0.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.experimental import primitives

__all__ = ["PipelineState", "Tiles", "init_inbox", "init_ring", "release", "wait_empty", "wait_full"]


class PipelineState:
    """Stage and phase of one side of a ring."""

    def __init__(self, stages: int, stage: Int32, phase: Int32) -> None:
        self.stages, self.stage, self.phase = stages, stage, phase

    @staticmethod
    def producer(stages: int) -> PipelineState:
        """At stage 0, phase 1: every stage counts as empty."""
        return PipelineState(stages, Int32(0), Int32(1))

    @staticmethod
    def consumer(stages: int) -> PipelineState:
        """At stage 0, phase 0."""
        return PipelineState(stages, Int32(0), Int32(0))

    def advance(self) -> None:
        """One stage on."""
        following = self.stage + 1
        wrapped = Int32(following == self.stages)
        self.stage = following - wrapped * self.stages
        self.phase = self.phase ^ wrapped

    def skip(self, count: Int32) -> None:
        """`count` stages on."""
        following = self.stage + count
        self.stage = following % self.stages
        self.phase = self.phase ^ ((following // self.stages) & 1)

    def __extract_mlir_values__(self) -> list[Any]:
        return [self.stage.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> PipelineState:
        return PipelineState(self.stages, Int32(values[0]), Int32(values[1]))


@cute.jit
def init_ring(
    full: cute.Pointer, empty: cute.Pointer, stages: cutlass.Constexpr, releases: cutlass.Constexpr
) -> None:
    """Initialize both barriers of each stage; one warp calls it."""
    with cute.arch.elect_one():
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, releases)
    cute.arch.mbarrier_init_fence()


@cute.jit
def init_inbox(inbox: cute.Pointer, consumers: cutlass.Constexpr) -> None:
    """Initialize the barriers at which halves of tiles arrive, one a consumer: 1 arrival and their bytes."""
    with cute.arch.elect_one():
        for consumer in cutlass.range_constexpr(consumers):
            cute.arch.mbarrier_init(inbox + consumer, 1)
    cute.arch.mbarrier_init_fence()


def _try_wait(barrier: cute.Pointer, phase: Int32, scope: primitives.MBarrierScope) -> Boolean:
    return primitives.mbarrier_wait_parity(
        barrier.to_llvm_ptr(), phase, primitives.MBarrierWait.TRY, scope=scope
    )


@cute.jit
def wait_full(barrier: cute.Pointer, phase: Int32) -> None:
    """Wait until A and B of a stage are there: what TMA wrote before completing the barrier is visible."""
    done = _try_wait(barrier, phase, primitives.MBarrierScope.CTA)
    while not done:
        done = _try_wait(barrier, phase, primitives.MBarrierScope.CTA)


@cute.jit
def wait_empty(barrier: cute.Pointer, phase: Int32, shared: cutlass.Constexpr) -> None:
    """Wait until every consumer warp has released a stage; `shared`: those of peers as well."""
    scope = primitives.MBarrierScope.CLUSTER if shared else primitives.MBarrierScope.CTA
    done = _try_wait(barrier, phase, scope)
    while not done:
        done = _try_wait(barrier, phase, scope)


@cute.jit
def release(barrier: cute.Pointer, rank: Int32, shared: cutlass.Constexpr) -> None:
    """Arrive at this barrier of block `rank` of the cluster (at its own where nothing is shared).

    Relaxed at cluster scope: a release there is a fence over the whole GPU, every stage, and nothing that this
    warp wrote is handed over. What it read, wgmma has read: `wait_group` came before.
    """
    if cutlass.const_expr(shared):
        peer = primitives.mapa(barrier.to_llvm_ptr(), rank)
        primitives.mbarrier_arrive(peer, scope=primitives.MemScope.CLUSTER, relaxed=True)
    else:
        cute.arch.mbarrier_arrive(barrier)


class Tiles:
    """Order in which tiles are visited: along q in groups of `group` rows of tiles, so that a wave reuses L2.

    Counts are in tiles of a whole cluster. A negative group runs along p in groups of columns.
    """

    def __init__(self, p: Int32, q: Int32, batch: Int32, group: Int32) -> None:
        self.p, self.q, self.batch, self.group = p, q, batch, group

    @property
    def total(self) -> Int32:
        """How many tiles there are."""
        return self.p * self.q * self.batch

    def __extract_mlir_values__(self) -> list[Any]:
        return [value.ir_value() for value in (self.p, self.q, self.batch, self.group)]

    def __new_from_mlir_values__(self, values: list[Any]) -> Tiles:
        return Tiles(*(Int32(value) for value in values))

    @cute.jit
    def at(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(p, q, batch) of the tile number `index`."""
        layer = index // (self.p * self.q)
        rest = index - layer * (self.p * self.q)
        p, q = _grouped(rest, self.p, self.q, self.group)
        if self.group < 0:
            q, p = _grouped(rest, self.q, self.p, -self.group)
        return p, q, layer


@cute.jit
def _grouped(index: Int32, rows: Int32, columns: Int32, group: Int32) -> tuple[Int32, Int32]:
    size = group * columns
    band = index // size
    first = band * group
    height = cutlass.min(group, rows - first)
    within = index - band * size
    column = within // height
    return first + within - column * height, column
