"""The grouped kernel on a real GPU: hundreds of unlike products a launch, through the public call."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kernels
from kernels import selftest
from kernels.hopper.variants import grouped

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gpu() -> Any:
    from kernels.runtime import runtime

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    found = runtime(0)
    if any(each.name in found.barred for each in found.grouped):
        pytest.skip("the grouped kernel is not built")
    return found


@pytest.mark.parametrize("variant", grouped(), ids=lambda v: v.name)
def test_every_function_is_right_alone_and_together(gpu: Any, variant: Any) -> None:
    assert selftest.everything(gpu, variant) is None


def products(dtype: Any, count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """A and B of random shapes from 1 to a few hundred, some transposed, some that must be packed first."""
    draw = random.Random(seed)
    a, b = [], []
    for _ in range(count):
        m, n, k = draw.randint(1, 400), draw.randint(1, 700), draw.choice((draw.randint(1, 900), 512, 64))
        a.append(torch.randn(m, k, device="cuda", dtype=dtype))
        b.append(torch.randn(k, n, device="cuda", dtype=dtype))
        if draw.random() < 0.5:
            b[-1] = torch.randn(n, k, device="cuda", dtype=dtype).T
    return a, b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_unlike_shapes_in_one_call(gpu: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    launch = type(gpu).launch_group

    def counted(self: Any, variant: Any, items: Any, **more: Any) -> None:
        groups.append(len(items))
        launch(self, variant, items, **more)

    monkeypatch.setattr(type(gpu), "launch_group", counted)
    for seed in range(5):
        a, b = products(dtype, 200, seed)
        bias = [torch.randn(y.shape[1], device="cuda", dtype=dtype) for y in b]
        found = kernels.gemm_grouped(a, b, bias=bias, activation="relu", out_dtype=torch.float32)
        for x, y, z, d in zip(a, b, bias, found, strict=True):
            want = torch.relu(x.double() @ y.double() + z.double())
            bound = (
                (x.double().abs() @ y.double().abs() + z.double().abs()) * 2.0**-22 * (x.shape[1] / 16 + 8)
            )
            assert bool(((d.double() - want).abs() <= bound + 1e-30).all())
    assert sum(groups) >= 900  # nearly all of them shared launches


def test_a_thousand_repeats_have_equal_bits(gpu: Any) -> None:
    a, b = products(torch.float16, 24, 7)
    want = kernels.gemm_grouped(a, b)
    for _ in range(1000):
        found = kernels.gemm_grouped(a, b)
        assert all(torch.equal(x, y) for x, y in zip(want, found, strict=True))


def test_alone_and_in_a_group_the_bits_are_the_same(gpu: Any) -> None:
    a, b = products(torch.bfloat16, 100, 9)
    for x, y, d in zip(a, b, kernels.gemm_grouped(a, b), strict=True):
        assert torch.equal(d, kernels.gemm(x, y))


def test_while_a_graph_is_captured_each_is_a_launch_of_its_own(gpu: Any) -> None:
    a, b = products(torch.float16, 8, 1)
    alone = [kernels.gemm(x, y) for x, y in zip(a, b, strict=True)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernels.gemm_grouped(a, b)
    for each in found:
        each.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(found, alone, strict=True):
        assert torch.equal(x, y)
