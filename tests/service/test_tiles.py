"""Products in parts give the same D as whole ones, and every part is of a size that one launch takes."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.operands import Operands
from kernels.problem import BiasDim, DType, Epilogue, Problem, Unsupported
from service.drivers.tiles import tiles

DICE = np.random.default_rng(4)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (20, 8), (8, 20), (17, 25), (24, 16)])
@pytest.mark.parametrize("bias_dim", [BiasDim.M, BiasDim.N])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, True)])
def test_parts_make_the_whole(m: int, n: int, bias_dim: BiasDim, trans_a: bool, trans_b: bool) -> None:
    a, b = DICE.standard_normal((2, m, 5)), DICE.standard_normal((1, 5, n))
    c, bias = DICE.standard_normal((2, m, n)), DICE.standard_normal(m if bias_dim is BiasDim.M else n)
    d = np.full((2, m, n), np.nan)
    tail = Epilogue(1.0, 1.0, True, bias_dim)
    problem = Problem(m, n, 5, 2, DType.FP64, DType.FP64, trans_a, trans_b, tail, b_broadcast=True)
    seen = 0
    for part, views in tiles(problem, Operands(a, b, d, c, bias), largest=8):
        seen += 1
        assert max(part.m, part.n) <= 8
        assert views.d.shape == (2, part.m, part.n)
        assert (part.k, part.batch, part.epilogue) == (5, 2, tail)
        if seen > 1:
            assert (part.ldd, part.ldb, part.lda) == (n, 0 if trans_b else n, m if trans_a else 0)
        along = views.bias[:, None] if bias_dim is BiasDim.M else views.bias
        views.d[:] = views.a @ views.b + views.c + along
    assert seen == -(-m // 8) * -(-n // 8)
    np.testing.assert_allclose(d, a @ b + c + (bias[:, None] if bias_dim is BiasDim.M else bias))


def test_k_is_never_cut() -> None:
    operands = Operands(np.zeros((1, 2, 9)), np.zeros((1, 9, 2)), np.zeros((1, 2, 2)))
    with pytest.raises(Unsupported, match="K of 9"):
        list(tiles(Problem(2, 2, 9), operands, largest=8))
