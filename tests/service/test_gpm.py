"""The probe of tensor activity against a stand-in for NVML; tests/gpu holds it against the hardware."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from service.drivers import gpm
from service.drivers.gpm import Reading, TensorProbe


class Error(Exception):
    pass


class Nvml(SimpleNamespace):
    """A GPU whose samples count up; the metric is the difference of two in per cent."""

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 0, 1, 1, 5
    NVMLError = Error

    def __init__(self, *, mig: bool = False, supported: bool = True, status: int = 0) -> None:
        super().__init__(
            mig=mig, supported=supported, status=status, clock=0.0, freed=0, down=0, instances=[]
        )

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.down += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
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
        self.clock += 25.0
        sample.at = self.clock

    def nvmlGpmMigSampleGet(self, device: str, instance: int, sample: Any) -> None:
        self.instances.append((device, instance))
        self.nvmlGpmSampleGet(device, sample)

    def nvmlDeviceGetClockInfo(self, device: str, kind: int) -> int:
        return 1410

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, query: Any) -> None:
        assert query.metrics[0].metricId == 5
        query.metrics[0].value = query.sample2.at - query.sample1.at
        query.metrics[0].nvmlReturn = self.status


def readings(nvml: Nvml, count: int, uuid: str = "GPU-1") -> list[Reading]:
    probe = TensorProbe(uuid, nvml)
    got: list[Reading] = []
    enough = threading.Event()

    def tell(reading: Reading) -> None:
        got.append(reading)
        if len(got) >= count:
            enough.set()

    probe.start(tell)
    assert enough.wait(5)
    probe.stop()
    return got[:count]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpm, "PERIOD", 0.01)


def test_each_reading_is_of_the_time_since_the_last() -> None:
    nvml = Nvml()
    assert readings(nvml, 3) == [Reading(0.25, 1410.0)] * 3
    assert (nvml.freed, nvml.down) == (2, 1)


def test_a_mig_slice_is_read_by_its_instance() -> None:
    nvml = Nvml(mig=True)
    readings(nvml, 1)
    assert set(nvml.instances) == {("parent", 7)}


@pytest.mark.parametrize(
    ("nvml", "uuid", "words"),
    [
        (Nvml(supported=False), "GPU-1", "Hopper"),
        (Nvml(status=3), "GPU-1", "can't be read"),
        (Nvml(), "GPU-2", "Not Found"),
    ],
)
def test_what_cant_be_read_is_absent_with_the_reason(nvml: Nvml, uuid: str, words: str) -> None:
    (reading,) = readings(nvml, 1, uuid)
    assert reading.active is None
    assert words in reading.detail
