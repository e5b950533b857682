"""The Step 9 family of sm_90a: receives a `Problem`, hands on a tiling for it, its time, its function's name.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kernels.device import Device
from kernels.hopper.tilings import FAMILY, INPUTS, PLAIN, TILE_K, Member, Tiling
from kernels.problem import DType, Problem

LARGEST = 2**31 - 512  # sizes are 32-bit, and a tile may reach past the edge


@dataclass(frozen=True, slots=True)
class Step9:
    """A member of the family as the selector sees it."""

    member: Member

    @property
    def tiling(self) -> Tiling:
        """Its tiling."""
        return self.member.tiling

    @property
    def step(self) -> int:
        """Rung of the ladder."""
        return 9

    @property
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
        return self.member.function(problem.dtype, store, problem.trans_a, problem.trans_b)

    def functions(self) -> Iterator[tuple[str, DType, DType | None, bool, bool]]:
        """All compiled functions: name, input type, output type (None: plain), trans_a, trans_b."""
        return self.member.functions()

    def order(self, problem: Problem) -> str | None:
        """Order along K: 16 at a time into one fp32 accumulator, or in so many parts that are then added."""
        parts = self.tiling.split
        return "k16" if parts == 1 else f"k16 in {parts} parts"

    def blocks(self, problem: Problem, resident: int) -> int:
        """The fewest that need no more waves: under the power cap an idle SM leaves its share to the others."""
        cluster = self.tiling.cluster
        clusters = self._clusters(problem)
        waves = _ceil(clusters, max(1, resident // cluster))
        return _ceil(clusters, waves) * cluster

    def raster(self, problem: Problem, device: Device) -> int:
        """Groups of 8 rows of tiles: a wave of blocks covers about a square."""
        return 8

    def seconds(self, problem: Problem, device: Device) -> float:
        """Launch, then about the longest of three times: memory's, the waves of tiles', the power cap's.

        A step of K costs a block the longest of: FLOPs at the tensor cores' rate, bytes that L2 sends, bytes
        that arrive. Under the cap, FLOPs and bytes from L2 cost energy. Rates were fitted to one H200.
        """
        t = self.tiling
        clusters = self._clusters(problem)
        waves = _ceil(clusters, max(1, _resident(device, t.cluster) // t.cluster))
        steps = _ceil(_ceil(problem.k, TILE_K), t.split)
        flops = 2 * t.p * t.q * TILE_K
        sent = int((t.p / t.cluster_q + t.q / t.cluster_p) * TILE_K * 2)
        per_sm = device.peak_flops.get(problem.dtype.value, 1e15) / max(1, device.sms)
        step = max(flops / (per_sm * EFFICIENCY), sent / SENT_RATE, t.stage_bytes / ARRIVING_RATE)
        tail = t.p * t.q * problem.out_dtype.itemsize / DRAIN_RATE
        if self._store(problem) == PLAIN:
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

    def _clusters(self, problem: Problem) -> int:
        """Tiles, each of a whole cluster."""
        t = self.tiling
        p, q = (problem.n, problem.m) if t.swap else (problem.m, problem.n)
        return problem.batch * _ceil(p, t.p * t.cluster_p) * _ceil(q, t.q * t.cluster_q)

    def _store(self, problem: Problem) -> str | None:
        """How D is written: "fp16", "bf16", "fp32" (by TMA), "plain"; None where it isn't.

        TMA writes whole pieces of 16 bytes, so it would write past a row that ends within one.
        """
        size = problem.out_dtype.itemsize
        fits = problem.aligned >= 16 and not problem.leading[3] * size % 16 and not problem.n * size % 16
        wide = problem.out_dtype is DType.FP32 and self.member.wide
        by_tma = wide or (problem.out_dtype is problem.dtype and self.member.same)
        if fits and by_tma:
            return problem.out_dtype.value
        return PLAIN if self.member.plain else None


# Fitted to one H200; what they stand for is said in `Step9.seconds`. Rates are a second, or a second and SM.
EFFICIENCY = 0.85  # of the tensor cores' peak
SENT_RATE = 89e9
ARRIVING_RATE = 103e9
DRAIN_RATE = 70e9
PLAIN_COST = 3.4
READ_SHARE = 0.85
CAPPED_FLOPS = 1.0e15  # at 700 W, if nothing else cost energy
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
    return tuple(Step9(member) for member in FAMILY)
