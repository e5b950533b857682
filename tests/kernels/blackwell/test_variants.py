"""The Step 9 family as the selector sees it: reach, names, estimates."""

from dataclasses import replace

import pytest

from kernels.blackwell.tilings import BIG, BIG_DYNAMIC, SMALL, choices
from kernels.blackwell.variants import Variant, variants
from kernels.device import B200, H200
from kernels.problem import DType, Problem
from kernels.selector import choose

BUILT = {choice.name for choice in choices()}
PROBLEM = Problem(4096, 4096, 4096, trans_b=True)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("out", [DType.FP16, DType.BF16, DType.FP32])
@pytest.mark.parametrize("trans", [(a, b) for a in (False, True) for b in (False, True)])
def test_every_supported_problem_has_a_function(dtype: DType, out: DType, trans: tuple[bool, bool]) -> None:
    problem = replace(PROBLEM, dtype=dtype, out_dtype=out, trans_a=trans[0], trans_b=trans[1])
    taking = [v for v in variants() if v.unsupported(problem, B200) is None]
    assert {v.function(problem) for v in taking} <= BUILT
    assert any(v.plain for v in taking)
    assert (out in (dtype, DType.FP32)) == any(not v.plain for v in taking)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(PROBLEM, dtype=DType.FP32, out_dtype=DType.FP32), "inputs are 16-bit"),
        (replace(PROBLEM, out_dtype=DType.FP64), "16 bits or fp32"),
        (replace(PROBLEM, k=4095), "rows of A and B"),
        (replace(PROBLEM, n=4095), "rows of D"),
        (replace(PROBLEM, aligned=8), "start at 16 bytes"),
        (replace(PROBLEM, m=0), "nothing to multiply"),
        (replace(PROBLEM, m=2**31 - 8), "32-bit"),
    ],
)
def test_what_it_cannot_take_it_says(problem: Problem, reason: str) -> None:
    assert reason in (Variant(BIG).unsupported(problem, B200) or "")


def test_plain_stores_take_any_row_of_d() -> None:
    ragged = replace(PROBLEM, n=4095, ldd=4097, aligned=2)
    assert Variant(SMALL, plain=True).unsupported(ragged, B200) is None
    assert Variant(SMALL).unsupported(ragged, B200) is not None


def test_it_is_for_its_own_architectures() -> None:
    assert "sm_90a" in (Variant(BIG).unsupported(PROBLEM, H200) or "")
    assert Variant(BIG).unsupported(PROBLEM, replace(B200, arch="sm_103a")) is None


def test_the_large_tile_is_for_large_problems_and_the_small_one_for_small() -> None:
    def chosen(m: int, n: int, k: int) -> str:
        return choose(replace(PROBLEM, m=m, n=n, k=k), B200, variants=variants()).variant

    assert chosen(2048, 2048, 2048) == Variant(SMALL).name
    assert chosen(256, 8192, 8192) == Variant(SMALL).name
    big, small = Variant(BIG), Variant(SMALL)
    assert big.seconds(PROBLEM, B200) == pytest.approx(small.seconds(PROBLEM, B200), rel=0.1)


def test_an_estimate_is_never_faster_than_the_chip() -> None:
    for variant in variants():
        for size in (256, 1024, 4096, 16384):
            problem = replace(PROBLEM, m=size, n=size, k=size)
            peak = problem.flops / B200.peak_flops["fp16"]
            memory = (problem.bytes_read + problem.bytes_written) / B200.bandwidth
            assert variant.seconds(problem, B200) > max(peak, memory)


def test_all_add_in_one_order() -> None:
    assert len({v.order(PROBLEM) for v in variants()}) == 1


def test_a_group_of_tiles_is_about_square_and_fits_the_problem() -> None:
    assert Variant(BIG).raster(PROBLEM, B200) == 6
    assert Variant(SMALL).raster(PROBLEM, B200) == 9
    assert Variant(BIG_DYNAMIC).raster(replace(PROBLEM, m=600), B200) == 2
