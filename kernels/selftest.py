"""Is a variant right on this very device? Receives a `Runtime` and a variant, hands on why not, or None.

Two questions: does it compute what the API's error bound allows, in every type and layout that it is compiled
for; and do rows keep their bits alone, stacked, and from one variant to another of its class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kernels import cublas
from kernels.call import Compiled
from kernels.elementwise import NUMPY, Array
from kernels.group import GroupVariant
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.selector import Variant
from kernels.verify import check

if TYPE_CHECKING:
    from kernels.runtime import Runtime

PLAIN = Epilogue()
FULL = Epilogue(alpha=-0.5, beta=2.0, c=True, bias=BiasDim.N, activation=Activation.GELU)
# M, N, K, what follows the product, and blocks: many tiles a block with ragged edges and a ring that wraps; few
# rows; one row and a long K; rows that neither TMA nor a tile fits. 12 is a multiple of all sizes of cluster.
CASES = (
    (392, 520, 712, PLAIN, 12),
    (264, 392, 200, FULL, 12),
    (24, 264, 328, FULL, None),
    (1, 264, 1096, PLAIN, None),
    (131, 331, 205, FULL, None),
)
STACK_SHAPE = (520, 1096)  # N, K of the test of bits
STACK_ROWS = 300


def kinds() -> Iterator[Problem]:
    """Every combination of types and layouts that a function may be compiled for."""
    halves = (DType.FP16, DType.BF16)
    for dtype, trans_a, trans_b in itertools.product(halves, (False, True), (False, True)):
        for out_dtype in (dtype, DType.FP32):
            yield Problem(1, 1, 1, dtype=dtype, out_dtype=out_dtype, trans_a=trans_a, trans_b=trans_b)


def everything(
    runtime: Runtime,
    variant: Variant,
    *,
    only: str | None = None,
    alive: Callable[[], object] = lambda: None,
) -> str | None:
    """Why any function of the variant that is built is wrong, or None, in any way to write D that it has.

    only: the function of this name. `alive` is called after each product.
    """
    ran = False
    for kind, aligned in itertools.product(kinds(), (128, 1)):
        # rows that TMA can address, and rows of D that it can't
        problem = replace(kind, m=64, n=64, k=64, aligned=aligned)
        if not _takes(runtime, variant, problem):
            continue
        if only is not None and function_of(variant, problem) != only:
            continue
        ran = True
        because = failure(runtime, variant, problem, alive=alive)
        if because is None and variant in runtime.grouped:
            because = together(runtime, variant, problem)
        if because is not None:
            return because
    return None if ran else "none of its functions is built"


def together(runtime: Runtime, variant: GroupVariant, kind: Problem) -> str | None:
    """Why a grouped kernel is wrong for unlike products of these types and layouts in one launch, or None."""
    from kernels.operands import Operands

    group = []
    for number, (m, n, k, tail, _) in enumerate(CASES):
        problem = replace(kind, m=m, n=n, k=k, batch=1, lda=0, ldb=0, ldc=0, ldd=0, epilogue=tail)
        given = host_operands(problem, seed=number)
        group.append((problem, given, device_operands(runtime, problem, *given)))
    runtime.launch_group(variant, [(problem, Operands(*there)) for problem, _, there in group])
    for problem, given, there in group:
        verdict = check(problem, to_host(there[2][0]), *given)
        if not verdict.ok:
            return f"wrong at {problem.m}×{problem.n}×{problem.k} in a group: {verdict.detail}"
    return None


def failure(
    runtime: Runtime, variant: Variant, kind: Problem, *, alive: Callable[[], object] = lambda: None
) -> str | None:
    """Why the variant is wrong for problems of these types, layouts and alignment; None where it is right."""
    ran = False
    for m, n, k, tail, blocks in CASES:
        problem = replace(
            kind, m=m, n=n, k=k, batch=1, lda=0, ldb=0, ldc=0, ldd=0, epilogue=tail,
            a_broadcast=False, b_broadcast=False,
        )  # fmt: skip
        if not _takes(runtime, variant, problem):
            continue
        ran = True
        because = _wrong(runtime, variant, problem, blocks)
        alive()
        if because is not None:
            return because
    return None if ran else "no problem of the self-test fits it"


def function_of(variant: Variant, problem: Problem) -> str:
    """Name of the function that the variant runs for a problem, once packed."""
    from kernels.operands import as_packed

    return cast(Compiled, variant).function(as_packed(problem))


def _takes(runtime: Runtime, variant: Variant, problem: Problem) -> bool:
    """Whether the variant takes the problem, once packed, and its function is built."""
    from kernels.operands import as_packed

    fitting = as_packed(problem)
    return variant.unsupported(fitting, runtime.device) is None and runtime.has(variant, fitting)


def _wrong(runtime: Runtime, variant: Variant, problem: Problem, blocks: int | None) -> str | None:
    a, b, c, bias = host_operands(problem)
    got = launch(runtime, variant, problem, a, b, c, bias, blocks=blocks)
    verdict = check(problem, got, a, b, c, bias)
    if verdict.ok:
        return None
    return (
        f"wrong at {problem.m}×{problem.n}×{problem.k} {problem.dtype}>{problem.out_dtype}: {verdict.detail}"
    )


def host_operands(problem: Problem, seed: int = 11) -> tuple[Array, Array, Array | None, Array | None]:
    """Operands as stored, drawn from a normal distribution."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32).astype(NUMPY[problem.dtype])

    m, n, k, tail = problem.m, problem.n, problem.k, problem.epilogue
    return (
        draw(k, m) if problem.trans_a else draw(m, k),
        draw(n, k) if problem.trans_b else draw(k, n),
        draw(m, n) if tail.c else None,
        draw(n if tail.bias is BiasDim.N else m) if tail.bias is not None else None,
    )


