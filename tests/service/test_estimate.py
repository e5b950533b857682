"""Estimates: what small products take says nothing of large ones, nor the other way; noise moves them little."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from service.batch import Limits, Queue, Work
from service.estimate import FIRST_OVERHEAD, Estimate
from service.messages import Operand, Params
from tests.service.works import work

#: What a CPU says of itself while others use it too, as was seen on one: a fifth of what it then does.
MEASURED = {"fp32": 5e9, "fp64": 5e9, "tf32": 5e9}


def cube(n: int) -> Work:
    return work(m=n, k=n, n=n)


SMALL, SMALLISH, MIDDLE, LARGE = (cube(n) for n in (2, 64, 256, 2000))


def truly(work: Work) -> float:
    """Seconds that a product takes on the machine of these tests: half a millisecond, and 25 GFLOP/s."""
    return 5e-4 + work.flops / 25e9


def noisy(seed: int) -> Callable[[Work], float]:
    """The same on a machine that others use too, which now and then stops for half a second."""
    dice = random.Random(seed)
    return lambda work: truly(work) * dice.lognormvariate(0.0, 0.3) + (0.5 if dice.random() < 0.02 else 0.0)


def waiting(estimate: Estimate, *works: Work) -> float:
    """What gemm_queue_seconds says while these wait."""
    queue = Queue(Limits())
    for asked in works:
        each = work(m=asked.out.shape[0], k=asked.a.shape[1], n=asked.out.shape[1])
        each.seconds = estimate.seconds(each)
        queue.put(each)
    return queue.seconds


def test_it_starts_from_what_the_device_promises() -> None:
    estimate = Estimate({"fp32": 1e12, "tf32": 1e13}, 1e11)
    assert estimate.seconds(LARGE) == pytest.approx(FIRST_OVERHEAD + 1.6e10 / 1e12)
    tf32 = work(m=2000, k=2000, n=2000, params=Params("fp32", precision="tf32"))
    assert estimate.seconds(tf32) == pytest.approx(FIRST_OVERHEAD + 1.6e10 / 1e13)
    thin = work(m=1, k=10**5, n=10**4)  # reading B takes longer than computing with it
    assert estimate.seconds(thin) == pytest.approx(FIRST_OVERHEAD + thin.nbytes / 1e11)
    strange = work()
    strange.a = Operand(0, 0, "fp8", (4, 8))
    assert 0 < estimate.seconds(strange) < 2 * FIRST_OVERHEAD


def test_it_comes_closer_to_what_was_seen() -> None:
    estimate = Estimate({"fp32": 1e12}, 1e11)
    for _ in range(40):
        estimate.learn([MIDDLE], 0.004)
    assert estimate.seconds(MIDDLE) == pytest.approx(0.004, rel=0.05)


SEQUENCES = {
    "large after one and many small": ([LARGE, *[SMALL] * 60], [LARGE] * 2),
    "large after small ones that compute a little": ([LARGE, *[SMALLISH] * 200], [LARGE] * 2),
    "large after middle ones alone": ([MIDDLE] * 60, [LARGE] * 2),
    "small after many large": ([*[SMALL] * 3, *[LARGE] * 20], [SMALL] * 50),
    "small after large and a few": ([*[LARGE] * 5, *[SMALL] * 3], [SMALL] * 50),
    "middle after both": ([*[SMALL] * 60, *[LARGE] * 5], [MIDDLE] * 10),
    "all after all in turn": ([SMALL, LARGE, SMALLISH, MIDDLE] * 25, [SMALL, MIDDLE, LARGE]),
}


@pytest.mark.parametrize("seed", [None, *range(8)])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_what_waits_is_told_within_a_factor_of_two(sequence: str, seed: int | None) -> None:
    takes = truly if seed is None else noisy(seed)
    estimate = Estimate(MEASURED, 1e10)
    before, after = SEQUENCES[sequence]
    for each in before:
        estimate.learn([each], takes(each))
    ratio = waiting(estimate, *after) / sum(map(truly, after))
    assert 1 / 2.2 < ratio < 2.2


def test_a_batch_tells_of_each_of_its_products() -> None:
    estimate = Estimate(MEASURED, 1e10)
    for _ in range(40):
        estimate.learn([SMALL] * 64, 64 * truly(SMALL))
    assert estimate.seconds(SMALL) == pytest.approx(truly(SMALL), rel=0.05)


def test_one_type_says_nothing_of_another() -> None:
    estimate = Estimate(MEASURED, 1e10)
    fp64 = work(m=2000, k=2000, n=2000)
    fp64.a = Operand(0, 0, "fp64", (2000, 2000))
    before = estimate.seconds(fp64)
    for _ in range(20):
        estimate.learn([LARGE], truly(LARGE))
    assert estimate.seconds(fp64) == before


def test_a_first_product_that_warms_up_is_forgotten_soon() -> None:
    estimate = Estimate(MEASURED, 1e10)
    estimate.learn([SMALL], 2.0)
    for _ in range(3):
        estimate.learn([SMALL], truly(SMALL))
    assert estimate.seconds(SMALL) < 2 * truly(SMALL)
