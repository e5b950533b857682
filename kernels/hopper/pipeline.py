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

__all__ = [
    "FastTiles",
    "PipelineState",
    "Tiles",
    "init_inbox",
    "init_ring",
    "release",
    "wait_empty",
    "wait_full",
]


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
    """Order in which tiles are visited: along q in bands of `group` rows of tiles, so that a wave reuses L2.

    Counts are in tiles of a whole cluster.
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
        size = self.group * self.q
        band = rest // size
        first = band * self.group
        height = cutlass.min(self.group, self.p - first)
        within = rest - band * size
        column = within // height
        return first + within - column * height, column, layer


class FastTiles:
    """The same order; the host has prepared what dividing takes, so that a place costs a few multiplications."""

    def __init__(self, total: Int32, rows: Int32, layer: Any, band: Any, group: Any, rest: Any) -> None:
        """Use `of`. Divisors: tiles of a layer, of a whole band; rows of a whole band, of a layer's last one."""
        self.total, self.rows = total, rows
        self.layer, self.band, self.group, self.rest = layer, band, group, rest

    @staticmethod
    def of(p: Int32, q: Int32, batch: Int32, group: Int32) -> FastTiles:
        """On the host: `p`×`q` tiles in each of `batch` layers, all of them at least 1."""
        divide = cute.fast_divmod_create_divisor_v2
        rest = p - (p - 1) // group * group
        return FastTiles(p * q * batch, p, divide(p * q), divide(group * q), divide(group), divide(rest))

    def __extract_mlir_values__(self) -> list[Any]:
        divisors = self.layer, self.band, self.group, self.rest
        values = [self.total.ir_value(), self.rows.ir_value()]
        return values + [value for each in divisors for value in each.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list[Any]) -> FastTiles:
        divisors = self.layer, self.band, self.group, self.rest
        made = [
            each.__new_from_mlir_values__(values[2 + 2 * n : 4 + 2 * n]) for n, each in enumerate(divisors)
        ]
        return FastTiles(Int32(values[0]), Int32(values[1]), *made)

    @cute.jit
    def at(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(p, q, batch) of the tile number `index`."""
        layer, inside = divmod(index, self.layer)
        band, within = divmod(inside, self.band)
        first = band * self.group.divisor
        column, row = divmod(within, self.group)
        if first + self.group.divisor > self.rows:
            column, row = divmod(within, self.rest)
        return first + row, column, layer