def launch(
    runtime: Runtime,
    variant: Variant,
    problem: Problem,
    a: Array,
    b: Array,
    c: Array | None = None,
    bias: Array | None = None,
    *,
    blocks: int | None = None,
) -> Array:
    """D of one variant, computed on the device (by so many blocks), on the host."""
    from kernels.operands import Operands

    operands = Operands(*device_operands(runtime, problem, a, b, c, bias))
    if variant.name == cublas.NAME:
        cublas.compute(problem, operands.a, operands.b, operands.d, operands.c, operands.bias)
    else:
        runtime.launch(variant, problem, operands, blocks=blocks)
    return to_host(operands.d[0])


def device_operands(
    runtime: Runtime, problem: Problem, a: Array, b: Array, c: Array | None = None, bias: Array | None = None
) -> tuple[Any, Any, Any, Any, Any]:
    """Logical A, B, a D full of NaN, C and bias on the device, in the order of `runtime.Operands`."""
    import torch

    left, right = (to_device(x, runtime.place)[None] for x in (a, b))
    left = left.transpose(1, 2) if problem.trans_a else left
    right = right.transpose(1, 2) if problem.trans_b else right
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[problem.out_dtype]
    # rows of D that nobody wrote must not pass: NaN is no result of these operands
    d = torch.full((1, problem.m, problem.n), torch.nan, dtype=kind, device=runtime.place)
    third = None if c is None else to_device(c, runtime.place)[None]
    line = None if bias is None else to_device(bias, runtime.place)
    return left, right, d, third, line


def to_device(x: Array, place: str) -> Any:
    """A torch tensor of a numpy array; bfloat16 by its bits."""
    import torch

    if x.dtype == NUMPY[DType.BF16]:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16).to(place)
    return torch.from_numpy(x.copy()).to(place)


def to_host(x: Any) -> Array:
    """A numpy array of a torch tensor; bfloat16 by its bits."""
    import torch

    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        bits: Array = x.contiguous().view(torch.uint16).numpy()
        return bits.view(NUMPY[DType.BF16])
    array: Array = x.numpy()
    return array


def bits_problem(dtype: DType = DType.FP16, out_dtype: DType = DType.FP32) -> Problem:
    """What the test of bits computes."""
    n, k = STACK_SHAPE
    return Problem(STACK_ROWS, n, k, dtype=dtype, out_dtype=out_dtype, trans_b=True)


def bits_differ(runtime: Runtime, variant: Variant, like: Variant) -> str | None:
    """Why rows of the variant don't have the bits that its class promises; None where they do.

    `like` is the class's first variant. Rows alone, in stacks of other sizes and at other places are compared:
    in fp32, where no rounding hides a difference, or else in what both write; and with an epilogue too, whose
    sums a compiler may have contracted in one function and not in another.
    """
    compared = False
    for dtype, tail in itertools.product((DType.FP16, DType.BF16), (PLAIN, FULL)):
        wholes = [replace(bits_problem(dtype, out), epilogue=tail) for out in (DType.FP32, dtype)]
        whole = next((w for w in wholes if _takes(runtime, variant, w) and _takes(runtime, like, w)), None)
        if whole is None:
            continue
        compared = True
        a, b, c, bias = host_operands(whole)
        want = launch(runtime, like, whole, a, b, c, bias)
        for start, stop in ((0, STACK_ROWS), (0, 1), (17, 33), (130, 259)):
            part = replace(whole, m=stop - start)
            if not _takes(runtime, variant, part):
                continue
            rows = slice(start, stop)
            got = launch(runtime, variant, part, a[rows], b, None if c is None else c[rows], bias)
            if got.tobytes() != want[rows].tobytes():
                after = "the product" if tail is PLAIN else "an epilogue"
                return (
                    f"rows {start} to {stop} of {STACK_ROWS} have other bits than {like.name} gives them "
                    f"({dtype} to {whole.out_dtype}, after {after})"
                )
    return None if compared else f"nothing that {like.name} writes as well could be compared"
