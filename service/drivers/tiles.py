"""A product larger than one launch takes: receives it, hands on the parts of D that are launched one after the other.

Libraries and kernels count rows and columns in 32 bits. K is never cut, so that each element keeps its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernels.operands import Operands
from kernels.problem import BiasDim, Problem, Unsupported

#: Most rows or columns of one launch, well below 2³¹ and a multiple of every tile.
LARGEST = 1 << 30


def tiles(problem: Problem, operands: Operands, largest: int = LARGEST) -> Iterator[tuple[Problem, Operands]]:
    """The parts, rows first. Operands are logical [layers, rows, columns] tensors. Raises Unsupported for K."""
    if max(problem.m, problem.n, problem.k) <= largest:
        yield problem, operands
        return
    if problem.k > largest:
        raise Unsupported(f"K of {problem.k} is above {largest}, the most of one launch")
    apart = replace(
        problem,
        lda=problem.m if problem.trans_a else 0,
        ldb=0 if problem.trans_b else problem.n,
        ldc=problem.n,
        ldd=problem.n,
    )
    for top in range(0, problem.m, largest):
        for left in range(0, problem.n, largest):
            rows, columns = slice(top, top + largest), slice(left, left + largest)
            part = Operands(
                operands.a[:, rows],
                operands.b[:, :, columns],
                operands.d[:, rows, columns],
                None if operands.c is None else operands.c[:, rows, columns],
                _bias(problem, operands, rows, columns),
            )
            m, n = part.d.shape[1:]
            yield replace(apart, m=m, n=n), part


def _bias(problem: Problem, operands: Operands, rows: slice, columns: slice) -> object:
    if operands.bias is None:
        return None
    return operands.bias[rows if problem.epilogue.bias is BiasDim.M else columns]
