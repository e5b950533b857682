"""The estimate by datasheet: what counts, over which time, and on which devices it is there at all."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from kernels.device import H200, virtual
from service.batch import Work
from service.messages import Operand, Params
from service.metrics import Metrics
from service.ratio import WINDOW, FlopsRatio, ideal_seconds, peaks


def work(dtype: str = "fp16", precision: str = "ieee") -> Work:
    """A product of 1024³."""
    part = Operand(0, 1 << 21, dtype, (1024, 1024))
    return Work(id=1, a=part, b=part, out=part, params=Params(dtype, precision=precision))


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({}, True),
        ({"rates": "clocks"}, False),
        ({"arch": "cpu", "rates": "measured"}, False),
        ({"virtual": True}, False),
    ],
)
def test_only_a_known_datasheet_counts(changes: dict[str, Any], known: bool) -> None:
    assert bool(peaks(asdict(H200) | changes)) is known
    assert not peaks(asdict(virtual("sm_100a")))
    assert not peaks({})


def test_each_type_is_held_against_its_own_peak() -> None:
    peak = peaks(asdict(H200))
    flops = 2 * 1024**3
    assert ideal_seconds([work()], peak) == pytest.approx(flops / 989e12)
    assert ideal_seconds([work("fp32")], peak) == pytest.approx(flops / 67e12)
    assert ideal_seconds([work("fp32", "tf32")], peak) == pytest.approx(flops / 494e12)
    assert ideal_seconds([work(), work("fp8")], peak) == pytest.approx(
        flops / 989e12
    )  # of that none is stated


def test_the_ratio_is_of_the_last_seconds_and_of_each_gpu() -> None:
    ratio = FlopsRatio()
    ratio.ended("0", 0.0, 3.0)  # nobody knows this GPU yet
    ratio.known("0", True)
    ratio.known("1", True)
    assert ratio.read(1.0) == {"0": 0.0, "1": 0.0}
    ratio.ended("0", 1.0, WINDOW / 4)
    ratio.ended("0", 2.0, WINDOW / 4)
    assert ratio.read(2.0) == {"0": 0.5, "1": 0.0}
    assert ratio.read(1.5 + WINDOW) == {"0": 0.25, "1": 0.0}
    assert ratio.read(3.0 + WINDOW) == {"0": 0.0, "1": 0.0}
    ratio.known("0", False)  # a worker came back on another device
    assert ratio.read(1.0) == {"1": 0.0}


def test_its_name_is_its_own() -> None:
    metrics = Metrics()
    metrics.live("gemm_flops_ratio", "An estimate.", lambda: {"0": 0.5}, "gpu", peak="datasheet")
    text = metrics.exposition()[0].decode()
    assert 'gemm_flops_ratio{gpu="0",peak="datasheet"} 0.5' in text
    assert "gemm_tensor_active_ratio{" not in text
