"""Step 9 on a real GPU: every function by the API's error bound on random problems, and its bits."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from kernels.call import Strides, code_of
from kernels.device import describe_cuda
from kernels.hopper.variants import Step9, candidates, variants
from kernels.libraries import Libraries
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FAMILY = (*variants(), *candidates())
TORCH = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}
CASES = 24  # random problems a function
SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1}


class Bench:
    """Libraries of this GPU, and how a variant is launched on tensors."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.device = describe_cuda()
        self.libraries = Libraries(self.device.arch)

    def launch(
        self,
        variant: Step9,
        problem: Problem,
        a: Any,
        b: Any,
        d: Any,
        c: Any = None,
        bias: Any = None,
        ctas: int = 0,
    ) -> None:
        tail = problem.epilogue
        types = {value: key for key, value in TORCH.items()}
        code = code_of(
            problem,
            c=types[c.dtype] if c is not None else None,
            bias=types[bias.dtype] if bias is not None else None,
        )
        c_place = (0, 0, 0, 0)
        if tail.reads_c:
            c_place = (c.data_ptr(), c.stride(0) if c.shape[0] > 1 else 0, c.stride(1), c.stride(2))
        function = self.libraries.load(variant.function(problem))
        function(
            self.view(a), self.view(b), d.data_ptr(), *d.stride(), *c_place,
            bias.data_ptr() if bias is not None else 0, tail.alpha, tail.beta, code, problem.batch,
            ctas or self.device.sms, variant.raster(problem, self.device),
        )  # fmt: skip

    @staticmethod
    def view(x: Any) -> Any:
        by_column = x.stride(2) != 1 and x.stride(1) == 1
        strides = Strides(*x.stride()).normal(*x.shape, column_major=by_column)
        return x.as_strided(x.shape, (strides.batch, strides.row, strides.column))


@pytest.fixture(scope="module")
def bench() -> Bench:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    return Bench()


def matrix(layers: int, rows: int, columns: int, transposed: bool, kind: Any, pad: int = 0) -> Any:
    lines, length = (columns, rows) if transposed else (rows, columns)
    pitch = -(-length // 8) * 8 + pad
    room = torch.empty((layers, lines, pitch), device="cuda", dtype=kind).normal_()[..., :length]
    return room.transpose(1, 2) if transposed else room


def bound(problem: Problem, a: Any, b: Any, c: Any, bias: Any, kind: Any) -> tuple[Any, Any]:
    """D in fp64 and the error allowed at each element."""
    tail = problem.epilogue
    value, scale = torch.zeros((), device="cuda", dtype=torch.float64), 0.0
    if tail.alpha:
        value = tail.alpha * (a.double() @ b.double())
        scale = (problem.k / 16 + 4) * abs(tail.alpha) * (a.double().abs() @ b.double().abs())
    if tail.reads_c:
        value, scale = value + tail.beta * c.double(), scale + 4 * (tail.beta * c.double()).abs()
    if bias is not None:
        line = bias.double()[:, None] if tail.bias is BiasDim.M else bias.double()
        value, scale = value + line, scale + 4 * line.abs()
    shape = (problem.batch, problem.m, problem.n)
    value = value.expand(shape)
    allowed = 2.0**-22 * (scale if torch.is_tensor(scale) else torch.zeros_like(value)).expand(shape)
    if tail.activation is not Activation.NONE:
        allowed = SLOPE[tail.activation] * (allowed + ulp(value, torch.float32) / 2)
        apply = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}
        value = apply[tail.activation](value)
        allowed = allowed + ulp(value, kind)
    return value, allowed + ulp(value, kind) / 2 + 2.0**-140


def ulp(value: Any, kind: Any) -> Any:
    info = torch.finfo(kind)
    finite = torch.nan_to_num(value, nan=1.0, posinf=1.0, neginf=1.0).abs().clamp(min=info.smallest_normal)
    return torch.exp2(torch.frexp(finite)[1] - 1.0) * info.eps


