"""The whole way of kernels.gemm's runtime with real compiled kernels: choose, pack, call, on the virtual GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from kernels import family, selftest  # noqa: E402
from kernels.build import build  # noqa: E402
from kernels.operands import Operands, as_packed  # noqa: E402
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem  # noqa: E402
from kernels.verify import check  # noqa: E402
from tests.kernels import samples  # noqa: E402

pytestmark = [pytest.mark.ci, pytest.mark.timeout(900)]


CHIPS = {"sm_90a": "step9-64x64", "sm_100a": "step9-256x256-plain"}


@pytest.fixture(scope="module", params=CHIPS)
def chip(request: pytest.FixtureRequest) -> Any:
    """A virtual GPU with the smallest tiling that writes anything, and its packing kernel if there is one."""
    from kernels.virtual.runtime import VirtualRuntime

    arch, root = request.param, None
    if arch == "sm_90a":
        root = samples.built()
    else:
        for layout in ("kn", "kk", "mn"):
            build(arch, only=f"step9_256x256_{layout}_fp16_plain")
    own = [each for each in family.own(arch) if each.name == CHIPS[arch]]
    assert own
    return VirtualRuntime(arch, root=root, variants=own, detect=True)


@pytest.mark.parametrize("shape", [(130, 72, 136), (33, 21, 35), (1, 9, 70)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_any_layout_and_size(chip: Any, shape: tuple[int, int, int], layout: str) -> None:
    m, n, k = shape
    problem = Problem(
        m, n, k, out_dtype=DType.FP32, trans_a=layout[0] == "t", trans_b=layout[1] == "t", aligned=1,
        epilogue=Epilogue(-0.5, 2.0, True, BiasDim.N, Activation.GELU),
    )  # fmt: skip
    fitting = as_packed(problem)
    variant = chip.variants[0]
    assert variant.unsupported(fitting, chip.device) is None
    assert chip.choose(fitting).variant == variant.name
    a, b, c, bias = selftest.host_operands(problem)
    got = selftest.launch(chip, variant, problem, a, b, c, bias)
    verdict = check(problem, got, a, b, c, bias)
    assert verdict.ok, verdict.detail


def test_batch_broadcast_and_strided_out(chip: Any) -> None:
    a = torch.randn(3, 20, 40).half()
    b = torch.randn(1, 40, 24).half()
    room = torch.zeros(3, 20, 48).half()
    d = room[..., ::2]
    problem = Problem(20, 24, 40, 3, b_broadcast=True, aligned=1)
    choice = chip.run(problem, Operands(a, b, d))
    assert choice.variant == chip.variants[0].name
    assert check(problem, d.numpy(), a.numpy(), b.numpy()).ok
    assert not room[..., 1::2].any()


def test_rows_alone_and_stacked_have_equal_bits(chip: Any) -> None:
    variant = chip.variants[0]
    whole = Problem(70, 24, 200, out_dtype=DType.FP32, trans_b=True, aligned=1)
    a, b, _, _ = selftest.host_operands(whole)
    want = selftest.launch(chip, variant, whole, a, b)
    for start, stop in ((0, 1), (17, 33), (40, 70)):
        part = replace(whole, m=stop - start)
        assert selftest.launch(chip, variant, part, a[start:stop], b).tobytes() == want[start:stop].tobytes()
