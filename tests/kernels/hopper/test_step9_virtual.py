"""Step 9 on the virtual GPU with its race detector: multicast, ping-pong, split-K and the transposed form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from kernels import selftest
from kernels.hopper.boxes import EVICT_FIRST
from kernels.hopper.producer import EVICT_NORMAL
from kernels.hopper.variants import Step9, candidates, variants
from kernels.operands import Operands
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.verify import check
from kernels.virtual.report import Run
from tests.kernels import samples
from tests.kernels.samples.step9 import NAMES, OTHERS

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

SHARED, PINGPONG = NAMES[:2]
FEW_ROWS = "step9_128x80_1x2_swap_fp16_plain_nn"
WIDE, BF16, ALONE, SMALL = OTHERS[:4]
TAIL = Epilogue(alpha=-0.5, beta=2.0, c=True, bias=BiasDim.N)
# Whole tiles; edges in all three dimensions, more tiles than blocks, K past the ring.
WHOLE, RAGGED = Problem(256, 512, 256), Problem(264, 264, 328)
SCHEDULED = (
    (SHARED, WHOLE),
    (ALONE, replace(RAGGED, trans_b=True, epilogue=TAIL)),
    (PINGPONG, replace(RAGGED, epilogue=TAIL)),
    (WIDE, replace(RAGGED, trans_a=True, out_dtype=DType.FP32)),
    (FEW_ROWS, Problem(264, 264, 328)),
    (BF16, replace(RAGGED, trans_b=True, dtype=DType.BF16, out_dtype=DType.BF16, epilogue=TAIL)),
)


@pytest.fixture(scope="module")
def root() -> Path:
    """The sample, compiled."""
    return samples.built()


@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_right_and_free_of_races(root: Path, name: str, long: bool) -> None:
    variant = _variant(name)
    chip = _chip(root, variant, detect=True)
    rows = variant.tiling.q if variant.tiling.swap else 264
    # Shorter than the ring, and longer: a consumer lags, or writes into the ring what ping-pong has read, only there.
    k = 72 * variant.tiling.stages if long else 136
    problem = Problem(rows, 264, k)  # more tiles than blocks, and edges in all three
    assert variant.function(problem) == name
    a, b, c, bias = selftest.host_operands(problem)
    verdict = check(problem, selftest.launch(chip, variant, problem, a, b, c, bias), a, b, c, bias)
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize(("name", "problem"), SCHEDULED, ids=lambda x: getattr(x, "m", x))
def test_it_is_right_under_every_schedule(root: Path, name: str, problem: Problem) -> None:
    runs = _verified(root, name, problem)
    assert [run.schedule for run in runs] == ["late", "early", "random 1"]


@pytest.mark.parametrize("rows", [1, 23, 40, 57, 81, 112, 126, 145])
@pytest.mark.parametrize("name", [PINGPONG, FEW_ROWS, ALONE])
def test_an_edge_is_right_wherever_it_lies(root: Path, name: str, rows: int) -> None:
    """A tile that reaches past it is loaded in a box of another size: every size, in each way to share an operand."""
    variant = _variant(name)
    problem = Problem(rows, 72, 200) if name != ALONE else Problem(72, rows * 8, 200, trans_b=True)
    a, b, c, bias = selftest.host_operands(problem)
    verdict = check(
        problem,
        selftest.launch(_chip(root, variant, detect=True), variant, problem, a, b, c, bias),
        a,
        b,
        c,
        bias,
    )
    assert verdict.ok, verdict.detail


@pytest.mark.parametrize(
    ("problem", "first"),
    [
        (Problem(40, 192, 256), 192 * 256),  # one tile along M: B is read once
        (Problem(192, 40, 256), 192 * 256),  # one along N: A
        (Problem(64, 64, 256), 2 * 64 * 256),
        (Problem(192, 192, 256), 0),
        (Problem(40, 192, 256, 2), 2 * 192 * 256),
        (Problem(40, 192, 256, 2, b_broadcast=True), 0),
    ],
    ids=["B", "A", "both", "none", "B of each layer", "B of all layers"],
)
def test_what_one_tile_alone_reads_may_leave_l2_first(root: Path, problem: Problem, first: int) -> None:
    torch = pytest.importorskip("torch")
    variant, layers = _variant(SMALL), problem.batch
    problem = replace(problem, out_dtype=DType.FP32)
    assert variant.function(problem) == SMALL
    torch.manual_seed(5)
    a = torch.randn(layers, problem.m, problem.k).half()
    b = torch.randn(1 if problem.b_broadcast else layers, problem.k, problem.n).half()
    d = torch.full((layers, problem.m, problem.n), torch.nan)
    chip = _chip(root, variant, detect=True)
    chip.launch(variant, problem, Operands(a=a, b=b, d=d))
    torch.testing.assert_close(d, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    (run,) = chip.reports[-1].runs
    assert set(run.loaded) <= {EVICT_FIRST, EVICT_NORMAL}
    assert run.loaded[EVICT_FIRST] == first * 2


def test_what_blocks_share_names_no_policy(root: Path) -> None:
    for run in _verified(root, SHARED, Problem(256, 256, 64)):
        assert run.loaded == {0: 256 * 64 * 2, EVICT_FIRST: 256 * 64 * 2}  # B, and A of one tile along N


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("way", "by_tma"),
    [("whole", True), ("one row", True), ("odd rows", False), ("odd start", False), ("columns", False)],
)
def test_what_is_computed_transposed_leaves_by_tma_where_it_may(
    root: Path, way: str, by_tma: bool, layers: int
) -> None:
    torch = pytest.importorskip("torch")
    variant = _variant(FEW_ROWS)
    problem = Problem(1 if way == "one row" else 24, 72, 136, layers, epilogue=Epilogue(alpha=-0.5))
    torch.manual_seed(5)
    a, b = torch.randn(layers, problem.m, 136).half(), torch.randn(layers, 136, 72).half()
    room = torch.full((layers, problem.m, 80), torch.nan, dtype=torch.float16)
    d = room[:, :, :72]
    if way == "odd rows":
        d = torch.full((layers, problem.m, 73), torch.nan, dtype=torch.float16)[:, :, :72]
    elif way == "odd start":
        d = room[:, :, 4:76]
    elif way == "columns":
        d = torch.full((layers, 72, problem.m), torch.nan, dtype=torch.float16).transpose(1, 2)
    chip = _chip(root, variant, detect=True)
    chip.launch(variant, problem, Operands(a=a, b=b, d=d))
    torch.testing.assert_close(d.float(), -0.5 * (a.float() @ b.float()), rtol=1e-3, atol=1e-2)
    assert room[:, :, 76:].isnan().all()
    (run,) = chip.reports[-1].runs
    t = variant.tiling  # two blocks of two consumers; the box of a warp is its 16 columns of D
    assert run.stored == by_tma * layers * 2 * 2 * 4 * (16 * t.q * 2)


@pytest.mark.parametrize(
    "problem",
    [
        Problem(24, 72, 136, out_dtype=DType.FP32),
        Problem(24, 72, 136, epilogue=Epilogue(bias=BiasDim.N)),
        Problem(24, 72, 136, epilogue=TAIL),
    ],
    ids=["fp32", "bias", "all"],
)
def test_what_more_than_alpha_follows_leaves_by_element(root: Path, problem: Problem) -> None:
    assert [run.stored for run in _verified(root, FEW_ROWS, problem)] == [0, 0, 0]


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("bias", [BiasDim.M, BiasDim.N])
def test_tilings_of_one_order_along_k_have_equal_bits(
    root: Path, activation: Activation, bias: BiasDim
) -> None:
    problem = Problem(
        24, 72, 136, out_dtype=DType.FP16, epilogue=Epilogue(1.0 / 3.0, -0.7, True, bias, activation)
    )
    a, b, c, along = selftest.host_operands(problem)
    found = {}
    for name in NAMES:
        variant = _variant(name)
        if variant.order(problem) != "k16":
            continue
        chip = _chip(root, variant)
        found[name] = selftest.launch(chip, variant, problem, a, b, c, along).tobytes()
    assert len(found) >= 3
    assert len(set(found.values())) == 1


def _verified(root: Path, name: str, problem: Problem) -> list[Run]:
    """Its launches, right under every schedule."""
    from kernels.virtual.subject import Case, Subject

    variant = _variant(name)
    assert variant.function(problem) == name
    outcome = Subject("sm_90a", root).verify(Case(9, name, problem, variant))
    assert outcome.ok, outcome.text()
    assert not outcome.report.lints, "\n".join(map(str, outcome.report.lints))
    return outcome.report.runs


def _variant(name: str) -> Step9:
    return next(v for v in (*variants(), *candidates()) if name in {each[0] for each in v.functions()})


def _chip(root: Path, variant: Any, *, detect: bool = False) -> Any:
    from kernels.virtual.runtime import VirtualRuntime

    return VirtualRuntime("sm_90a", root=root, variants=[variant], detect=detect)
