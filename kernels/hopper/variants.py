"""The Step 9 family of sm_90a: receives a `Problem`, hands on a tiling for it, its time, its function's name.

Imports neither torch nor the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernels.device import Device
from kernels.hopper.tilings import (
    CANDIDATES,
    FAMILY,
    GROUPED,
    INPUTS,
    PLAIN,
    TILE_K,
    Member,
    Tiling,
    grouped_function,
)
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
        because = _unsupported(problem, device)
        if because is None and self._store(problem) is None:
            because = f"it has no function that writes {problem.out_dtype} of this shape and alignment"
        if because is None and (problem.trans_a, problem.trans_b) not in self.member.layouts:
            because = "it is not compiled for this layout of A and B"
        return because

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
        """Groups of rows of tiles, 8 of them: a wave of blocks covers about a square."""
        return 8

    def seconds(self, problem: Problem, device: Device) -> float:
        """Launch, then about the longest of three times: memory's, the waves of tiles', the power cap's.

        A step of K costs a block the longest of: FLOPs at the tensor cores' rate, bytes that L2 sends, bytes
        that arrive. Under the cap, FLOPs and bytes from L2 cost energy. What lies past the edges isn't loaded, but
        multiplied, as zeros. Rates were fitted to one H200.
        """
        t = self.tiling
        clusters = self._clusters(problem)
        waves = _ceil(clusters, max(1, _resident(device, t.cluster) // t.cluster))
        steps = _ceil(_ceil(problem.k, TILE_K), t.split)
        costs = _step_costs(t, problem)
        step = max(
            _step_seconds(costs, problem, device, clusters * t.cluster),
            CLUSTER_STEP_SECONDS if t.sharing > 1 else 0.0,
        )
        tail = t.p * t.q * problem.out_dtype.itemsize / DRAIN_RATE
        if not self._by_tma(problem):
            tail *= PLAIN_COST
        elif t.swap:
            tail *= ACROSS_COST
        if t.pingpong:
            tail /= 2
        if t.exchanges:
            tail = tail / 2 + EXCHANGE_SECONDS
        elif t.split > 1:
            tail += REDUCE_SECONDS
        work = waves * (steps * step + tail)
        memory = (problem.bytes_read + problem.bytes_written) / (READ_SHARE * device.bandwidth)
        power = clusters * t.cluster * steps * _step_energy(costs, device)
        start = LAUNCH_SECONDS + (CLUSTER_SECONDS if t.cluster > 1 else 0.0)
        return start + _soft(memory, work, power)

    def _clusters(self, problem: Problem) -> int:
        """Tiles, each of a whole cluster."""
        t = self.tiling
        p, q = (problem.n, problem.m) if t.swap else (problem.m, problem.n)
        return problem.batch * _ceil(p, t.p * t.cluster_p) * _ceil(q, t.q * t.cluster_q)

    def _store(self, problem: Problem) -> str | None:
        """How D is written: "fp16", "bf16", "fp32" (by TMA), "plain"; None where it isn't."""
        if self._by_tma(problem) and not self.tiling.swap:
            return problem.out_dtype.value
        return PLAIN if self.member.plain else None

    def _by_tma(self, problem: Problem) -> bool:
        """Whether TMA writes D: in pieces of 16 bytes, so it would write past a row that ends within one."""
        size = problem.out_dtype.itemsize
        fits = problem.aligned >= 16 and not problem.leading[3] * size % 16 and not problem.n * size % 16
        same = problem.out_dtype is problem.dtype and (self.member.same or self.tiling.swap)
        wide = problem.out_dtype is DType.FP32 and self.member.wide
        return fits and (same or wide)


# Fitted to one H200; what they stand for is said in `Step9.seconds`. Rates are a second, or a second and SM.
EFFICIENCY = 0.86  # of the tensor cores' peak
SENT_RATE = 90e9
ARRIVING_RATE = 111e9
ALONE_RATE = 115e9  # of either, where no other SM asks
STEP_SECONDS = 150e-9  # whatever its size
CLUSTER_STEP_SECONDS = 190e-9  # where blocks share operands, and each waits for the slower
DRAIN_RATE = 71e9
PLAIN_COST = 2.8
ACROSS_COST = 2.4  # where D is transposed on its way out
READ_SHARE = 0.93
CAPPED_FLOPS = 9.9e14  # at 700 W, if nothing else cost energy
CAPPED_BYTES = 5.0e13
LAUNCH_SECONDS = 1.14e-6
CLUSTER_SECONDS = 0.81e-6
REDUCE_SECONDS = 5.1e-6
EXCHANGE_SECONDS = 5.3e-6
TABLE_SECONDS = 4e-6  # of a group: its table's copy to the device, tensor maps fetched from memory
SOFT = 2.9  # of the times the longest counts, a little more where they are equal


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _resident(device: Device, cluster: int) -> int:
    """Blocks at once: clusters of four don't fit the SMs of every GPC (120 of 132 blocks on H200)."""
    return device.sms if cluster <= 2 else device.sms * 10 // 11


