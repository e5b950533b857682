"""Cycles of a GPU under load: what an SM counts of its own, and what NVML's performance monitoring counts.

The clock that NVML tells is the one that was set; what hardware makes of it under a power cap shows in counts only.
"""

from __future__ import annotations

import itertools
import time
from typing import Any


class CycleCounter:
    """The clock of an SM as it counts its own cycles, beside whatever else runs: one thread on a stream of its own."""

    CYCLES = 20_000_000  # about 10 to 16 ms

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self._running: tuple[Any, Any] | None = None
        #: MHz.
        self.clocks: list[float] = []

    def look(self) -> None:
        """Note the count that has ended, if one has, and begin the next."""
        torch: Any = self._torch
        if self._running is not None:
            begun, ended = self._running
            if not ended.query():
                return
            self.clocks.append(self.CYCLES / begun.elapsed_time(ended) / 1e3)
        self._running = begun, ended = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begun.record()
            torch.cuda._sleep(self.CYCLES)
            ended.record()


#: Metrics of NVML's performance monitoring that tell what the ratio is made of, by their numbers. Those from 248 on are
#: counts since the machine's start, which newer drivers have.
GPM = {
    "any_tensor": 5, "hmma": 7, "sm": 2, "sm_cycles_elapsed": 248, "sm_cycles_active": 249, "mma_cycles": 250,
    "hmma_cycles": 252,
}  # fmt: skip


def gpm_metrics(uuid: str, seconds: float = 0.3) -> dict[str, Any]:
    """Each metric of two stretches of so many seconds from now on, or why NVML refuses it."""
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        device = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        samples = [nvml.nvmlGpmSampleAlloc() for _ in range(3)]
        for number, sample in enumerate(samples):
            if number:
                time.sleep(seconds)
            nvml.nvmlGpmSampleGet(device, sample)
        found: dict[str, Any] = {"seconds": seconds}
        for name, metric in GPM.items():
            found[name] = [_gpm(nvml, metric, *pair) for pair in itertools.pairwise(samples)]
        for sample in samples:
            nvml.nvmlGpmSampleFree(sample)
        return found
    except nvml.NVMLError as error:
        return {"refused": str(error)}
    finally:
        nvml.nvmlShutdown()


def _gpm(nvml: Any, metric: int, before: Any, after: Any) -> float | str:
    query = nvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
    query.sample1, query.sample2 = before, after
    query.metrics[0].metricId = metric
    try:
        nvml.nvmlGpmMetricsGet(query)
    except nvml.NVMLError as error:
        return str(error)
    status = query.metrics[0].nvmlReturn
    return float(query.metrics[0].value) if status == nvml.NVML_SUCCESS else f"status {status}"
