"""What the selector knows of a device: receives what a driver or a datasheet says, hands on a `Device`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """Description of one device. Rates are peaks: bytes/s, FLOP/s by dtype; clocks in Hz; sizes in bytes.

    `arch` is "cpu", "sm_90a" or "sm_100a". `uuid` and `driver` identify the very device for tables of
    measured times and self-test outcomes. `power_watts` is the cap that bounds sustained rates (0: unknown).
    """

    name: str
    arch: str
    uuid: str = ""
    driver: str = ""
    sms: int = 1
    smem_bytes: int = 0
    l2_bytes: int = 0
    memory_bytes: int = 0
    bandwidth: float = 2e10
    clock_hz: float = 3e9
    power_watts: float = 0.0
    virtual: bool = False
    peak_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identity of device and driver, for what was measured or proven on it."""
        return f"{self.name}|{self.uuid}|{self.driver}|{self.arch}"
