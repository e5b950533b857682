"""The Step 9 family of sm_90a as the selector sees it: reach, names, estimates; no GPU, no compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kernels.cublas import Cublas
from kernels.device import B200, H200
from kernels.hopper.tilings import INPUTS, RESERVED_BYTES, SMEM_BYTES, Member, Tiling, grouped_function
from kernels.hopper.variants import Step9, candidates, grouped, variants
from kernels.problem import DType, Epilogue, Problem
from kernels.selector import choose, invariant_class

FAMILY = variants()
BASE = FAMILY[0]


def test_a_family_stays_under_two_hundred_functions_with_names_of_their_own() -> None:
    names = [name for variant in variants() for name, *_ in variant.functions()]
    names += [
        grouped_function(each.tiling, dtype, trans_a, trans_b)
        for each in grouped()
        for dtype in INPUTS
        for trans_a in (False, True)
        for trans_b in (False, True)
    ]
    assert len(names) == len(set(names)) < 200


def test_each_fits_shared_memory_with_at_least_three_stages() -> None:
    for variant in (*FAMILY, *candidates()):
        t = variant.tiling
        assert t.stages >= 3
        assert t.stages * t.stage_bytes + t.staging_bytes + 16 * t.stages < t.smem_bytes
        assert t.per_sm * (t.smem_bytes + RESERVED_BYTES) <= SMEM_BYTES + RESERVED_BYTES
        if t.parks:  # the parts are parked in the ring's place
            assert t.p * t.q * 4 <= t.stages * t.stage_bytes


def test_the_base_is_the_design() -> None:
    t = BASE.tiling
    assert (t.name, t.threads, t.cluster, t.stages, t.stage_bytes) == ("128x256-2x1", 384, 2, 4, 49_152)


@pytest.mark.parametrize(
    ("given", "because"),
    [
        (Problem(8, 8, 8, dtype=DType.FP32, out_dtype=DType.FP32), "inputs are fp16 or bf16"),
        (Problem(8, 8, 8, out_dtype=DType.FP64), "doesn't write fp64"),
        (Problem(8, 8, 0), "nothing to multiply"),
        (Problem(0, 8, 8), "nothing to multiply"),
        (Problem(8, 8, 12), "multiples of 16 bytes"),
        (Problem(8, 12, 8), "multiples of 16 bytes"),
        (Problem(2**31 - 1, 8, 8, trans_a=False), "32-bit"),
    ],
)
def test_what_no_variant_takes(given: Problem, because: str) -> None:
    for variant in FAMILY:
        told = variant.unsupported(given, H200)
        assert told is not None
        assert because in told


def test_it_is_for_hopper_only() -> None:
    assert BASE.unsupported(Problem(8, 8, 8), H200) is None
    assert "sm_100a" in str(BASE.unsupported(Problem(8, 8, 8), B200))


def test_rows_that_end_within_16_bytes_are_not_stored_by_tma() -> None:
    assert BASE.function(Problem(64, 64, 64)) == "step9_128x256_2x1_fp16_fp16_nn"
    ragged = Problem(64, 63, 64, ldb=64, ldd=64)
    assert BASE.function(ragged) == "step9_128x256_2x1_fp16_plain_nn"
    assert BASE.function(replace(ragged, n=64, ldd=65)) == "step9_128x256_2x1_fp16_plain_nn"
    assert BASE.function(Problem(64, 64, 64, aligned=8)) == "step9_128x256_2x1_fp16_plain_nn"
    other = next(v for v in FAMILY if not v.member.plain)
    assert "no function that writes fp16" in str(other.unsupported(ragged, H200))


def test_output_types_and_layouts_name_their_functions() -> None:
    bf16 = Problem(64, 64, 64, dtype=DType.BF16, out_dtype=DType.BF16, trans_a=True)
    assert BASE.function(bf16) == "step9_128x256_2x1_bf16_bf16_tn"
    assert (
        BASE.function(replace(bf16, out_dtype=DType.FP32, trans_b=True)) == "step9_128x256_2x1_bf16_fp32_tt"
    )
    assert BASE.function(replace(bf16, out_dtype=DType.FP16)) == "step9_128x256_2x1_bf16_plain_tn"


def test_every_supported_problem_has_a_listed_function() -> None:
    listed = {name for variant in FAMILY for name, *_ in variant.functions()}
    for variant in FAMILY:
        for out in (DType.FP16, DType.BF16, DType.FP32):
            for n in (8, 64, 100):
                problem = Problem(16, n, 64, out_dtype=out, ldb=104)
                if variant.unsupported(problem, H200) is None:
                    assert variant.function(problem) in listed


def test_every_16_bit_problem_is_taken_by_some_variant() -> None:
    for n in (1, 8, 63, 4096):
        for out in (DType.FP16, DType.BF16, DType.FP32):
            tail = Epilogue(alpha=0.5, beta=1.0, c=True)
            problem = Problem(5, n, 40, 3, out_dtype=out, ldb=-(-n // 8) * 8, epilogue=tail)
            assert any(v.unsupported(problem, H200) is None for v in FAMILY)


def test_estimates_are_sane() -> None:
    large = Problem(8192, 8192, 8192, batch_invariant=False)
    for variant in FAMILY:
        seconds = variant.seconds(large, H200)
        assert large.flops / seconds < 989e12
        assert variant.seconds(replace(large, k=16384), H200) > 1.3 * seconds
    assert choose(large, H200, variants=FAMILY).variant == "step9-128x256-2x1"
    narrow = choose(Problem(1, 8192, 8192, batch_invariant=False), H200, variants=FAMILY)
    assert narrow.variant == "step9-64x16-halfsm-swap"
    assert narrow.seconds > (8192 * 8192 * 2) / 4.8e12


@pytest.mark.parametrize(
    "shape",
    [(4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (16, 8192, 8192), (256, 8192, 8192)],
    ids=str,
)
@pytest.mark.parametrize("invariant", [True, False])
def test_own_kernels_run_where_they_are_meant_to(shape: tuple[int, int, int], invariant: bool) -> None:
    problem = Problem(*shape, batch_invariant=invariant)
    assert choose(problem, H200, variants=(*FAMILY, Cublas())).variant.startswith("step9")


@pytest.mark.parametrize(
    ("m", "n", "k", "best"),
    [
        (64, 8192, 8192, "64x64"),  # on an H200 2 % quicker than 64x80-2x1-swap
        (72, 8192, 8192, "64x80-2x1-swap"),  # 5 % quicker than 128x64
        (128, 8192, 8192, "64x128-2x1"),
        (160, 8192, 8192, "128x80-1x2-swap"),
        (512, 512, 512, "64x64"),  # 4 % quicker than 64x32-swap
        (128, 4096, 4096, "64x64"),  # 8 % quicker than 64x80-2x1-swap
    ],
)
def test_the_quickest_of_those_timed_for_few_rows_is_chosen(m: int, n: int, k: int, best: str) -> None:
    layer = Problem(m, n, k, trans_b=True, batch_invariant=False)
    assert choose(layer, H200, variants=FAMILY).variant == f"step9-{best}"


def test_the_class_of_equal_bits_follows_n_and_k_whatever_the_layout() -> None:
    """One row lies along K and across it at once: were the class another by layout, it would be another by M."""
    for n, k in itertools.product((64, 576, 1026, 4096, 16384), (512, 2304, 9216, 16306, 65536)):
        found = {
            invariant_class(
                Problem(1, n, k, trans_a=trans_a, trans_b=trans_b), H200, variants=(*FAMILY, Cublas())
            )
            for trans_a, trans_b in itertools.product((False, True), (False, True))
        }
        assert len(found) == 1, (n, k)


@pytest.mark.parametrize("m", [40, 72, 100, 129, 150, 180, 200])
def test_few_rows_past_a_tile_do_not_cost_another_tile(m: int) -> None:
    """What is estimated for M rows by a layer's weights is well below what a whole tile more would take."""
    layer = Problem(m, 8192, 8192, trans_b=True, batch_invariant=False)
    full = replace(layer, m=-(-m // 256) * 256)
    assert (
        choose(layer, H200, variants=FAMILY).seconds
        < (0.62 + 0.38 * m / 256) * choose(full, H200, variants=FAMILY).seconds
    )


def test_tiles_that_no_swizzle_divides_are_compiled_for_rows_along_k_alone() -> None:
    odd = [v for v in FAMILY if v.tiling.q not in (16, 32) and v.tiling.q % 64]
    assert {v.tiling.q for v in odd} == {80, 96, 112, 160}
    for variant in odd:
        assert variant.unsupported(Problem(150, 256, 256), H200) is None
        because = variant.unsupported(Problem(152, 256, 256, trans_a=True), H200)
        assert because == "it is not compiled for this layout of A and B"
    for bad in (Tiling(128, 80, swap=True), Tiling(64, 80, 2, consumers=1, swap=True), Tiling(256, 192, 2)):
        with pytest.raises(ValueError, match="64 at a time"):
            Member(bad)


def test_a_grid_has_no_more_blocks_than_its_waves_need() -> None:
    assert (
        BASE.blocks(Problem(4096, 4096, 4096), 132) == 128
    )  # 256 clusters' tiles: four waves of 64 clusters
    assert BASE.blocks(Problem(8192, 28672, 8192), 132) == 132  # 3,584: 55 waves of 66
    assert BASE.blocks(Problem(64, 64, 64), 132) == 2
    assert BASE.blocks(Problem(4096, 4096, 4096), 1) == 2


def test_the_selector_does_not_choose_what_no_gpu_has_timed() -> None:
    waiting = candidates()
    assert not {each.name for each in waiting} & {each.name for each in FAMILY}
    assert len({each.name for each in waiting}) == len(waiting)
    for each in waiting:
        names = [name for name, *_ in each.functions()]
        assert each.function(Problem(512, 512, 512)) in names
        assert "not compiled for this layout" in str(
            each.unsupported(Problem(512, 512, 512, trans_b=True), H200)
        )


@pytest.mark.parametrize(
    ("tiling", "box", "staged", "stages"),
    [
        (Tiling(128, 80, cluster_q=2, swap=True), 16, 8_192, 8),  # with whole boxes of 2,560 bytes a warp, 7
        (Tiling(128, 112, cluster_q=2, swap=True), 16, 8_192, 7),
        (Tiling(128, 96, cluster_q=2, swap=True), 96, 12_288, 7),
        (Tiling(128, 160, cluster_q=2, swap=True), 160, 20_480, 5),
        (Tiling(64, 80, cluster_p=2, consumers=1, swap=True), 80, 10_240, 12),
        (Tiling(64, 16, consumers=1, half_sm=True, swap=True), 16, 4_096, 10),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_what_leaves_transposed_is_staged_in_little_where_that_makes_room_for_a_stage(
    tiling: Tiling, box: int, staged: int, stages: int
) -> None:
    assert (tiling.box_columns, tiling.staged, tiling.stages) == (box, staged, stages)
    assert tiling in {each.tiling for each in FAMILY}


def test_a_tiling_that_swaps_is_quicker_where_tma_stores_what_it_computes() -> None:
    few = next(each for each in FAMILY if each.name == "step9-128x80-1x2-swap")
    whole = Problem(160, 1024, 512, trans_b=True)
    for slower in (replace(whole, ldd=1025), replace(whole, aligned=8), replace(whole, out_dtype=DType.FP32)):
        assert few.function(slower) == few.function(whole) == "step9_128x80_1x2_swap_fp16_plain_nt"
        assert few.seconds(slower, H200) > few.seconds(whole, H200)


def test_two_blocks_of_half_an_sm_fill_it_before_a_second_wave_begins() -> None:
    small = next(each for each in FAMILY if each.name == "step9-64x16-halfsm-swap")
    assert small.blocks(Problem(16, 16384, 1024), 264) == 256


@pytest.mark.parametrize(
    "bad",
    [
        {"p": 128, "q": 256, "lag": 4},  # the ring has four stages
        {"p": 128, "q": 128, "lag": 1, "pingpong": True},
        {"p": 64, "q": 64, "lag": 1, "consumers": 1},
    ],
)
def test_only_one_of_two_consumers_that_share_stages_lags(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lags"):
        Tiling(**bad)


def test_what_a_cluster_shares_is_loaded_in_whole_swizzled_lines() -> None:
    with pytest.raises(ValueError, match="swizzled lines"):
        Tiling(64, 48, cluster_p=4, consumers=1)  # 12 columns a block


@pytest.mark.parametrize("bad", [{"p": 96, "q": 64}, {"p": 128, "q": 100}, {"p": 256, "q": 256}])
def test_a_tiling_that_no_instruction_computes_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"no instruction|does not fit"):
        Tiling(**bad)


def test_split_blocks_take_one_tile_each() -> None:
    with pytest.raises(ValueError, match="one tile each"):
        Tiling(128, 128, split=2, pingpong=True)


def test_variants_are_values() -> None:
    assert Step9(Member(Tiling(128, 64))) == Step9(Member(Tiling(128, 64)))
    assert len(set(FAMILY)) == len(FAMILY)