def drawn(
    dice: random.Random, variant: Step9, name: str, dtype: DType, out: DType | None, layout: str
) -> Problem:
    """A problem that the very function takes."""
    t = variant.tiling
    rows = dice.randint(1, t.q * 2 + 5 if t.swap else 700)
    plain = out is None
    result = dice.choice(list(TORCH)) if plain else out
    columns = dice.randint(1, 900)
    columns = columns if plain else -(-columns // 8) * 8
    tail = Epilogue()
    if dice.random() < 0.6:
        tail = Epilogue(
            alpha=dice.choice([1.0, 0.5, -2.0, 0.0]),
            beta=dice.choice([1.0, -0.5, 0.0]),
            c=dice.random() < 0.6,
            bias=dice.choice([None, BiasDim.N, BiasDim.M]),
            activation=dice.choice(list(Activation)),
        )
    problem = Problem(
        rows, columns, dice.choice([1, 8, 63, 64, 65, 200, 512, 1000, 2049]), dice.choice([1, 1, 2, 3]),
        dtype=dtype, out_dtype=result, trans_a=layout[0] == "t", trans_b=layout[1] == "t", epilogue=tail,
    )  # fmt: skip
    if plain:
        problem = replace(problem, ldd=columns + dice.choice([0, 1, 3]), aligned=2)
    lda, ldb, _, _ = problem.leading
    problem = replace(problem, lda=-(-lda // 8) * 8, ldb=-(-ldb // 8) * 8)
    assert variant.function(problem) == name
    return problem


@pytest.mark.parametrize("variant", FAMILY, ids=lambda v: v.name)
def test_random_problems(bench: Bench, variant: Step9) -> None:
    built = [each for each in variant.functions() if each[0] in bench.libraries.manifest.functions]
    assert built, "python -m kernels build --arch sm_90a"
    for name, dtype, out, trans_a, trans_b in built:
        dice = random.Random(name)
        for _ in range(CASES):
            problem = drawn(
                dice, variant, name, dtype, out, ("t" if trans_a else "n") + ("t" if trans_b else "n")
            )
            kind, tail = TORCH[problem.out_dtype], problem.epilogue
            shape = (problem.batch, problem.m, problem.n)
            a = matrix(
                dice.choice([1, problem.batch]),
                problem.m,
                problem.k,
                trans_a,
                TORCH[dtype],
                dice.choice([0, 8]),
            )
            b = matrix(
                dice.choice([1, problem.batch]),
                problem.k,
                problem.n,
                trans_b,
                TORCH[dtype],
                dice.choice([0, 8]),
            )
            if dice.random() < 0.1:
                a[0, 0, 0], b[0, 0, 0] = math.inf, math.nan
            c = bias = None
            if tail.reads_c:
                c = torch.randn((dice.choice([1, problem.batch]), *shape[1:]), device="cuda").to(
                    dice.choice(list(TORCH.values()))
                )
            if tail.bias is not None:
                length = problem.m if tail.bias is BiasDim.M else problem.n
                bias = torch.randn(length, device="cuda").to(dice.choice(list(TORCH.values())))
            pitch = problem.leading[3]
            room = torch.full((problem.batch, problem.m + 1, pitch), -77.0, device="cuda", dtype=kind)
            d = room[:, : problem.m, : problem.n]
            d.fill_(math.nan)
            cluster = variant.tiling.cluster
            bench.launch(variant, problem, a, b, d, c, bias, ctas=dice.choice([0, cluster, 4 * cluster]))
            torch.cuda.synchronize()
            value, allowed = bound(problem, a, b, c, bias, kind)
            got = d.double()
            same = torch.where(
                value.isfinite(),
                (got - value).abs() <= allowed,
                (got == value) | (got.isnan() & value.isnan()),
            )
            # beyond the largest number of the type, infinity is right
            top = torch.finfo(kind).max
            same |= got.isinf() & (value.abs() + allowed >= top)
            assert bool(same.all()), (
                f"{name} {problem}: {int((~same).sum())} of {same.numel()} elements are wrong"
            )
            assert bool((room[:, problem.m :] == -77).all()), f"{name} {problem}: wrote past the last row"
            assert bool((room[:, :, problem.n :] == -77).all()), (
                f"{name} {problem}: wrote past the end of rows"
            )


def test_bits_depend_on_nothing_but_the_order_along_k(bench: Bench) -> None:
    """Variants of one class, stacks of any size and repeats give equal bits."""
    n, k = 1000, 1096
    b = matrix(1, k, n, False, torch.float16)
    whole = matrix(1, 300, k, False, torch.float16)
    first: dict[str | None, Any] = {}
    for variant in FAMILY:
        for rows in (300, 1, 2, 7, 16, 63, 64, 65, 128, 129, 200):
            problem = Problem(rows, n, k)
            if variant.unsupported(problem, bench.device):
                continue
            d = torch.full((1, rows, n), math.nan, device="cuda", dtype=torch.float16)
            bench.launch(variant, problem, whole[:, :rows], b, d)
            wanted = first.setdefault(variant.order(problem), d)
            assert torch.equal(d, wanted[:, :rows]), f"{variant.name} at {rows} rows"
    assert set(first) == {v.order(Problem(1, n, k)) for v in FAMILY}


@pytest.mark.parametrize("variant", FAMILY, ids=lambda v: v.name)
def test_a_thousand_repeats_are_equal(bench: Bench, variant: Step9) -> None:
    problem = Problem(777 if not variant.tiling.swap else variant.tiling.q, 1544, 2072)
    a = matrix(1, problem.m, problem.k, False, torch.float16)
    b = matrix(1, problem.k, problem.n, False, torch.float16)
    outs = [
        torch.full((1, problem.m, problem.n), math.nan, device="cuda", dtype=torch.float16) for _ in range(2)
    ]
    bench.launch(variant, problem, a, b, outs[0])
    different = torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(1000):
        if i % 50 == 0:
            outs[1].fill_(math.nan)
        bench.launch(variant, problem, a, b, outs[1])
        different += (outs[0] != outs[1]).sum()
    assert int(different) == 0
