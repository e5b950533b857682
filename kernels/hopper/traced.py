"""Step 9 with a clock: receives what Step 9 receives, hands on its product and a mark of each handoff.

The roles are Step 9's, with another clock: one thread of each role stores the
SM's clock where the role waits, goes on, asks and is answered; an idle warp of the producer watches the loads
land. The address of the marks (marks.py) is passed as that of C, which `code` says isn't there; rank and tile
choose a mark's place, so nothing is counted. Not part of the product: `python -m kernels trace` launches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cutlass
from cutlass import Float16, Int32, Int64, cute

from kernels.hopper.epilogue import Terms
from kernels.hopper.marks import CONSUMER, FUNCTION, MARKS, Mark
from kernels.hopper.pipeline import FastTiles, PipelineState, wait_full
from kernels.hopper.step9_multi_consumer import Gemm, compile_gemm
from kernels.hopper.tilings import FAMILY
from kernels.targets import Function


@dataclass(frozen=True)
class Clock:
    """Notes when the roles of a cluster of `cluster` blocks meet at a ring of `stages`."""

    cluster: int
    stages: int

    @cute.jit
    def mark(
        self,
        terms: Terms,
        work: Int32,
        k_tiles: Int32,
        consumer: Any,
        mark: cutlass.Constexpr,
        k: Any = 0,
    ) -> None:
        """Let the first thread of the role's warpgroup store the clock."""
        now = cute.arch.clock64()
        thread, _, _ = cute.arch.thread_idx()
        if thread % 128 == 0:
            rank = cute.arch.block_idx()[0] % self.cluster
            put(terms, (work * self.cluster + rank) * k_tiles + k, int(mark) + consumer * CONSUMER, now)

    @cute.jit
    def watch(
        self,
        full: cute.Pointer,
        tiles: FastTiles,
        first: Int32,
        step: Int32,
        k_tiles: Int32,
        rank: Int32,
        warp: Int32,
        terms: Terms,
    ) -> None:
        """An idle warp sees each stage filled; it keeps up, since it does nothing else."""
        if warp == 1:
            with cute.arch.elect_one():
                state = PipelineState.consumer(self.stages)
                work = first
                while work < tiles.total:
                    place = (work * self.cluster + rank) * k_tiles
                    put(terms, place, int(Mark.STARTED), cute.arch.clock64())
                    put(terms, place, int(Mark.NANOSECONDS_AT_START), cute.arch.globaltimer())
                    put(terms, place, int(Mark.SM), Int64(cute.arch.smid()))
                    for k in range(k_tiles):
                        wait_full(full + state.stage, state.phase)
                        put(terms, place + k, int(Mark.LOADED), cute.arch.clock64())
                        state.advance()
                    put(terms, place, int(Mark.ENDED), cute.arch.clock64())
                    put(terms, place, int(Mark.NANOSECONDS_AT_END), cute.arch.globaltimer())
                    work = work + step


def put(terms: Terms, place: Int32, mark: Any, value: Int64) -> None:
    """Store a mark of the block of K at `place`."""
    address = terms.c + (Int64(place) * MARKS + mark) * 8
    pointer = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


TILING = FAMILY[0].tiling


class Traced(Gemm):
    """Gemm that notes when its roles meet. Takes no C."""

    clock: ClassVar[Any] = Clock(TILING.cluster, TILING.stages)


def functions() -> Sequence[Function]:
    """The one function, for the tiling that leads the family."""
    gemm = Traced(TILING, Float16, Float16, False, True)
    config = {"tiling": TILING.name, "cluster": TILING.cluster, "stages": TILING.stages}
    return [Function(FUNCTION, "sm_90a", partial(compile_gemm, gemm, FUNCTION), config=config)]
