"""Counters become rates, batches become points, and what can't be read is None with a sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from service.messages import BatchDone, ItemDone, Operand, Report
from service.metrics import Metrics
from service.now import WINDOW, Now, point_of, quantile, rates, tensor, touched
from service.routes import inference
from tests.service.works import work


def test_rates_are_taken_between_samples() -> None:
    metrics, now = Metrics(), Now()
    assert now.sample(metrics, 100.0) is None
    assert rates(None)["flops_per_second"] is None
    metrics.flops.labels("step9").inc(4e9)
    metrics.kernel_busy.labels("step9").inc(0.5)
    for _ in range(6):
        metrics.request("/gemm", 200, 0.01)
    metrics.request("/health/live", 200, 0.001)
    told = rates(now.sample(metrics, 102.0))
    assert told["window_seconds"] == 2.0
    assert told["flops_per_second"] == 2e9
    assert told["kernel_busy"] == 0.25
    assert told["gemms_per_second"] == 3.0
    assert told["requests_per_second"] == 3.5
    assert told["request"]["mean"] == pytest.approx(0.01)
    assert told["kernel"]["mean"] is None


def test_products_count_by_whichever_door_they_are_asked_for() -> None:
    metrics, now = Metrics(), Now()
    now.sample(metrics, 100.0)
    doors = (
        "/gemm",
        "local",
        *infers(),
        "grpc/ModelInfer",
        "grpc/ModelStreamInfer",
    )
    for number, route in enumerate(doors):
        metrics.request(route, 200, 0.01 * (number + 1))
    metrics.request("/tensors", 200, 1.0)
    told = rates(now.sample(metrics, 102.0))
    assert told["gemms_per_second"] == len(doors) / 2
    assert told["request"]["count"] == len(doors)
    assert told["request"]["mean"] == pytest.approx(0.01 * (len(doors) + 1) / 2)


def infers() -> list[str]:
    """Paths of /v2 by which products are asked for."""
    return [route.path for route in inference.router.routes if route.path.endswith("/infer")]  # type: ignore[attr-defined]


def test_the_window_moves_on_and_a_gap_empties_it() -> None:
    metrics, now = Metrics(), Now()
    for second in range(20):
        delta = now.sample(metrics, float(second))
    assert delta is not None
    assert WINDOW <= delta.seconds <= WINDOW + 1
    assert now.sample(metrics, 20 + 10 * WINDOW) is None


def test_two_watchers_share_samples() -> None:
    metrics, now = Metrics(), Now()
    for at in (0.0, 0.1, 0.2, 1.0, 1.1):
        now.sample(metrics, at)
    assert [sample.at for sample in now.samples] == [0.0, 1.0]


def test_quantiles_are_linear_within_a_bucket() -> None:
    buckets = {1.0: 0.0, 2.0: 10.0, 4.0: 10.0, math.inf: 20.0}
    assert quantile(0.25, buckets) == 1.5
    assert quantile(0.99, buckets) == 4.0
    assert quantile(0.5, {1.0: 0.0, math.inf: 0.0}) is None


def test_batch_sizes_stand_apart() -> None:
    metrics, now = Metrics(), Now()
    now.sample(metrics, 0.0)
    for size in (1, 1, 3):
        metrics.batched(size)
    sizes = rates(now.sample(metrics, 1.0))["batch"]["sizes"]
    assert sizes[:3] == [[1.0, 2.0], [2.0, 0.0], [4.0, 1.0]]
    assert sizes[-1][0] is None


def test_what_is_read_from_hardware_is_told_with_its_source() -> None:
    worker = {"index": 0, "device": {"arch": "sm_90a"}}
    read = tensor(worker, Report(tensor_active=0.81, tensor_source="nvml_gpm", sm_clock_mhz=1440.0))
    assert (read["active"], read["source"], read["sm_clock_mhz"]) == (0.81, "nvml_gpm", 1440.0)


def test_what_cannot_be_read_is_absent_and_says_why() -> None:
    gpu = {"index": 0, "device": {"arch": "sm_90a"}}
    assert tensor(gpu, Report(tensor_detail="NVML can't be loaded"))["detail"] == "NVML can't be loaded"
    assert tensor(gpu, None)["active"] is None
    assert "CPU" in tensor({"index": 0, "device": {"arch": "cpu"}}, Report())["detail"]
    assert "virtual" in tensor({"index": 0, "device": {"arch": "sm_100a", "virtual": True}}, None)["detail"]
    assert tensor({"index": 0, "device": None}, None)["detail"] == "no worker is ready"


def test_a_batch_is_a_point_and_shared_operands_count_once() -> None:
    first, second = work(), work()
    done = BatchDone(1, (ItemDone(1), ItemDone(2)), {"kernel": 0.1}, {"step9": 8e9}, {"step9": 0.05})
    point = point_of([first, second], done)
    assert point is not None
    assert (point["flops"], point["seconds"], point["requests"], point["variant"]) == (8e9, 0.05, 2, "step9")
    apart = replace(first, b=Operand(4096, 512, "fp32", (8, 16)), out=Operand(8192, 256, "fp32", (4, 16)))
    assert touched([apart]) == apart.nbytes
    assert touched([apart, apart]) == apart.nbytes
    assert point_of([first], BatchDone(1, (ItemDone(1),), {}, {}, {})) is None


def test_points_are_numbered_and_bounded() -> None:
    now = Now()
    done = BatchDone(1, (ItemDone(1),), {}, {"numpy": 1e6}, {"numpy": 1e-3})
    for _ in range(200):
        now.saw([work()], done)
    assert len(now.points) == 96
    assert now.points[-1]["id"] == 200
