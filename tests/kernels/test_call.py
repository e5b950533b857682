"""The calling convention: codes round trip, strides of size-1 dimensions are usable by TMA."""

import itertools

import pytest

from kernels.call import Code, Strides, code_of
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem

HALVES = (None, DType.FP16, DType.BF16, DType.FP32)


def test_each_code_is_its_own() -> None:
    words = {
        Code(activation, c, bias, dim, d).pack()
        for activation, c, bias, d in itertools.product(Activation, HALVES, HALVES, HALVES[1:])
        for dim in (BiasDim if bias else (BiasDim.N,))
    }
    assert len(words) == 4 * 4 * 3 * (1 + 3 * 2)


def test_code_reads_c_only_where_beta_counts() -> None:
    with_c = Problem(8, 8, 8, epilogue=Epilogue(c=True, beta=0.5))
    assert code_of(with_c) >> 2 & 3 == 1
    assert code_of(with_c, c=DType.FP32) >> 2 & 3 == 3
    assert code_of(Problem(8, 8, 8, epilogue=Epilogue(c=True, beta=0.0))) >> 2 & 3 == 0


def test_code_of_bias_and_output() -> None:
    word = code_of(Problem(8, 8, 8, out_dtype=DType.BF16, epilogue=Epilogue(bias=BiasDim.M)))
    assert (word >> 4 & 3, word >> 6 & 1, word >> 7) == (1, 1, 2)


def test_a_type_without_a_code_is_refused() -> None:
    with pytest.raises(KeyError):
        Code(d=DType.FP64).pack()


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 40), (1, 40, 1), (3, 1, 64), (1, 24, 64)])
def test_normal_strides_suit_tma(shape: tuple[int, int, int], column_major: bool) -> None:
    batch, rows, columns = shape
    given = Strides(rows * columns, 1, rows) if column_major else Strides(rows * columns, columns, 1)
    strides = zip(shape, (given.batch, given.row, given.column), strict=True)
    odd = Strides(*(7 if size == 1 else stride for size, stride in strides))
    normal = odd.normal(batch, rows, columns, column_major=column_major)
    contiguous, other = (normal.row, normal.column) if column_major else (normal.column, normal.row)
    assert contiguous == 1
    for stride, size in ((other, columns if column_major else rows), (normal.batch, batch)):
        assert stride % 8 == 0 or size > 1
    span = (rows - 1) * normal.row + (columns - 1) * normal.column + 1
    assert batch > 1 or normal.batch >= span
