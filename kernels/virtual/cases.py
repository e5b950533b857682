"""What is checked on the virtual GPU: receives an architecture and steps, hands on functions with problems for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from kernels import device, family, ladder
from kernels.call import Compiled
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem
from kernels.selector import Variant
from kernels.virtual.subject import Case

LADDER_STEPS = range(1, 9)
Kind = tuple[DType, bool, bool, DType]  # type, A and B transposed, type of D
Shape = tuple[int, int, int]  # M, N, K

# Whole tiles, and ragged edges in every dimension (rows in multiples of 8 elements, as TMA needs).
SHAPES: dict[int, tuple[Shape, ...]] = {
    1: ((128, 128, 64), (72, 104, 40)),
    2: ((128, 128, 256), (72, 104, 200)),
    3: ((256, 128, 128), (200, 136, 72)),
}
MORE: tuple[Shape, ...] = ((256, 256, 128), (200, 264, 328))
LARGE: tuple[Shape, ...] = ((512, 512, 256), (392, 520, 712))
SWEEP: tuple[Shape, ...] = ((264, 520, 328), (392, 264, 456))  # of all functions: smaller, for there are many
SMALL: Shape = (136, 264, 200)
BATCHED: Shape = (72, 136, 136)
TINY: Shape = (40, 72, 64)  # where each element costs hundreds of instructions
QUICK = 4  # functions of Step 9, where not all are asked for
HALVES = (DType.FP16, DType.BF16)
KINDS: tuple[Kind, ...] = tuple(
    (dtype, trans_a, trans_b, out)
    for dtype in HALVES
    for trans_a in (False, True)
    for trans_b in (False, True)
    for out in (dtype, DType.FP32)
)
FEW: tuple[Kind, ...] = (
    (DType.FP16, False, True, DType.FP16),
    (DType.FP16, True, False, DType.FP32),
    (DType.BF16, False, True, DType.BF16),
)
TAILS = (Epilogue(), Epilogue(alpha=-0.5, beta=2.0, c=True, bias=BiasDim.N))
MORE_TAILS = (
    Epilogue(alpha=0.0, beta=1.5, c=True),
    Epilogue(alpha=2.0, bias=BiasDim.M, activation=Activation.RELU),
    Epilogue(bias=BiasDim.N, activation=Activation.GELU),
    Epilogue(beta=-1.0, c=True, activation=Activation.SILU),
)


def cases(arch: str, steps: list[int], *, every: bool = False) -> Iterator[Case]:
    """Problems for each step; `every`: all functions of the Step 9 family, and all that may follow a product."""
    for number in steps:
        if number in LADDER_STEPS:
            yield from step_cases(arch, number)
        elif every:
            yield from function_cases(arch)
            yield from tail_cases(arch)
        else:
            yield from itertools.islice(function_cases(arch, LARGE, FEW, ragged=False), QUICK)


def step_cases(arch: str, number: int) -> Iterator[Case]:
    """A step of the ladder in both types."""
    rung = ladder.step(arch, number)
    for dtype in HALVES:
        for m, n, k in SHAPES.get(number, MORE):
            problem = Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_b=True)
            yield Case(number, rung.function(dtype), problem)


def function_cases(
    arch: str, shapes: tuple[Shape, ...] = SWEEP, kinds: Iterable[Kind] = KINDS, *, ragged: bool = True
) -> Iterator[Case]:
    """Cases of each function of the Step 9 family, shapes and epilogues in turn; `ragged`: by element too.

    A function that may store by TMA and by element has a case of either.
    """
    seen: set[tuple[str, bool]] = set()
    for variant in family.own(arch):
        for kind in kinds:
            for plain in (False, True) if ragged else (False,):
                shape, tail = shapes[len(seen) % len(shapes)], TAILS[len(seen) // 2 % 2]
                by_element = _case(arch, variant, _by_element(kind), tail)
                case = by_element if plain else _case(arch, variant, _problem(kind, shape), tail)
                if case is None:
                    continue
                if not plain and by_element is not None and by_element.function == case.function:
                    case = replace(
                        case, problem=replace(case.problem, epilogue=TAILS[0])
                    )  # or TMA wouldn't store
                if (case.function, plain) not in seen:
                    seen.add((case.function, plain))
                    yield case


def tail_cases(arch: str) -> Iterator[Case]:
    """Each variant and way to store D with all that may follow a product, and with several products at once."""
    seen: set[tuple[str, Problem]] = set()
    for variant in family.own(arch):
        for out, plain in ((DType.FP16, False), (DType.FP32, False), (DType.FP16, True)):
            kind = (DType.FP16, False, plain, out)
            for tail, batch in (*((tail, 1) for tail in MORE_TAILS), (TAILS[0], 3), (TAILS[1], 2)):
                slow = tail.activation in (Activation.GELU, Activation.SILU)
                shape = TINY if slow else BATCHED if batch > 1 else SMALL
                problem = _problem(kind, shape)
                if plain:  # D in rows that TMA doesn't take
                    problem = replace(problem, n=shape[1] + 3, aligned=2)
                case = _case(arch, variant, replace(problem, batch=batch), tail)
                if case is not None and (case.function, case.problem) not in seen:
                    seen.add((case.function, case.problem))
                    yield case


def _problem(kind: Kind, shape: Shape) -> Problem:
    dtype, trans_a, trans_b, out = kind
    m, n, k = shape
    return Problem(m, n, k, dtype=dtype, out_dtype=out, trans_a=trans_a, trans_b=trans_b, aligned=128)


def _by_element(kind: Kind) -> Problem:
    """A and B in rows that TMA takes, D in rows that it doesn't."""
    _, trans_a, trans_b, _ = kind
    return replace(_problem(kind, (136 if trans_a else 131, 331 if trans_b else 328, 208)), aligned=2)


def _case(arch: str, variant: Variant, problem: Problem, tail: Epilogue) -> Case | None:
    """None where the variant doesn't take it."""
    problem = replace(problem, epilogue=tail)
    if variant.unsupported(problem, device.virtual(arch)) is not None:
        return None
    return Case(9, cast(Compiled, variant).function(problem), problem, variant)
