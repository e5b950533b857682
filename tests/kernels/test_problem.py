"""A problem's epilogue as it is computed: factors in the compute type."""

from __future__ import annotations

import math

import pytest

from kernels.problem import DType, Epilogue, Problem

LARGEST = 3.4028234663852886e38  # fp32


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (0.1, 0.10000000149011612),
        (1e39, math.inf),
        (-1e39, -math.inf),
        (3.4028235e38, LARGEST),
        (1e-46, 0.0),
        (math.inf, math.inf),
    ],
)
@pytest.mark.parametrize("dtype", list(DType))
def test_alpha_and_beta_are_rounded_to_the_compute_type(dtype: DType, given: float, computed: float) -> None:
    tail = Problem(4, 4, 4, dtype=dtype, epilogue=Epilogue(given, given, True)).epilogue
    wanted = given if dtype is DType.FP64 else computed
    assert (tail.alpha, tail.beta) == (wanted, wanted)
    assert tail.reads_ab == tail.reads_c == (wanted != 0)


def test_nan_stays_nan() -> None:
    tail = Problem(4, 4, 4, epilogue=Epilogue(math.nan, math.nan, True)).epilogue
    assert math.isnan(tail.alpha)
    assert math.isnan(tail.beta)


def test_without_k_alpha_is_zero_and_beta_stays() -> None:
    assert Problem(4, 4, 0, epilogue=Epilogue(math.inf, 2.0, True)).epilogue == Epilogue(0.0, 2.0, True)
