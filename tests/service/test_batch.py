"""What is batched with what, in which order."""

from __future__ import annotations

import dataclasses

import pytest

from service.batch import Limits, Queue, Taken, Work
from service.messages import Params
from tests.service.works import work


def filled(*works: Work, limits: Limits | None = None) -> Queue:
    queue = Queue(limits or Limits())
    for each in works:
        queue.put(each)
    return queue


def test_requests_with_one_resident_b_are_stacked() -> None:
    works = [work(b="w@1", m=m) for m in (1, 2, 3)]
    queue = filled(*works)
    taken = queue.take()
    assert taken is not None
    assert taken.stacked
    assert list(taken.works) == works
    assert (queue.depth, queue.nbytes, queue.seconds) == (0, 0, 0.0)
    assert queue.take() is None


@pytest.mark.parametrize(
    "other",
    [
        {"b": "w@2"},
        {"b": ""},
        {"b": "w@1", "c": True},
        {"b": "w@1", "bias": ""},
        {"b": "w@1", "bias": "v@1"},
        {"b": "w@1", "k": 9},
        {"b": "w@1", "params": Params("fp16")},
        {"b": "w@1", "params": Params("fp32", alpha=2.0)},
        {"b": "w@1", "params": Params("fp32", trans_a=True)},
    ],
)
def test_unlike_requests_are_not_stacked(other: dict) -> None:
    first = work(b="w@1")
    taken = filled(first, work(**other), first_again := work(b="w@1")).take()
    assert taken is not None
    assert list(taken.works) == [first, first_again]


def test_a_resident_bias_along_n_is_stacked() -> None:
    taken = filled(work(b="w@1", bias="v@1"), work(b="w@1", bias="v@1")).take()
    assert taken is not None
    assert taken.stacked


def test_no_stack_where_bits_would_differ_unless_the_caller_does_not_mind() -> None:
    taken = filled(work(b="w@1"), work(b="w@1")).take(stacking=False)
    assert taken is not None
    assert not taken.stacked
    free = Params("fp32", batch_invariant=False)
    taken = filled(work(b="w@1", params=free), work(b="w@1", params=free)).take(stacking=False)
    assert taken is not None
    assert taken.stacked


def test_a_stack_is_bounded_in_requests_and_rows() -> None:
    queue = filled(*(work(b="w@1", m=4) for _ in range(10)), limits=Limits(requests=3, rows=100))
    assert [len(taken.works) for taken in iter(queue.take, None)] == [3, 3, 3, 1]
    queue = filled(*(work(b="w@1", m=4) for _ in range(10)), limits=Limits(requests=64, rows=17))
    assert [len(taken.works) for taken in iter(queue.take, None)] == [4, 4, 2]


def test_a_group_is_bounded_in_estimated_time_but_never_empty() -> None:
    queue = filled(*(work(seconds=s) for s in (0.004, 0.004, 9.0, 0.001)), limits=Limits(group_seconds=0.005))
    assert [len(taken.works) for taken in iter(queue.take, None)] == [1, 1, 1, 1]
    queue = filled(*(work(seconds=0.001) for _ in range(7)), limits=Limits(group_seconds=0.005))
    assert [len(taken.works) for taken in iter(queue.take, None)] == [5, 2]


def test_a_stack_takes_little_of_lower_priority_along() -> None:
    queue = Queue(Limits(group_seconds=0.005))
    high = work(b="ann/w@1", priority=1, seconds=1.0)
    equal = work(b="ann/w@1", priority=1, seconds=1.0)
    long = work(b="ann/w@1", priority=5, seconds=0.01)
    short = [work(b="ann/w@1", priority=5, seconds=0.002) for _ in range(3)]
    for each in (long, *short, equal, high):
        queue.put(each)
    assert queue.take() == Taken((equal, *short[:2], high), stacked=True)
    assert queue.take() == Taken((long, short[2]), stacked=True)
    assert queue.depth == 0


def test_the_highest_priority_goes_first_then_the_oldest() -> None:
    low, high, second = work(priority=9), work(priority=1), work(priority=1)
    queue = filled(low, high, second)
    taken = queue.take()
    assert taken is not None
    assert list(taken.works) == [high, second]
    assert list(queue) == [low]


