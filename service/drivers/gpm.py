"""Tensor-core activity as the hardware counts it: receives a GPU, hands on a ratio with the SM clock beside it.

NVML's GPU performance monitoring (Hopper and later): the metric ANY_TENSOR_UTIL between two samples, which must
lie more than 100 ms apart. It is a share of cycles, not of time, so what goes with it is the mean of the clock over the
same time: a single look at its end would miss that the clock follows the load. A thread of its own reads both; nothing
here is computed from FLOPs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

log = logging.getLogger("gemm.worker")

SOURCE = "nvml_gpm"
#: Seconds between samples; NVML wants more than 0.1.
PERIOD = 0.5
#: Looks at the clock in that time.
LOOKS = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """Fraction of cycles (0 to 1) in which any tensor core was active, and the mean SM clock in MHz; or why not."""

    active: float | None
    sm_clock_mhz: float | None = None
    detail: str = ""


class TensorProbe:
    """Reads one GPU, or one MIG slice of it. `uuid` as the driver names it: "GPU-…", "MIG-…", or bare for a GPU."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._nvml = nvml
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tell: Callable[[Reading], None]) -> None:
        """Read every PERIOD seconds and tell; where it can't be read, tell once and why."""
        self._thread = threading.Thread(target=self._run, args=(tell,), name="gpm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self, tell: Callable[[Reading], None]) -> None:
        try:
            nvml = self._nvml or _load()
        except (ImportError, OSError) as error:
            tell(Reading(None, detail=f"NVML can't be loaded: {error}"))
            return
        try:
            nvml.nvmlInit()
            try:
                self._read(nvml, tell)
            finally:
                nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            tell(Reading(None, detail=f"tensor activity can't be read: {error}"))

    def _read(self, nvml: Any, tell: Callable[[Reading], None]) -> None:
        device = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        gpu, instance = device, None
        if nvml.nvmlDeviceIsMigDeviceHandle(device):
            gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
            instance = nvml.nvmlDeviceGetGpuInstanceId(device)
        if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            tell(Reading(None, detail="this GPU has no performance monitoring (it needs Hopper or later)"))
            return
        before, after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        try:
            self._sample(nvml, gpu, instance, before)
            while clocks := self._watch(nvml, gpu):
                self._sample(nvml, gpu, instance, after)
                tell(Reading(_ratio(nvml, before, after), fmean(clocks)))
                before, after = after, before
        finally:
            nvml.nvmlGpmSampleFree(before)
            nvml.nvmlGpmSampleFree(after)

    def _watch(self, nvml: Any, gpu: Any) -> list[float]:
        """The SM clock in MHz every now and then for PERIOD seconds; nothing where the thread is to end."""
        clocks = []
        for _ in range(LOOKS):
            if self._stop.wait(PERIOD / LOOKS):
                return []
            clocks.append(float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)))
        return clocks

    @staticmethod
    def _sample(nvml: Any, gpu: Any, instance: int | None, into: Any) -> None:
        if instance is None:
            nvml.nvmlGpmSampleGet(gpu, into)
        else:
            nvml.nvmlGpmMigSampleGet(gpu, instance, into)


def _ratio(nvml: Any, before: Any, after: Any) -> float:
    query = nvml.c_nvmlGpmMetricsGet_t()
    query.version = nvml.NVML_GPM_METRICS_GET_VERSION
    query.numMetrics = 1
    query.sample1, query.sample2 = before, after
    query.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
    nvml.nvmlGpmMetricsGet(query)
    if query.metrics[0].nvmlReturn != nvml.NVML_SUCCESS:
        raise nvml.NVMLError(query.metrics[0].nvmlReturn)
    return min(max(float(query.metrics[0].value) / 100.0, 0.0), 1.0)


def _load() -> Any:
    import pynvml

    return pynvml