def _unsupported(problem: Problem, device: Device) -> str | None:
    """Why no kernel of Step 9 takes a problem, if so."""
    lda, ldb, _, _ = problem.leading
    reasons = (
        (device.arch != "sm_90a", f"it is compiled for sm_90a, not {device.arch}"),
        (problem.dtype not in INPUTS, f"its inputs are fp16 or bf16, not {problem.dtype}"),
        (problem.out_dtype is DType.FP64, "it doesn't write fp64"),
        (min(problem.m, problem.n, problem.k, problem.batch) < 1, "there is nothing to multiply"),
        (max(problem.m, problem.n, problem.k) > LARGEST, "its sizes are 32-bit"),
        (lda % 8 != 0 or ldb % 8 != 0, "TMA needs rows of A and B in multiples of 16 bytes"),
    )
    return next((why for applies, why in reasons if applies), None)


class _StepCosts(NamedTuple):
    """Of a block's step along K, the mean of all blocks: FLOPs, bytes that L2 sends for it, bytes that arrive."""

    flops: float
    sent: float
    arriving: float


def _step_costs(t: Tiling, problem: Problem) -> _StepCosts:
    extent_p, extent_q = (problem.n, problem.m) if t.swap else (problem.m, problem.n)
    p, q = _mean_rows(extent_p, t.p, t.cluster_p), _mean_rows(extent_q, t.q, t.cluster_q)
    line = TILE_K * problem.dtype.itemsize
    return _StepCosts(2 * t.p * t.q * TILE_K, (p / t.cluster_q + q / t.cluster_p) * line, (p + q) * line)


def _mean_rows(extent: int, tile: int, cluster: int) -> float:
    """Rows that a block loads of a tile, the edge's taken together with the others."""
    return min(tile, _ceil(extent, 8) * 8 / (_ceil(extent, tile * cluster) * cluster))


def _step_seconds(costs: _StepCosts, problem: Problem, device: Device, blocks: int) -> float:
    """Time of a block's step along K where so many blocks are to do, the power cap aside."""
    per_sm = device.peak_flops.get(problem.dtype.value, 1e15) / max(1, device.sms)
    idle = max(1.0, device.sms / blocks)  # what these SMs don't take is left to the others
    sending, arriving = (min(rate * idle, ALONE_RATE) for rate in (SENT_RATE, ARRIVING_RATE))
    return max(
        STEP_SECONDS,
        costs.flops / (per_sm * EFFICIENCY),
        costs.sent / sending,
        costs.arriving / arriving,
    )


def _step_energy(costs: _StepCosts, device: Device) -> float:
    """Seconds that a block's step along K takes of the whole chip's time under its power cap."""
    seconds = costs.flops / CAPPED_FLOPS + costs.sent / CAPPED_BYTES
    return seconds * 700.0 / (device.power_watts or 700.0)


def _soft(*seconds: float) -> float:
    """About the longest of several times."""
    return float(sum(each**SOFT for each in seconds) ** (1 / SOFT))


@dataclass(frozen=True, slots=True)
class Grouped:
    """The grouped kernel in one tiling: for a list of products, so no candidate for one alone."""

    tiling: Tiling

    @property
    def step(self) -> int:
        """Rung of the ladder."""
        return 9

    @property
    def name(self) -> str:
        """Such as "step9-grouped-128x128"."""
        return f"step9-grouped-{self.tiling.name}"

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that a block computes at a time."""
        return self.tiling.p, self.tiling.q

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None where it takes the problem, else why not (reads on from "because")."""
        return _unsupported(problem, device)

    def function(self, problem: Problem) -> str:
        """Name of the compiled function."""
        return grouped_function(self.tiling, problem.dtype, problem.trans_a, problem.trans_b)

    def order(self, problem: Problem) -> str | None:
        """Order along K: 16 at a time into one fp32 accumulator."""
        return "k16"

    def blocks(self, problem: Problem, resident: int) -> int:
        """As many as there are."""
        return resident

    def raster(self, problem: Problem, device: Device) -> int:
        """Groups of 8 rows of tiles."""
        return 8

    def seconds(self, problem: Problem, device: Device) -> float:
        """A group of one."""
        return self.seconds_together([problem], device)

    def seconds_together(self, problems: Sequence[Problem], device: Device) -> float:
        """Launch, the table's copy, then about the longest of: memory's time, all tiles over all SMs or the
        longest tile, the power cap's.
        """
        t = self.tiling
        total, longest, power, moved = 0.0, 0.0, 0.0, 0
        for each in problems:
            tiles, steps = each.batch * _ceil(each.m, t.p) * _ceil(each.n, t.q), _ceil(each.k, TILE_K)
            costs = _step_costs(t, each)
            step = _step_seconds(costs, each, device, device.sms)
            one = steps * step + PLAIN_COST * t.p * t.q * each.out_dtype.itemsize / DRAIN_RATE
            total += one * tiles
            longest = max(longest, one)
            power += tiles * steps * _step_energy(costs, device)
            moved += each.bytes_read + each.bytes_written
        memory = moved / (READ_SHARE * device.bandwidth)
        return LAUNCH_SECONDS + TABLE_SECONDS + _soft(memory, max(total / max(1, device.sms), longest), power)


def variants() -> tuple[Step9, ...]:
    """The family."""
    return tuple(Step9(member) for member in FAMILY)


def candidates() -> tuple[Step9, ...]:
    """What may join the family once a GPU has timed it; the selector doesn't choose among them."""
    return tuple(Step9(member) for member in CANDIDATES)


def grouped() -> tuple[Grouped, ...]:
    """The tilings of the grouped kernel."""
    return tuple(Grouped(tiling) for tiling in GROUPED)