def test_expired_and_discarded_work_is_out() -> None:
    late, fine, cancelled = work(deadline=5.0), work(deadline=7.0), work(b="w@1")
    queue = filled(late, fine, cancelled)
    assert queue.discard(cancelled)
    assert not queue.discard(cancelled)
    assert queue.expired(6.0) == [late]
    assert list(queue) == [fine]
    assert queue.depth == 1


def test_work_that_died_with_a_worker_goes_first_and_alone() -> None:
    fine = [work(b="w@1"), work(b="w@1")]
    again = work(b="w@1", retries=1)
    queue = filled(*fine)
    queue.put(again, first=True)
    assert [list(taken.works) for taken in iter(queue.take, None)] == [[again], fine]
    plain, plain_again = work(), work(retries=1)
    queue = filled(plain)
    queue.put(plain_again, first=True)
    assert [list(taken.works) for taken in iter(queue.take, None)] == [[plain_again], [plain]]


def test_a_delay_waits_for_a_fuller_batch_only_while_it_is_not_full() -> None:
    queue = filled(limits=Limits(requests=2, delay=0.010))
    assert queue.wait(0.0) == float("inf")
    queue.put(work(arrived=1.0))
    assert queue.wait(1.004) == pytest.approx(0.006)
    assert queue.wait(1.011) == 0.0
    queue.put(work(arrived=1.0))
    assert queue.wait(1.0) == 0.0


def test_the_message_holds_what_the_worker_needs() -> None:
    one = work(c=True, bias="", deadline=3.5)
    item = one.item()
    for field in dataclasses.fields(Work):
        if hasattr(item, field.name):
            assert getattr(item, field.name) == getattr(one, field.name), field.name


def test_works_that_do_not_fit_a_device_are_left_for_another() -> None:
    queue = Queue(Limits())
    elsewhere, here, mate = (work(b="w@1") for _ in range(3))
    plain, stuck = work(), work()
    for each in (elsewhere, here, mate, plain, stuck):
        queue.put(each)

    def fits(each: Work) -> bool:
        return each not in (elsewhere, stuck)

    head = queue.first(fits)
    assert head is here
    taken = queue.take(head, fits=fits)
    assert taken is not None
    assert taken.works == (here, mate)
    taken = queue.take(fits=fits)
    assert taken is not None
    assert taken.works == (plain,)
    assert queue.take(fits=fits) is None
    assert list(queue) == [elsewhere, stuck]


def test_a_product_of_many_rows_is_not_stacked() -> None:
    assert work(m=2048, b="w@1").stack_key is not None
    assert work(m=2049, b="w@1").stack_key is None


def test_a_device_that_computes_unlike_products_together_gets_what_found_no_company() -> None:
    limits = Limits(group_seconds=0.004, long_seconds=0.0005)
    first, plain, pair, second, long = (
        work(b="a@1"), work(), [work(b="p@1") for _ in range(2)], work(b="b@1", m=9), work(b="c@1", seconds=0.001),
    )  # fmt: skip
    queue = filled(first, plain, *pair, second, long, limits=limits)
    taken = [queue.take(together=True) for _ in range(3)]
    assert taken == [
        Taken((first, plain, second), stacked=False), Taken(tuple(pair), stacked=True), Taken((long,), stacked=False),
    ]  # fmt: skip
    assert queue.depth == 0
    queue = filled(plain, first, second)
    assert queue.take(together=True) == Taken((plain, first, second), stacked=False)


def test_elsewhere_what_found_no_company_goes_alone() -> None:
    works = [work(b="a@1"), work(b="b@1"), work()]
    queue = filled(*works)
    assert [taken.works for taken in iter(queue.take, None)] == [(each,) for each in works]


def test_what_died_with_a_worker_takes_nobody_along() -> None:
    again, other = work(b="a@1", retries=1), work(b="b@1")
    queue = filled(other)
    queue.put(again, first=True)
    assert [queue.take(together=True) for _ in range(2)] == [
        Taken((again,), stacked=False), Taken((other,), stacked=False),
    ]  # fmt: skip
