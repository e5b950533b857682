"""What the selector knows of a device: receives what a driver or a datasheet says, hands on a `Device`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """Description of one device. Rates are peaks: bytes/s, FLOP/s by dtype; clocks in Hz; sizes in bytes.

    `arch` is "cpu", "sm_90a" or "sm_100a". `rates` says where they come from: "datasheet", "measured" (here, at
    start) or "clocks" (what such a chip does a clock). `uuid` and `driver` identify the very device for tables of
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
    rates: str = "datasheet"
    peak_flops: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identity of device and driver, for what was measured or proven on it."""
        return f"{self.name}|{self.uuid}|{self.driver}|{self.arch}"


# Datasheet figures, dense. Peaks of the tensor cores at the boost clock that the datasheet counts with:
# SMs × 4096 FLOP a clock (fp16) on sm_90, × 8192 on sm_100.
H200 = Device(
    "NVIDIA H200",
    "sm_90a",
    sms=132,
    smem_bytes=232_448,
    l2_bytes=50 << 20,
    memory_bytes=141 * 10**9,
    bandwidth=4.8e12,
    clock_hz=1.98e9,
    power_watts=700.0,
    peak_flops={"fp16": 989e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp64": 67e12},
)
B200 = Device(
    "NVIDIA B200",
    "sm_100a",
    sms=148,
    smem_bytes=232_448,
    l2_bytes=126 << 20,
    memory_bytes=180 * 10**9,
    bandwidth=8e12,
    clock_hz=1.965e9,
    power_watts=1000.0,
    peak_flops={"fp16": 2250e12, "bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp64": 37e12},
)
DATASHEETS = {"sm_90a": H200, "sm_100a": B200}
# Compiled for an architecture of its own each; Blackwell Ultra runs libraries built for sm_103a.
ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


def virtual(arch: str) -> Device:
    """The virtual GPU that stands in for a chip: its shape, none of its speed."""
    return replace(DATASHEETS[arch], name=f"virtual {DATASHEETS[arch].name}", virtual=True)


@lru_cache(maxsize=1)
def describe_cpu() -> Device:
    """This computer's CPU; its rates are measured here in about 30 ms, once a process."""
    fp32, fp64 = (_measured_flops(kind) for kind in ("float32", "float64"))
    return Device(
        name=_cpu_name(),
        arch="cpu",
        uuid=platform.node(),
        driver=platform.release(),
        sms=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth=_measured_bandwidth(),
        rates="measured",
        peak_flops={"fp32": fp32, "tf32": fp32, "fp16": fp32, "bf16": fp32, "fp64": fp64},
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _best(call: Callable[[], Any], times: int = 3) -> float:
    """Seconds of the fastest of a few calls, the first one aside."""
    call()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return max(min(seconds), 1e-9)


def _measured_flops(kind: str) -> float:
    import numpy as np

    size = 320
    a, out = np.ones((size, size), kind), np.empty((size, size), kind)
    return 2 * size**3 / _best(lambda: np.matmul(a, a, out=out))


def _measured_bandwidth() -> float:
    """Bytes a second of reading what no cache holds."""
    import numpy as np

    data = np.zeros(32 << 20, np.uint8).view(np.int64)
    return data.nbytes / _best(data.max)


def describe_cuda(index: int = 0) -> Device:
    """GPU `index` as its driver describes it; its rates are its datasheet's, or follow from its clocks.

    Uses torch where the process has it already, else cuda-bindings, which start ten times faster.
    """
    found = _by_torch(index) if _torch_loaded() else _by_bindings(index)
    capability: tuple[int, int] = found.pop("capability")
    arch = ARCHITECTURES.get(capability, "sm_{}{}".format(*capability))
    sheet = DATASHEETS.get("sm_100a" if arch == "sm_103a" else arch)
    if sheet is None:
        clock, sms = found["clock_hz"], found["sms"]
        peaks = {"fp16": 1024.0, "bf16": 1024.0, "tf32": 512.0, "fp32": 256.0, "fp64": 64.0}
        rates = {name: a_clock * sms * clock for name, a_clock in peaks.items()}
        return Device(arch=arch, rates="clocks", peak_flops=rates, **found)
    # a part of a chip (MIG, or another model of the family) has its share of the whole chip's rates
    share = found["sms"] / sheet.sms
    found.pop("bandwidth")
    return replace(
        sheet,
        **found,
        arch=arch,
        bandwidth=sheet.bandwidth * min(1.0, share),
        power_watts=sheet.power_watts * min(1.0, share),
        peak_flops={name: rate * share for name, rate in sheet.peak_flops.items()},
    )


def _torch_loaded() -> bool:
    import sys

    return "torch" in sys.modules


def _by_torch(index: int) -> dict[str, Any]:
    import torch

    seen: Any = torch.cuda.get_device_properties(index)
    return {
        "name": seen.name,
        "capability": (seen.major, seen.minor),
        "uuid": str(seen.uuid),
        "driver": _driver_version(),
        "sms": seen.multi_processor_count,
        "smem_bytes": seen.shared_memory_per_block_optin,
        "l2_bytes": seen.L2_cache_size,
        "memory_bytes": seen.total_memory,
        "clock_hz": float(getattr(seen, "clock_rate", 1_980_000)) * 1e3,
        "bandwidth": 1e12,
    }


def _by_bindings(index: int) -> dict[str, Any]:
    import uuid

    from cuda.bindings import driver

    def ok(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise OSError(f"the CUDA driver answers {result[0].name}")
        return result[1] if len(result) > 1 else None

    ok(driver.cuInit(0))
    handle = ok(driver.cuDeviceGet(index))
    kind = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(ok(driver.cuDeviceGetAttribute(getattr(kind, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)))

    name: bytes = ok(driver.cuDeviceGetName(128, handle))
    return {
        "name": name.split(b"\0")[0].decode(),
        "capability": (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        "uuid": str(uuid.UUID(bytes=bytes(ok(driver.cuDeviceGetUuid(handle)).bytes))),
        "driver": _driver_version(),
        "sms": attribute("MULTIPROCESSOR_COUNT"),
        "smem_bytes": attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        "l2_bytes": attribute("L2_CACHE_SIZE"),
        "memory_bytes": int(ok(driver.cuDeviceTotalMem(handle))),
        "clock_hz": attribute("CLOCK_RATE") * 1e3,
        "bandwidth": 1e12,
    }


def _driver_version() -> str:
    """The kernel driver's version, such as 580.65.06; "" where it doesn't say."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""
