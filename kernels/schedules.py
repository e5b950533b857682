"""Chips and schedules for the model: receives datasheets and the shapes of kernels, hands on plain descriptions.

`Rates` are those of one SM, each with its source; a `Schedule` says what a step's CTA loads, multiplies and
writes back, and who does it. The shapes are those of kernels/blackwell and kernels/hopper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kernels import chips
from kernels.chips import Chip, Parameter
from kernels.device import B200, H200, Device

BLK_K = 64
COPIES_AT_ONCE = 8  # loads in flight in Step 3, as its machine code has them
COPY_INSTRUCTIONS = 15  # an element, as its PTX has them


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one SM, in FLOPs and bytes a clock, and latencies in clocks."""

    device: Device
    chip: Chip

    @property
    def clock(self) -> float:
        """Clocks a second."""
        return self.chip.clock_hz.value

    @property
    def flops_a_clock(self) -> float:
        """Of the tensor cores, on 16-bit operands."""
        return 2.0 * self.chip.mma_rate.value

    @property
    def peak(self) -> float:
        """FLOP/s of the whole chip at this clock."""
        return self.flops_a_clock * self.clock * self.device.sms

    @property
    def l2_bandwidth(self) -> float:
        """Bytes a second that all SMs together take from L2."""
        return self.chip.load_rate.value * self.clock * self.device.sms

    def parameters(self) -> list[dict[str, str]]:
        """Each parameter with its value and where it comes from."""
        chip = self.chip
        named = {
            "SMs": chip.sms,
            "clock": chip.clock_hz,
            "tensor core": chip.mma_rate,
            "load latency": chip.load_latency,
            "L2 to SM": chip.load_rate,
            "SM to L2": chip.store_rate,
            "a barrier's handoff": chip.signal,
            "latency of a product": chip.mma_latency,
            "load into a register": chip.plain_latency,
            "instruction": chip.issue,
            "launch": chip.launch,
            "memory": Parameter(self.device.bandwidth, "B/s", "datasheet"),
        }
        if self.device.arch == "sm_100a":  # wgmma accumulates in registers
            named["tensor memory"] = chip.read_rate
            named["its latency"] = chip.read_latency
        named["staging D"] = chip.stage_rate
        return [{"name": n, "value": _told(p), "source": p.source} for n, p in named.items()]


def _told(p: Parameter) -> str:
    """Value and unit, such as 1.85 GHz."""
    prefixes = {"Hz": (1e9, "GHz"), "B/s": (1e12, "TB/s"), "s": (1e-6, "µs")}
    scale, unit = prefixes.get(p.unit, (1.0, p.unit))
    return f"{p.value / scale:g} {unit}"


CHIPS = {"h200": Rates(H200, chips.H200), "b200": Rates(B200, chips.B200)}


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's schedule in a CTA. Bytes and FLOPs are those of a CTA and a block of K.

    `roles` False: one team does all, in turn. `ahead`: how many loads it keeps in flight. `early`: a drained
    accumulator is released before D is stored. `apart`: writing back is a role of its own. `copied`: elements of a
    block that each thread copies by itself, where TMA doesn't load. `at_most`: CTAs an SM, where registers bound them.
    """

    step: int
    arch: str
    tile: tuple[int, int]
    cta: tuple[int, int]
    load_bytes: int
    depth: int
    fetched: int
    consumers: int = 1
    accumulators: int = 1
    roles: bool = False
    ahead: int = 1
    persistent: bool = False
    early: bool = False
    apart: bool = False
    smem: int = 0
    chunk: int = 64
    buffers: int = 1
    same_phase: bool = False
    copied: int = 0
    at_most: int = 32

    @property
    def ctas(self) -> int:
        """CTAs that compute a tile together."""
        return self.tile[0] * self.tile[1] // (self.cta[0] * self.cta[1])

    @property
    def block_flops(self) -> float:
        """FLOPs of a consumer and a block of K."""
        return 2.0 * self.cta[0] * self.cta[1] * BLK_K / self.consumers

    @property
    def columns(self) -> int:
        """Columns that one consumer writes back, 128 rows each (64 on Hopper with two consumers)."""
        return self.cta[0] * self.cta[1] // (self.consumers * self.rows)

    @property
    def rows(self) -> int:
        """Rows of a consumer's part."""
        return min(128, self.cta[0] // self.consumers)


def _blackwell(step: int, depth: int, **more: Any) -> Schedule:
    base = Schedule(step, "sm_100a", (128, 128), (128, 128), 32768, depth, 32768, **more)
    return replace(base, smem=depth * 32768 + 16384 + 64)


def _hopper(step: int, depth: int, **more: Any) -> Schedule:
    base = Schedule(step, "sm_90a", (128, 128), (128, 128), 32768, depth, 32768, chunk=128, **more)
    return replace(base, smem=depth * 32768 + 32768 + 128)


def _copying(arch: str, **more: Any) -> Schedule:
    """Step 3: 128 threads copy 128 × 64 elements of A and of B, one after the other."""
    return Schedule(3, arch, (128, 128), (128, 128), 32768, 1, 32768, copied=2 * 128 * BLK_K // 128, **more)


SCHEDULES: dict[str, dict[int, Schedule]] = {
    "sm_100a": {
        3: _copying("sm_100a", smem=32_780),
        4: _blackwell(4, 1, ahead=1),
        5: _blackwell(5, 2, ahead=2),
        6: _blackwell(6, 2, ahead=2, persistent=True),
        7: _blackwell(7, 2, roles=True, apart=True, persistent=True),
        8: replace(
            _blackwell(8, 4, roles=True, apart=True, persistent=True),
            tile=(256, 256),
            cta=(128, 256),
            smem=147_540,
        ),
        9: replace(
            _blackwell(9, 4, roles=True, apart=True, persistent=True, consumers=2, early=True, buffers=2),
            tile=(512, 256),
            cta=(256, 256),
            load_bytes=49152,
            fetched=49152,
            smem=229_584,
            chunk=32,
        ),
    },
    "sm_90a": {
        3: _copying("sm_90a", smem=32_768, at_most=3),
        4: _hopper(4, 1, ahead=1),
        5: _hopper(5, 6, ahead=6),
        6: _hopper(6, 6, ahead=6, persistent=True),
        7: _hopper(7, 6, roles=True, persistent=True),
        8: replace(_hopper(8, 6, roles=True, persistent=True), tile=(256, 128), fetched=24576),
        9: replace(
            _hopper(9, 4, roles=True, persistent=True, consumers=2, buffers=2),
            tile=(256, 256),
            cta=(128, 256),
            load_bytes=49152,
            fetched=32768,
            smem=229_440,
            chunk=64,
        ),
    },
}
CHIP_OF = {"sm_100a": "b200", "sm_90a": "h200"}


def lockstep(schedule: Schedule) -> Schedule:
    """The same tile by one team that loads, multiplies and writes back in turn."""
    return replace(
        schedule, roles=False, apart=False, early=False, depth=1, ahead=1, consumers=1, buffers=1, chunk=64
    )
