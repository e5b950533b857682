"""Admission: the right code with the limit."""

from __future__ import annotations

import pytest

from service.admit import Bounds, Rates, admit
from service.batch import Limits, Queue, Rate
from service.errors import ServiceError
from service.messages import Operand
from tests.service.works import work


def refused(queue: Queue, bounds: Bounds, **fields: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        admit(work(**fields), queue, bounds, now=10.0)
    return caught.value


def test_a_full_queue_answers_429_with_retry_after_and_the_limit() -> None:
    queue = Queue(Limits())
    bounds = Bounds(requests=2, nbytes=10**9)
    for _ in range(2):
        each = work(seconds=3.0)
        admit(each, queue, bounds, now=10.0)
        queue.put(each)
    error = refused(queue, bounds)
    assert (error.status, error.code, error.limit, error.retry_after) == (429, "queue_full", 2, 6.0)


def test_bytes_are_bounded_but_an_empty_queue_takes_anything() -> None:
    queue = Queue(Limits())
    bounds = Bounds(requests=100, nbytes=1000)
    big = work(m=1000)
    admit(big, queue, bounds, now=10.0)
    queue.put(big)
    error = refused(queue, bounds)
    assert (error.code, error.limit) == ("queue_full", 1000)


def test_stored_operands_do_not_count_against_the_queues_bytes() -> None:
    queue = Queue(Limits())
    bounds = Bounds(requests=100, nbytes=3000)
    for _ in range(5):
        each = work(b="weight@1", m=4, k=8, n=16)
        each.b = Operand(0, 1 << 30, "fp32", (8, 16), "weight@1")
        admit(each, queue, bounds, now=10.0)
        queue.put(each)
    assert queue.nbytes == 5 * (4 * 8 + 4 * 16) * 4


def test_a_deadline_in_the_past_is_refused_before_it_is_queued() -> None:
    error = refused(Queue(Limits()), Bounds(1, 1), deadline=9.9)
    assert (error.status, error.code, error.field) == (504, "deadline", "deadline_ms")


RATE = Rate("1", 100.0)


def test_a_keys_flops_a_second_are_spent_and_come_back() -> None:
    rates = Rates()
    for _ in range(4):
        rates.spend(RATE, 25.0, now=1.0)
    with pytest.raises(ServiceError) as caught:
        rates.spend(RATE, 50.0, now=1.1)
    assert (caught.value.status, caught.value.code, caught.value.limit) == (429, "quota", 100.0)
    rates.spend(RATE, 50.0, now=1.5)


def test_keys_of_one_owner_and_quotas_of_one_key_have_buckets_of_their_own() -> None:
    rates, other = Rates(), Rate("2", 1e4)
    rates.spend(other, 2e4, now=1.0)
    rates.spend(RATE, 100.0, now=1.0)
    for now in (1.1, 1.2, 1.3):
        rates.spend(Rate("1", 1e4), 1e3, now=now)
        with pytest.raises(ServiceError):
            rates.spend(RATE, 50.0, now=now)
    rates.spend(RATE, 50.0, now=1.5)


def test_a_bucket_is_forgotten_once_it_is_full() -> None:
    rates = Rates()
    for key in range(50):
        rates.spend(Rate(str(key), 100.0), 150.0, now=float(key))
    assert len(rates._buckets) == 2


def test_a_product_beyond_a_seconds_worth_passes_once_and_is_paid_for() -> None:
    rates = Rates()
    rates.spend(RATE, 1000.0, now=0.0)
    with pytest.raises(ServiceError) as caught:
        rates.spend(RATE, 1.0, now=8.0)
    assert caught.value.retry_after == pytest.approx(1.01)
    rates.spend(RATE, 1.0, now=9.1)
