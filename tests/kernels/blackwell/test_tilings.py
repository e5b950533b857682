"""Sizes of the Step 9 family: what fits, and what the barriers of the two shapes expect."""

import pytest

from kernels.blackwell.tilings import BIG, BIG_DYNAMIC, SMALL, SMEM_BYTES, Tiling, choices


def test_the_large_tile_is_the_one_that_the_ladder_is_known_by() -> None:
    assert (BIG.tile_m, BIG.tile_n, BIG.depth, BIG.threads) == (512, 256, 4, 384)
    assert BIG.stage_bytes * 2 == 98_304
    assert BIG.accumulators == 1


def test_the_small_tile_has_an_accumulator_to_spare() -> None:
    assert (SMALL.tile_m, SMALL.tile_n, SMALL.threads, SMALL.accumulators) == (256, 256, 256, 2)


@pytest.mark.parametrize("tiling", [BIG, BIG_DYNAMIC, SMALL])
def test_it_fits_shared_memory(tiling: Tiling) -> None:
    assert tiling.smem_bytes <= SMEM_BYTES


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory"):
        Tiling(consumers=2, depth=5)
    with pytest.raises(ValueError, match="one or two consumers"):
        Tiling(consumers=3, depth=2)


def test_readers_of_an_answer() -> None:
    assert BIG_DYNAMIC.readers == 2 * (1 + 8) + 2 + 1


def test_names_are_unique_and_few() -> None:
    names = [choice.name for choice in choices()]
    assert len(names) == len(set(names)) == 56
