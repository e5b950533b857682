"""The probe of tensor activity against a stand-in for NVML; tests/gpu holds it against the hardware."""

from __future__ import annotations

import threading

import pytest

from service.drivers import gpm
from service.drivers.gpm import Reading, TensorProbe
from tests.service.nvml_stand_in import Nvml


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


def test_each_reading_is_of_the_time_since_the_last_with_the_mean_clock() -> None:
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
