"""The Step 9 family of sm_90a: receives a `Problem`, hands on a tiling for it, its time, its function's name.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kernels.device import Device
from kernels.problem import DType, Problem

SMEM_BYTES = 232_448  # what a block may have on sm_90
BARRIER_BYTES = 1_024  # barriers, and what aligning the buffers to 1,024 bytes may cost
TILE_K = 64  # elements: 128 bytes, the widest swizzle
STAGING_BYTES = 16_384  # a consumer: two 64×64 tiles of 16 bits, two 64×32 or one 64×64 of fp32
INPUTS = (DType.FP16, DType.BF16)
LARGEST = 2**31 - 512  # sizes are 32-bit, and a tile may reach past the edge


@dataclass(frozen=True, slots=True)
class Tiling:
    """Shape of one kernel.

    A block computes `p`×`q` of D; p runs along M and q along N, or the other way round with `swap`: D is then
    computed transposed, so that a small M takes the narrow side of the tensor cores' instruction.
    `cluster_p`×`cluster_q` blocks share operands by multicast; `split` such groups make one cluster that
    divides K. Consumers split p among them, or with `pingpong` take turns at whole tiles.
    """

    p: int
    q: int
    cluster_p: int = 1
    cluster_q: int = 1
    split: int = 1
    consumers: int = 2
    pingpong: bool = False
    swap: bool = False

    def __post_init__(self) -> None:
        rows = self.p if self.pingpong else self.p // self.consumers
        if rows % 64 or self.q not in (16, 32, 64, 128, 192, 256):
            raise ValueError(f"no instruction computes {rows}×{self.q}")
        if self.split > 1 and self.pingpong:
            raise ValueError("blocks that divide K compute one tile each")
        if rows * self.q > 128 * 192:
            raise ValueError("the accumulator of a consumer does not fit its registers")

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
    def staging_bytes(self) -> int:
        """Bytes through which results leave; split-K uses the ring again."""
        return 0 if self.split > 1 else self.consumers * STAGING_BYTES

    @property
    def stages(self) -> int:
        """Depth of the ring: as deep as fits."""
        return (SMEM_BYTES - BARRIER_BYTES - self.staging_bytes) // self.stage_bytes


@dataclass(frozen=True)
class Step9:
    """One variant: a tiling, and the outputs that it is compiled for.

    `same`: 16-bit output of the input's type by TMA; `wide`: fp32 output by TMA; `plain`: any output, address
    and stride.
    """

    tiling: Tiling
    same: bool = True
    wide: bool = False
    plain: bool = False

    @property
    def step(self) -> int:
        """Rung of the ladder."""
        return 9

    @cached_property
    def name(self) -> str:
        """Such as "step9-128x256-2x1"."""
        return f"step9-{self.tiling.name}"

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None where it takes the problem, else why not (reads on from "because")."""
        lda, ldb, _, _ = problem.leading
        reasons = (
            (device.arch != "sm_90a", f"it is compiled for sm_90a, not {device.arch}"),
            (problem.dtype not in INPUTS, f"its inputs are fp16 or bf16, not {problem.dtype}"),
            (problem.out_dtype is DType.FP64, "it doesn't write fp64"),
            (min(problem.m, problem.n, problem.k, problem.batch) < 1, "there is nothing to multiply"),
            (max(problem.m, problem.n, problem.k) > LARGEST, "its sizes are 32-bit"),
            (lda % 8 != 0 or ldb % 8 != 0, "TMA needs rows of A and B in multiples of 16 bytes"),
            (
                self._store(problem) is None,
                f"it has no function that writes {problem.out_dtype} of this shape and alignment",
            ),
        )
        return next((why for applies, why in reasons if applies), None)

    def function(self, problem: Problem) -> str:
        """Name of the compiled function."""
        store = self._store(problem)
        assert store is not None
        return self._function(problem.dtype, store, problem.trans_a, problem.trans_b)

    def functions(self) -> Iterator[tuple[str, DType, DType | None, bool, bool]]:
        """All of them: name, input type, output type (None: plain), trans_a, trans_b."""
        for dtype in INPUTS:
            stores = [(dtype.value, dtype)] if self.same else []
            stores += [(DType.FP32.value, DType.FP32)] if self.wide else []
            outs: list[tuple[str, DType | None]] = [*stores, *([("plain", None)] if self.plain else [])]
            for store, out in outs:
                for trans_a in (False, True):
                    for trans_b in (False, True):
                        yield self._function(dtype, store, trans_a, trans_b), dtype, out, trans_a, trans_b

    def order(self, problem: Problem) -> str | None:
        """Order along K: 16 at a time into one fp32 accumulator, or in so many parts that are then added."""
        parts = self.tiling.split
        return "k16" if parts == 1 else f"k16 in {parts} parts"

    def raster(self, problem: Problem, device: Device) -> int:
        """Groups of 8 rows of tiles: a wave of blocks covers about a square."""
        return 8

    def seconds(self, problem: Problem, device: Device) -> float:
        """Launch, then about the longest of three times: memory's, the waves of tiles', the power cap's.

        A step of K costs a block the longest of: FLOPs at the tensor cores' rate, bytes that L2 sends, bytes
        that arrive. Under the cap, FLOPs and bytes from L2 cost energy. Rates were fitted to one H200.
        """
        t = self.tiling
        p, q = (problem.n, problem.m) if t.swap else (problem.m, problem.n)
        clusters = problem.batch * _ceil(p, t.p * t.cluster_p) * _ceil(q, t.q * t.cluster_q)
        waves = _ceil(clusters, max(1, _resident(device, t.cluster) // t.cluster))
        steps = _ceil(_ceil(problem.k, TILE_K), t.split)
        flops = 2 * t.p * t.q * TILE_K
        sent = int((t.p / t.cluster_q + t.q / t.cluster_p) * TILE_K * 2)
        per_sm = device.peak_flops.get(problem.dtype.value, 1e15) / max(1, device.sms)
        step = max(flops / (per_sm * EFFICIENCY), sent / SENT_RATE, t.stage_bytes / ARRIVING_RATE)
        tail = t.p * t.q * problem.out_dtype.itemsize / DRAIN_RATE
        if self._store(problem) == "plain":
            tail *= PLAIN_COST
        if t.pingpong:
            tail /= 2
        if t.split > 1:
            tail += REDUCE_SECONDS
        work = waves * (steps * step + tail)
        memory = (problem.bytes_read + problem.bytes_written) / (READ_SHARE * device.bandwidth)
        all_steps = clusters * t.cluster * steps
        power = (
            all_steps * (flops / CAPPED_FLOPS + sent / CAPPED_BYTES) * 700.0 / (device.power_watts or 700.0)
        )
        start = LAUNCH_SECONDS + (CLUSTER_SECONDS if t.cluster > 1 else 0.0)
        return start + (memory**SOFT + work**SOFT + power**SOFT) ** (1 / SOFT)

    def _store(self, problem: Problem) -> str | None:
        """How D is written: "fp16", "bf16", "fp32" (by TMA), "plain"; None where it isn't.

        TMA writes whole pieces of 16 bytes, so it would write past a row that ends within one.
        """
        size = problem.out_dtype.itemsize
        fits = problem.aligned >= 16 and not problem.leading[3] * size % 16 and not problem.n * size % 16
        by_tma = (
            self.same if problem.out_dtype is problem.dtype else self.wide and problem.out_dtype is DType.FP32
        )
        if fits and by_tma:
            return problem.out_dtype.value
        return "plain" if self.plain else None

    def _function(self, dtype: DType, store: str, trans_a: bool, trans_b: bool) -> str:
        layout = ("t" if trans_a else "n") + ("t" if trans_b else "n")
        return f"step9_{self.tiling.name}_{dtype.value}_{store}_{layout}".replace("-", "_")


# Fitted to one H200; what they stand for is said in `Step9.seconds`. Rates are a second, or a second and SM.
EFFICIENCY = 0.85  # of the tensor cores' peak
SENT_RATE = 89e9
ARRIVING_RATE = 103e9
DRAIN_RATE = 70e9
PLAIN_COST = 3.4
READ_SHARE = 0.85
CAPPED_FLOPS = 9.6e14  # at 700 W, if nothing else cost energy
CAPPED_BYTES = 4.7e13
LAUNCH_SECONDS = 1.1e-6
CLUSTER_SECONDS = 0.9e-6
REDUCE_SECONDS = 6e-6
SOFT = 3.3  # of the times the longest counts, a little more where they are equal


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _resident(device: Device, cluster: int) -> int:
    """Blocks at once: clusters of four don't fit the SMs of every GPC (120 of 132 blocks on H200)."""
    return device.sms if cluster <= 2 else device.sms * 10 // 11


def variants() -> tuple[Step9, ...]:
    """The family."""
    return FAMILY


FAMILY = (
    Step9(Tiling(128, 256, cluster_p=2), wide=True, plain=True),
    Step9(Tiling(128, 256)),
    Step9(Tiling(128, 192)),
    Step9(Tiling(128, 128, cluster_p=2)),
    Step9(Tiling(128, 128, cluster_p=2, pingpong=True)),
    Step9(Tiling(128, 128, pingpong=True)),
    Step9(Tiling(128, 64), plain=True),
    Step9(Tiling(64, 128, cluster_p=2, consumers=1)),
    Step9(Tiling(64, 64, consumers=1), plain=True),
    Step9(Tiling(64, 64, consumers=1, swap=True), same=False, plain=True),
    Step9(Tiling(64, 32, consumers=1, swap=True), same=False, plain=True),
    Step9(Tiling(64, 16, consumers=1, swap=True), same=False, plain=True),
    Step9(Tiling(128, 128, split=2), same=False, plain=True),
    Step9(Tiling(64, 64, consumers=1, split=4), same=False, plain=True),
)
