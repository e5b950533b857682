"""NVML as the probe of tensor activity sees it: a GPU whose samples count up at a steady rate."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any


class Error(Exception):
    """What NVML answers instead."""


class Nvml(SimpleNamespace):
    """A GPU whose samples count up; the metric is the difference of two in per cent."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 0, 1, 1, 5
    NVMLError = Error

    def __init__(
        self,
        *,
        mig: bool = False,
        supported: bool = True,
        status: int = 0,
        uuid: str = "GPU-1",
        percent: float = 25.0,
    ) -> None:
        super().__init__(
            mig=mig,
            supported=supported,
            status=status,
            uuid=uuid,
            percent=percent,
            clock=0.0,
            freed=0,
            down=0,
            instances=[],
            clocks=itertools.cycle((1400, 1420)),
        )

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.down += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise Error("Not Found")
        return "device"

    def nvmlDeviceIsMigDeviceHandle(self, device: str) -> bool:
        return self.mig

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, device: str) -> str:
        return "parent"

    def nvmlDeviceGetGpuInstanceId(self, device: str) -> int:
        return 7

    def nvmlGpmQueryDeviceSupport(self, device: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> Any:
        return SimpleNamespace(at=0.0)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1

    def nvmlGpmSampleGet(self, device: str, sample: Any) -> None:
        self.clock += self.percent
        sample.at = self.clock

    def nvmlGpmMigSampleGet(self, device: str, instance: int, sample: Any) -> None:
        self.instances.append((device, instance))
        self.nvmlGpmSampleGet(device, sample)

    def nvmlDeviceGetClockInfo(self, device: str, kind: int) -> int:
        clock: int = next(self.clocks)
        return clock

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.metrics[0].metricId == 5
        query.metrics[0].value = query.sample2.at - query.sample1.at
        query.metrics[0].nvmlReturn = self.status
