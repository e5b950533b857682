"""Placement: where handles are, until waiting costs more than a copy."""

from __future__ import annotations

from dataclasses import replace

from service.messages import Operand
from service.place import TRANSFER, Residency, Seat, Why, place
from tests.service.works import work

WEIGHT = Operand(0, int(0.002 * TRANSFER), "fp32", (1, 1), "w@1")


def seat(index: int, queued: float = 0.0, *, holds: bool = False) -> Seat:
    residency = Residency(1e12)
    if holds:
        residency.note(WEIGHT)
    return Seat(index, queued, residency)


def with_weight():
    return replace(work(b="w@1"), b=WEIGHT)


def test_plain_work_goes_where_least_is_queued() -> None:
    assert place(work(), [seat(0, 0.2), seat(1, 0.1)]) == (1, Why.LEAST_QUEUED)


def test_a_handle_is_used_where_it_is() -> None:
    assert place(with_weight(), [seat(0), seat(1, 0.001, holds=True)]) == (1, Why.RESIDENT)


def test_a_handle_is_copied_when_waiting_would_take_longer() -> None:
    assert place(with_weight(), [seat(0), seat(1, 0.003, holds=True)]) == (0, Why.REPLICATED)


def test_a_handle_that_nobody_has_goes_where_least_is_queued() -> None:
    assert place(with_weight(), [seat(0, 0.5), seat(1, 0.1)]) == (1, Why.LEAST_QUEUED)


def test_where_only_one_has_room_there_is_no_choice() -> None:
    assert place(with_weight(), [seat(3, 9.0)]) == (3, Why.ONLY)


def test_workers_on_the_cpu_need_no_copies() -> None:
    assert place(with_weight(), [Seat(0, 0.1), Seat(1, 0.0)]) == (1, Why.RESIDENT)


def test_residency_forgets_the_least_recently_used_and_what_is_deleted() -> None:
    held = Residency(250)
    for name in ("a", "b"):
        held.note(Operand(0, 100, "fp32", (5, 5), name))
    held.note(Operand(0, 100, "fp32", (5, 5), "a"))
    held.note(Operand(0, 100, "fp32", (5, 5), "c"))
    assert ("a" in held, "b" in held, "c" in held, held.nbytes) == (True, False, True, 200)
    held.note(Operand(0, 300, "fp32", (5, 15), "too large"))
    assert held.nbytes == 200
    held.forget(["a", "unknown"])
    assert held.nbytes == 100
