"""The Step 9 family of sm_100a: receives a `Problem`, hands on which tiling takes it, how long that may take, and
the name of the compiled function. Imports neither torch nor the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from kernels.blackwell.tilings import BIG, BIG_DYNAMIC, BLK_K, CTA_GROUP, MMA_N, SMALL, Choice, Tiling
from kernels.device import Device
from kernels.problem import DType, Problem

ARCHITECTURES = ("sm_100a", "sm_103a")
HALVES = (DType.FP16, DType.BF16)
LARGEST = 2**31 - 512  # of M, N and K: coordinates are 32-bit, and one tile beyond the edge must not wrap

# Of the estimate; each is a property of the kernel or the chip, none is fitted.
FLOPS_CYCLE_SM = 8_192  # dense 16-bit tcgen05.mma: 128×256×16 multiply-adds in 128 cycles
LAUNCH_SECONDS = 3e-6  # launch, set-up of barriers and tensor memory, first load from memory
DRAIN_CYCLES = 2_000  # read, convert and stage 256 columns a row: what a single accumulator can't hide
STORE_CYCLES = 4_000  # the last tile's pieces leave by TMA, one after another
PLAIN_CYCLES = 40_000  # the same element by element
DYNAMIC_CYCLES = 200  # an answer of cluster launch control, where nothing hides it


@dataclass(frozen=True, slots=True)
class Variant:
    """One tiling, storing by TMA or element by element, over all types and layouts."""

    tiling: Tiling
    plain: bool = False

    @property
    def name(self) -> str:
        """As in the API: step9-512x256, -dynamic, -plain."""
        return f"step9-{self.tiling.name.replace('_', '-')}" + ("-plain" if self.plain else "")

    @property
    def step(self) -> int:
        """Rung of the ladder."""
        return 9

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None where the variant takes the problem, else why not."""
        a, b, _, d = problem.leading
        reasons = [
            (device.arch not in ARCHITECTURES, f"it is written for {ARCHITECTURES[0]}, not {device.arch}"),
            (problem.dtype not in HALVES, f"its inputs are 16-bit, not {problem.dtype}"),
            (problem.out_dtype is DType.FP64, "it writes 16 bits or fp32"),
            (
                not self.plain and problem.out_dtype not in (problem.dtype, DType.FP32),
                f"it writes {problem.dtype} or fp32 by TMA",
            ),
            (min(problem.m, problem.n, problem.k, problem.batch) < 1, "there is nothing to multiply"),
            (max(problem.m, problem.n, problem.k) > LARGEST, "its coordinates are 32-bit"),
            (CTA_GROUP * self.tiles(problem) >= 2**31, "its tiles are more than a grid holds"),
            (not self.plain and problem.aligned < 16, "TMA writes rows of D that start at 16 bytes"),
            (a % 8 != 0 or b % 8 != 0, "TMA reads rows of A and B in multiples of 16 bytes"),
            (
                not self.plain and d * problem.out_dtype.itemsize % 16 != 0,
                "TMA writes rows of D in multiples of 16 bytes",
            ),
        ]
        return next((why for applies, why in reasons if applies), None)

    def tiles(self, problem: Problem) -> int:
        """Tiles of D, edges included."""
        return ceil(problem.m / self.tiling.tile_m) * ceil(problem.n / MMA_N) * problem.batch

    def seconds(self, problem: Problem, device: Device) -> float:
        """Waves of tiles on the clusters that fit, each as long as its MMAs and what hides behind nothing."""
        tiles = self.tiles(problem)
        clusters = max(device.sms // CTA_GROUP, 1)
        waves = ceil(tiles / clusters)
        flops = 2 * self.tiling.tile_m * MMA_N * BLK_K * ceil(problem.k / BLK_K)
        multiply = flops / (CTA_GROUP * self._flops_second_sm(problem, device))
        hidden = self.tiling.accumulators > 1
        tile = (
            multiply
            + ((0 if hidden else DRAIN_CYCLES) + DYNAMIC_CYCLES * self.tiling.dynamic) / device.clock_hz
        )
        tail = (DRAIN_CYCLES + STORE_CYCLES) / device.clock_hz
        if self.plain:
            tile = max(tile, PLAIN_CYCLES / device.clock_hz)
            tail = PLAIN_CYCLES / device.clock_hz
        memory = (problem.bytes_read + problem.bytes_written) / device.bandwidth
        return LAUNCH_SECONDS + max(waves * tile, memory) + tail

    def _flops_second_sm(self, problem: Problem, device: Device) -> float:
        peak = device.peak_flops.get(problem.dtype.value)
        return peak / device.sms if peak else FLOPS_CYCLE_SM * device.clock_hz

    def order(self, problem: Problem) -> str | None:
        """All tilings add along K in the same order, 16 at a time from 0, into one fp32 accumulator."""
        return "tcgen05-serial"

    def function(self, problem: Problem) -> str:
        """Name of the compiled function."""
        out = "plain" if self.plain else "half" if problem.out_dtype is problem.dtype else "fp32"
        a_mn, b_mn = problem.trans_a, not problem.trans_b
        return Choice(self.tiling, problem.dtype.value, a_mn, b_mn, out).name

    def blocks(self, problem: Problem, resident: int) -> int:
        """As many as fit."""
        return resident

    def raster(self, problem: Problem, device: Device) -> int:
        """Rows of tiles a group: what runs at once then covers a square of D, which takes the fewest loads."""
        clusters = max(device.sms // CTA_GROUP, 1)
        side = round(sqrt(clusters * MMA_N / self.tiling.tile_m))
        return max(1, min(side, ceil(problem.m / self.tiling.tile_m)))


def variants() -> tuple[Variant, ...]:
    """The family, in the order in which the selector breaks ties."""
    return (Variant(BIG), Variant(SMALL), Variant(BIG_DYNAMIC), Variant(SMALL, plain=True))
