"""Refused fields: all are named, the first one's bound is told, and no value is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import ServiceError
from service.jobs.decode import JobBody
from service.model import GemmBody, GemmQuery, validate, validate_query

EYE = [[1, 0], [0, 1]]


def refused(body: dict[str, Any]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        validate(GemmBody, {"a": EYE, "b": EYE} | body)
    assert caught.value.code == "invalid"
    return caught.value


def test_every_field_at_fault_is_named() -> None:
    error = refused({"activation": "tanh", "priority": 11, "trans_a": "yes", "aplha": 2})
    assert error.field == "trans_a"
    assert error.detail == (
        "trans_a: should be a valid boolean; activation: should be 'none', 'relu', 'gelu' or 'silu'; "
        "priority: should be less than or equal to 10; aplha: isn't known"
    )


@pytest.mark.parametrize(
    ("body", "field", "limit"),
    [
        ({"priority": 11}, "priority", 10),
        ({"priority": -1}, "priority", 0),
        ({"deadline_ms": 1e10}, "deadline_ms", 1e9),
        ({"variant": "v" * 129}, "variant", 128),
        ({"a": {"b64": "", "dtype": "fp32", "shape": [1, 1, 1, 1]}}, "a.shape", 3),
    ],
)
def test_the_bound_that_was_passed_is_told(body: dict[str, Any], field: str, limit: float) -> None:
    error = refused(body)
    assert (error.field, error.limit) == (field, limit)
    assert error.problem()["limit"] == limit


@pytest.mark.parametrize("operand", [{"handel": "w"}, {}, {"step": "x"}])
def test_an_operand_of_no_form_is_told_the_forms(operand: dict[str, Any]) -> None:
    error = refused({"a": operand})
    assert error.field == "a"
    assert '{"b64", "dtype", "shape"} or {"handle"}' in error.detail


def test_forms_of_one_field_complain_as_one() -> None:
    assert refused({"out": 7}).detail == "out: should be an object or should be 'inline'"


def test_many_faults_are_counted_and_none_is_long() -> None:
    error = refused({f"{'x' * 100}{number}": 0 for number in range(20)})
    assert len(error.detail) <= 500
    with pytest.raises(ServiceError) as caught:
        validate_query(GemmQuery, {f"x{number}": "" for number in range(20)})
    assert caught.value.detail.endswith("x7: isn't known (and 12 more)")


@pytest.mark.parametrize("place", ["body", "a", "out"])
def test_an_object_of_very_many_fields_is_refused_as_one_fault(place: str) -> None:
    many: dict[str, Any] = {f"x{number}": 0 for number in range(65)}
    error = refused(many if place == "body" else {place: {"handle": "x", **many}})
    assert error.detail == f"{place}: has more than 64 fields"
    assert (error.field, error.limit) == (place, 64)


def test_names_are_told_in_words() -> None:
    words = "NAME is a letter or digit, then up to 127 of A-Za-z0-9._-"
    assert refused({"a": {"handle": "ä"}}).detail == f"a.handle: should be a NAME; {words}"
    with pytest.raises(ServiceError, match=r"b: should be handle:NAME; .*; out: should be inline or handle"):
        validate_query(GemmQuery, {"b": "w", "out": "w"})


def test_values_are_not_repeated() -> None:
    assert "hunter2" not in refused({"dtype": "hunter2", "activation": "hunter2", "alpha": "hunter2"}).detail


def test_a_missing_field_is_said_to_be_missing() -> None:
    with pytest.raises(ServiceError) as caught:
        validate(GemmBody, {"A": EYE})
    assert caught.value.detail == "a: is missing; b: is missing; A: isn't known"
    with pytest.raises(ServiceError) as caught:
        validate(JobBody, {"steps": 5})
    assert caught.value.detail == "steps: should be a valid list"
