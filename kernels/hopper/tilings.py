"""What the Step 9 family of sm_90a is compiled for: tilings, outputs, and the names of functions.

Imports neither torch nor the compiler, nor estimates: what stands here decides the machine code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernels.problem import DType

SMEM_BYTES = 232_448  # what a block may have on sm_90
RESERVED_BYTES = 1_024  # of an SM's shared memory, for each block on it
BARRIER_BYTES = 1_024  # barriers, and what aligning the buffers to 1,024 bytes may cost
TILE_K = 64  # elements: 128 bytes, the widest swizzle
STAGING_BYTES = 16_384  # a consumer: two 64×64 tiles of 16 bits, two 64×32 or one 64×64 of fp32
INPUTS = (DType.FP16, DType.BF16)
PLAIN = "plain"  # stores any type to any address and stride
ALL_LAYOUTS = ((False, False), (False, True), (True, False), (True, True))  # A, B stored transposed
NN = ((False, False),)
ROWS_OF_A = ((False, False), (False, True))  # A as it is: its rows lie along K


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of one kernel.

    A block computes `p`×`q` of D; p runs along M and q along N, or the other way round with `swap`: D is then
    computed transposed, so that a small M takes the narrow side of the tensor cores' instruction.
    `cluster_p`×`cluster_q` blocks share operands by multicast; `split` such groups make one cluster that
    divides K. Consumers split p among them, or with `pingpong` take turns at whole tiles. With
    `half_sm` two blocks fit an SM, so those of the next launch come in early, set up and wait. With `lag` the
    second consumer starts a tile so many stages after the first, so that one multiplies while the other writes.
    """

    p: int
    q: int
    cluster_p: int = 1
    cluster_q: int = 1
    split: int = 1
    consumers: int = 2
    pingpong: bool = False
    swap: bool = False
    half_sm: bool = False
    lag: int = 0

    def __post_init__(self) -> None:
        rows = self.p if self.pingpong else self.p // self.consumers
        if rows % 64 or self.q % 16 or not 16 <= self.q <= 256:
            raise ValueError(f"no instruction computes {rows}×{self.q}")
        if self.split > 1 and self.pingpong:
            raise ValueError("blocks that divide K compute one tile each")
        if rows * self.q > 128 * 192:
            raise ValueError("the accumulator of a consumer does not fit its registers")
        shared = [self.q // self.cluster_p] if self.cluster_p > 1 else []
        shared += [self.p // self.cluster_q] if self.cluster_q > 1 else []
        if any(rows % 8 for rows in shared):
            raise ValueError("what a block loads for its cluster is no whole number of swizzled lines")
        if self.lag and (self.consumers != 2 or self.pingpong or self.lag >= self.stages):
            raise ValueError("one of two consumers that share stages lags, by fewer than there are")

    @property
    def name(self) -> str:
        """As it stands in names of variants."""
        text = f"{self.p}x{self.q}"
        if self.cluster_p * self.cluster_q > 1:
            text += f"-{self.cluster_p}x{self.cluster_q}"
        if self.pingpong:
            text += "-pingpong"
        if self.split > 1:
            text += f"-split{self.split}"
        if self.half_sm:
            text += "-halfsm"
        if self.lag:
            text += f"-lag{self.lag}"
        return text + ("-swap" if self.swap else "")

    @property
    def cluster(self) -> int:
        """Blocks a cluster."""
        return self.sharing * self.split

    @property
    def sharing(self) -> int:
        """Blocks that share operands by multicast."""
        return self.cluster_p * self.cluster_q

    @property
    def threads(self) -> int:
        """Threads a block: one producer warpgroup and the consumers."""
        return 128 * (1 + self.consumers)

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B in one stage of the ring."""
        return (self.p + self.q) * TILE_K * 2

    @property
    def exchanges(self) -> bool:
        """Two blocks that divide K send each other half a tile."""
        return self.split == 2 and self.sharing == 1 and self.q % 128 == 0

    @property
    def parks(self) -> bool:
        """Blocks that divide K put their parts where the ring was, and each adds a share of the tile."""
        return self.split > 1 and not self.exchanges

    @property
    def half(self) -> Tiling:
        """The part of a tile that a block which exchanges writes out."""
        return replace(self, q=self.q // 2)

    @property
    def staging_bytes(self) -> int:
        """Bytes through which results leave, and through which halves come in; who parks uses the ring again."""
        if self.exchanges:
            return self.p * self.q // 2 * 4
        if self.split > 1:
            return 0
        return self.consumers * self.staged

    @property
    def staged(self) -> int:
        """The same of a consumer."""
        return self._staged(self.box_columns) if self.swap else STAGING_BYTES

    @property
    def staged_columns(self) -> int:
        """Columns of fp32 that a consumer stages at a time: the widest that divide a tile, up to 64."""
        return next(columns for columns in (64, 32, 16) if self.q % columns == 0)

    @property
    def box_columns(self) -> int:
        """Columns that a warp stores at a time of a D that leaves transposed: all, or 16 if that frees a stage."""
        few, whole = (self._stages(self.consumers * self._staged(columns)) for columns in (16, self.q))
        return 16 if few > whole else self.q

    @property
    def boxes(self) -> int:
        """How many of them are staged at once."""
        return self._boxes(self.box_columns)

    def _boxes(self, columns: int) -> int:
        return 1 if columns == self.q else 4

    def _staged(self, columns: int) -> int:
        """Where D leaves transposed: boxes of so many columns, or columns of fp32."""
        return max(self._boxes(columns) * 64 * columns * 2, 64 * self.staged_columns * 4)

    @property
    def per_sm(self) -> int:
        """Blocks that fit an SM at once."""
        return 2 if self.half_sm else 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory that a block may have."""
        return (SMEM_BYTES + RESERVED_BYTES) // self.per_sm - RESERVED_BYTES

    @property
    def stages(self) -> int:
        """Depth of the ring: as deep as fits."""
        return self._stages(self.staging_bytes)

    def _stages(self, staging_bytes: int) -> int:
        return (self.smem_bytes - BARRIER_BYTES - staging_bytes) // self.stage_bytes


@dataclass(frozen=True, slots=True)
class Member:
    """A tiling and the outputs that it is compiled for.

    `same`: 16-bit output of the input's type by TMA; `wide`: fp32 output by TMA; `plain`: any output, address
    and stride, and with `swap` by TMA as well where it can. `layouts`: which of A and B may be stored transposed.
    """

    tiling: Tiling
    same: bool = True
    wide: bool = False
    plain: bool = False
    layouts: tuple[tuple[bool, bool], ...] = ALL_LAYOUTS

    def __post_init__(self) -> None:
        t = self.tiling
        for trans_a, trans_b in self.layouts:
            along_k = (trans_b, not trans_a) if t.swap else (not trans_a, trans_b)
            slices = (t.p // t.cluster_q, t.q // t.cluster_p)  # what a block loads
            if any(rows % 64 and rows > 32 and not k for rows, k in zip(slices, along_k, strict=True)):
                raise ValueError("rows that lie across K are loaded 64 at a time, or 16, or 32")

    def function(self, dtype: DType, store: str, trans_a: bool, trans_b: bool) -> str:
        """Name of the function that stores as `store`: the output's type by TMA, or "plain"."""
        layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
        return f"step9_{self.tiling.name}_{dtype.value}_{store}_{layout}".replace("-", "_")

    def functions(self) -> Iterator[tuple[str, DType, DType | None, bool, bool]]:
        """All of them: name, input type, output type (None: plain), trans_a, trans_b."""
        for dtype in INPUTS:
            outs: list[DType | None] = [dtype] if self.same else []
            outs += [DType.FP32] if self.wide else []
            outs += [None] if self.plain else []
            for out in outs:
                store = PLAIN if out is None else out.value
                for trans_a, trans_b in self.layouts:
                    yield self.function(dtype, store, trans_a, trans_b), dtype, out, trans_a, trans_b


FAMILY = (
    Member(Tiling(128, 256, cluster_p=2), wide=True, plain=True),
    Member(Tiling(128, 256)),
    Member(Tiling(128, 192)),
    Member(Tiling(128, 128, cluster_p=2), plain=True),
    Member(Tiling(128, 128, cluster_p=2, pingpong=True)),
    Member(Tiling(128, 128, pingpong=True)),
    Member(Tiling(128, 64), plain=True),
    Member(Tiling(64, 128, cluster_p=2, consumers=1)),
    Member(Tiling(64, 64, consumers=1), plain=True),
    Member(Tiling(64, 80, cluster_p=2, consumers=1, swap=True), same=False, plain=True, layouts=ROWS_OF_A),
    Member(Tiling(64, 32, consumers=1, swap=True), same=False, plain=True),
    Member(Tiling(64, 16, consumers=1, half_sm=True, swap=True), same=False, plain=True),
    *(
        Member(Tiling(128, q, cluster_q=2, swap=True), same=False, plain=True, layouts=ROWS_OF_A)
        for q in (80, 96, 112, 160)
    ),
    Member(Tiling(128, 128, split=2), plain=True),
    Member(Tiling(64, 64, consumers=1, split=4), same=False, plain=True),
)
# Not among those that the selector chooses from: `python -m benchmarks.candidates` times them beside the family, and
# what wins moves there. Compiled for row-major inputs alone.
CANDIDATES = (Member(Tiling(128, 256, cluster_p=2, lag=1), layouts=NN),)

# What the grouped kernel is compiled for: one tiling for products of some size, one for small ones.
GROUPED = (Tiling(128, 128), Tiling(64, 64, consumers=1))


def grouped_function(tiling: Tiling, dtype: DType, trans_a: bool, trans_b: bool) -> str:
    """Name of the function that computes a group of products of such inputs."""
    layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
    return f"step9_grouped_{tiling.name}_{dtype.value}_{layout}"
