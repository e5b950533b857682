"""Device descriptions: what is measured on this CPU, and the datasheets."""

from __future__ import annotations

import pytest

from kernels import device
from kernels.device import B200, H200, describe_cpu, describe_cuda, virtual


def test_cpu_is_described_plausibly() -> None:
    describe_cpu.cache_clear()
    cpu = describe_cpu()
    assert cpu.arch == "cpu"
    assert cpu.name
    assert cpu.sms >= 1
    assert 1e8 < cpu.bandwidth < 1e13
    assert 1e8 < cpu.peak_flops["fp64"] < 1e14
    assert describe_cpu() is cpu


@pytest.mark.parametrize(("chip", "per_clock"), [(H200, 4096), (B200, 8192)])
def test_datasheet_peaks_follow_from_units_and_clock(chip: device.Device, per_clock: int) -> None:
    at_boost = chip.sms * per_clock * chip.clock_hz
    assert 0.85 * at_boost < chip.peak_flops["fp16"] < at_boost


def test_a_virtual_chip_says_so() -> None:
    chip = virtual("sm_100a")
    assert chip.virtual
    assert chip.sms == B200.sms
    assert chip.key != B200.key


@pytest.mark.parametrize("sms", [132, 66])
def test_a_part_of_a_chip_has_its_share(monkeypatch: pytest.MonkeyPatch, sms: int) -> None:
    def seen(_index: int) -> dict[str, object]:
        return {
            "name": "NVIDIA H200 MIG", "capability": (9, 0), "uuid": "u", "driver": "d", "sms": sms,
            "smem_bytes": 232_448, "l2_bytes": 1, "memory_bytes": 2, "clock_hz": 1.98e9, "bandwidth": 1e12,
        }  # fmt: skip

    monkeypatch.setattr(device, "_by_torch", seen)
    monkeypatch.setattr(device, "_by_bindings", seen)
    part = describe_cuda()
    assert part.arch == "sm_90a"
    assert part.peak_flops["fp16"] == pytest.approx(H200.peak_flops["fp16"] * sms / 132)
    assert part.bandwidth == pytest.approx(H200.bandwidth * sms / 132)


@pytest.mark.gpu
def test_both_ways_describe_the_gpu_alike() -> None:
    import torch

    assert torch.cuda.is_available()
    one, two = device._by_torch(0), device._by_bindings(0)
    for name in ("name", "capability", "uuid", "sms", "smem_bytes", "l2_bytes"):
        assert one[name] == two[name], name
