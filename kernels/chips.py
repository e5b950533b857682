"""Parameters of the model: receives nothing, hands on a `Chip` for each architecture, every number with its source.

The engines (kernels/engines.py) work by them. Assumptions are marked so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of the model and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Chip:
    """Parameters of one chip. None is fitted to a step."""

    name: str
    sms: Parameter
    clock_hz: Parameter
    mma_rate: Parameter  # multiply-adds of 16-bit operands a cycle and SM
    load_latency: Parameter  # issue of a TMA load to its bytes' arrival, unloaded
    load_rate: Parameter  # bytes a cycle from L2 into one SM
    store_rate: Parameter
    plain_latency: Parameter  # of a load into registers
    issue: Parameter  # cycles a warp instruction
    signal: Parameter  # commit or arrival to a waiting warp that goes on
    mma_latency: Parameter  # of the first result of an idle tensor core
    launch: Parameter  # seconds of a launch, first to last CTA
    read_rate: Parameter  # bytes a cycle from tensor memory into registers
    read_latency: Parameter
    stage_rate: Parameter  # bytes a cycle from registers into shared memory


def _chip(
    name: str, sms: int, clock: float, clock_source: str, mma: int, rate: float, read_latency: Parameter
) -> Chip:
    return Chip(
        name,
        Parameter(sms, "SMs", "datasheet"),
        Parameter(
            clock,
            "Hz",
            clock_source,
        ),
        Parameter(mma, "FMA/cycle/SM", "datasheet: peak / (SMs × boost clock)"),
        Parameter(
            850,
            "cycles",
            "assumed: an L2 hit of some 270 cycles (arXiv 2402.13499, H100) and twice that for TMA",
        ),
        Parameter(
            rate,
            "B/cycle/SM",
            "assumed: three quarters of a port of 64 B a cycle, all SMs reading L2 at once",
        ),
        Parameter(rate, "B/cycle/SM", "assumed: as loads"),
        Parameter(600, "cycles", "assumed: between an L2 hit and DRAM (arXiv 2402.13499, H100)"),
        Parameter(2, "cycles", "assumed: dependent issue every 4 cycles, two independent chains"),
        Parameter(40, "cycles", "assumed: one round trip to shared memory and an issue"),
        Parameter(60, "cycles", "assumed: latency of the smallest wgmma (arXiv 2402.13499, H100)"),
        Parameter(4e-6, "s", "assumed: an empty kernel between two events, 2.5 to 5 µs"),
        Parameter(512, "B/cycle/SM", "datasheet: 128 lanes of 4 B"),
        read_latency,
        Parameter(128, "B/cycle/SM", "datasheet: 32 banks of 4 B of shared memory"),
    )


B200 = _chip(
    "B200", 148, 1.85e9, "assumed: locked a little under the boost of 1.965 GHz", 4096, 48.0,
    Parameter(420, "cycles", "measured by others: arXiv 2512.02189, B200"),
)  # fmt: skip
H200 = _chip(
    "H200", 132, 1.98e9, "datasheet boost, at which the short bursts ran", 2048, 48.0,
    Parameter(0, "cycles", "datasheet: wgmma accumulates in registers, which are at hand"),
)  # fmt: skip
CHIPS = {"sm_100a": B200, "sm_90a": H200}
