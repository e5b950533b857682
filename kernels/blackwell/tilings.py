"""Shapes of the Step 9 family: receives a choice of consumers and scheduler, hands on sizes and function
names.

Imports neither the compiler nor torch, so that the selector can know them too.
"""

from __future__ import annotations

from dataclasses import dataclass

CTA_GROUP = 2  # CTAs of a cluster, which share one tcgen05.mma
MMA_M = 256
MMA_N = 256
BLK_M = MMA_M // CTA_GROUP  # rows of A, and of D, a CTA and a consumer
BLK_N = MMA_N // CTA_GROUP  # columns of op(B) that a CTA stages
BLK_K = 64
TMEM_COLUMNS = 512
SMEM_BYTES = 232_448  # what a CTA may have on sm_100
PIECE_BYTES = 8_192  # a staging buffer: 128 rows of 64 bytes
PIECES = 2  # staging buffers a consumer
CLC_DEPTH = 2  # answers of cluster launch control that are kept
A_TILE = BLK_M * BLK_K  # elements
B_TILE = BLK_N * BLK_K


@dataclass(frozen=True, slots=True)
class Tiling:
    """One shape of the family.

    consumers: MMA warps, each with a writeback warpgroup and 256 rows of the cluster's tile, that share a
    staged B. depth: stages of the operand ring. dynamic: tiles come from cluster launch control, not from a
    static persistent grid.
    """

    consumers: int
    depth: int
    dynamic: bool = False

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2):
            raise ValueError("tensor memory holds accumulators of one or two consumers")
        if self.smem_bytes > SMEM_BYTES:
            raise ValueError(f"{self.smem_bytes} bytes of shared memory, {SMEM_BYTES} are there")

    @property
    def tile_m(self) -> int:
        """Rows of D a cluster and tile."""
        return self.consumers * MMA_M

    @property
    def tile_n(self) -> int:
        """Columns of D a cluster and tile."""
        return MMA_N

    @property
    def accumulators(self) -> int:
        """Accumulators a consumer: the depth of the ring between MMA and writeback."""
        return TMEM_COLUMNS // MMA_N // self.consumers

    @property
    def threads(self) -> int:
        """Threads a CTA: a writeback warpgroup a consumer, and one of single-thread roles."""
        return 128 * (self.consumers + 1)

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B in one stage of one CTA."""
        return (self.consumers * A_TILE + B_TILE) * 2

    @property
    def staging_bytes(self) -> int:
        """Bytes of a CTA through which C comes in and D leaves."""
        return self.consumers * PIECES * PIECE_BYTES

    @property
    def barrier_bytes(self) -> int:
        """Barriers, answers of cluster launch control, and the address in TMEM."""
        both = self.consumers * self.accumulators
        return 8 * (2 * self.depth + 2 * both + self.consumers * PIECES + 2 * CLC_DEPTH) + 16 * CLC_DEPTH + 4

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.depth * self.stage_bytes + self.staging_bytes + self.barrier_bytes

    @property
    def readers(self) -> int:
        """Who reads an answer of cluster launch control.

        In both CTAs TMA and 4 warps a consumer; in the leader also an MMA thread a consumer and the
        scheduler.
        """
        return CTA_GROUP * (1 + 4 * self.consumers) + self.consumers + 1

    @property
    def name(self) -> str:
        """As it stands in names of functions and variants."""
        return f"{self.tile_m}x{self.tile_n}" + ("_dynamic" if self.dynamic else "")


BIG = Tiling(consumers=2, depth=4)
BIG_DYNAMIC = Tiling(consumers=2, depth=4, dynamic=True)
SMALL = Tiling(consumers=1, depth=6)


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything about a function that is fixed at compile time.

    a_mn, b_mn: M (N) is the contiguous dimension of A (B), not K. out: "half" (the operands' own type by
    TMA), "fp32" (by TMA) or "plain" (any type and strides, element by element).
    """

    tiling: Tiling
    dtype: str
    a_mn: bool
    b_mn: bool
    out: str

    @property
    def name(self) -> str:
        """Name of the function, unique an architecture."""
        layout = ("m" if self.a_mn else "k") + ("n" if self.b_mn else "k")
        return f"step9_{self.tiling.name}_{layout}_{self.dtype}_{self.out}"

    @property
    def config(self) -> dict[str, str | int | bool]:
        """What the build's manifest keeps of it."""
        tiling = self.tiling
        return {
            "cluster": CTA_GROUP,
            "tile_m": tiling.tile_m,
            "tile_n": tiling.tile_n,
            "consumers": tiling.consumers,
            "depth": tiling.depth,
            "accumulators": tiling.accumulators,
            "dynamic": tiling.dynamic,
            "out": self.out,
        }


def choices() -> list[Choice]:
    """The family: three tilings by type, layouts and output; plain stores in the small tiling only."""
    tilings = ((BIG, ("half", "fp32")), (BIG_DYNAMIC, ("half", "fp32")), (SMALL, ("half", "fp32", "plain")))
    return [
        Choice(tiling, dtype, a_mn, b_mn, out)
        for tiling, outs in tilings
        for out in outs
        for dtype in ("fp16", "bf16")
        for a_mn in (False, True)
        for b_mn in (False, True)
    ]
