"""The grouped kernel on the virtual GPU with its race detector: unlike products, their epilogues, their bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from kernels import selftest  # noqa: E402
from kernels.operands import Operands  # noqa: E402
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem  # noqa: E402
from kernels.verify import check  # noqa: E402
from tests.kernels import samples  # noqa: E402

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

RELU = Epilogue(-0.5, 2.0, True, BiasDim.N, Activation.RELU)
SHAPES = (  # m, n, k, batch, what follows: many tiles, few rows, one element a tile, a batch, nothing but a bias
    (200, 136, 72, 1, Epilogue()),
    (24, 264, 328, 1, RELU),
    (1, 8, 8, 1, Epilogue()),
    (131, 72, 208, 2, Epilogue(alpha=0.3)),
    (64, 64, 64, 1, Epilogue(alpha=0.0, bias=BiasDim.M)),
    (16, 48, 205, 1, Epilogue()),  # K = 205: packed first
)


@pytest.fixture(scope="module")
def chip() -> Any:
    """A virtual GPU of four SMs with the sample's functions, under three schedules."""
    from kernels.virtual.runtime import VirtualRuntime

    return VirtualRuntime("sm_90a", root=samples.built(), detect=True, schedules=3)


def made(chip: Any, dtype: DType, trans_b: bool) -> list[tuple[Problem, tuple[Any, ...], Operands]]:
    """Problems, host operands, device operands."""
    group = []
    for number, (m, n, k, batch, tail) in enumerate(SHAPES):
        problem = Problem(
            m,
            n,
            k,
            dtype=dtype,
            out_dtype=DType.FP32 if number % 2 else dtype,
            trans_b=trans_b,
            epilogue=tail,
        )
        given = selftest.host_operands(problem, seed=number)
        operands = Operands(*selftest.device_operands(chip, problem, *given))
        if batch > 1:  # B is the same for all
            problem = Problem(
                m, n, k, batch, dtype, problem.out_dtype, trans_b=trans_b, epilogue=tail, b_broadcast=True
            )
            a = torch.cat([operands.a, operands.a.flip(1)])
            operands = Operands(a, operands.b, torch.full((batch, m, n), torch.nan))
        group.append((problem, given, operands))
    return group


@pytest.mark.parametrize(("number", "dtype", "trans_b"), [(0, DType.FP16, False), (1, DType.BF16, True)])
def test_unlike_products_in_one_launch(chip: Any, number: int, dtype: DType, trans_b: bool) -> None:
    group = made(chip, dtype, trans_b)
    chip.launch_group(chip.grouped[number], [(problem, operands) for problem, _, operands in group])
    for problem, (a, b, c, bias), operands in group:
        for layer, rows in enumerate((a, a[::-1])[: problem.batch]):
            alone = Problem(
                problem.m, problem.n, problem.k, 1, dtype, problem.out_dtype, trans_b=trans_b,
                epilogue=problem.epilogue,
            )  # fmt: skip
            verdict = check(alone, selftest.to_host(operands.d[layer]), rows, b, c, bias)
            assert verdict.ok, f"{problem.m}×{problem.n}×{problem.k}: {verdict.detail}"


def test_a_product_has_the_same_bits_alone_and_in_a_group(chip: Any) -> None:
    group = made(chip, DType.FP16, False)
    chip.launch_group(chip.grouped[0], [(problem, operands) for problem, _, operands in group])
    for problem, given, operands in group[:3]:
        alone = selftest.launch(chip, chip.grouped[0], problem, *given)
        assert alone.tobytes() == selftest.to_host(operands.d[0]).tobytes()


def test_small_products_share_a_launch_and_the_rest_run_alone(
    chip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which items are grouped is the runtime's choice; what it launches for the others is not looked at here."""
    group = [(problem, operands) for problem, _, operands in made(chip, DType.FP16, False)]
    alone: list[Problem] = []

    def run(problem: Problem, operands: Operands) -> Any:
        alone.append(problem)
        return chip.choose(problem)

    monkeypatch.setattr(chip, "run", run)
    monkeypatch.setattr(
        chip, "choose", lambda problem: type("Choice", (), {"seconds": 9e-6, "variant": "x"})()
    )
    large = Problem(8192, 8192, 8192, batch_invariant=False)
    choices = chip.run_group([*group, (large, Operands(None, None, None))][:-1])
    assert [c.variant for c in choices] == ["step9-grouped-128x128"] * len(group)
    assert not alone
    monkeypatch.setattr(
        chip, "choose", lambda problem: type("Choice", (), {"seconds": 1e-9, "variant": "x"})()
    )
    chip.run_group(group)
    assert len(alone) == len(group)
