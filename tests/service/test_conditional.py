"""Conditions and ranges as RFC 9110 has them."""

from __future__ import annotations

import pytest

from service import conditional
from service.errors import ServiceError

TAG = '"abc.npy"'


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-5", (2, 6)),
        ("bytes=2-", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=5-99", (5, 10)),
        ("bytes=5-4", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=٣-٤", None),
        ("bytes=a-b", None),
    ],
)
def test_range(text: str | None, span: tuple[int, int] | None) -> None:
    assert conditional.range_of(text, None, TAG, 10) == span


@pytest.mark.parametrize("text", ["bytes=10-", "bytes=10-20", "bytes=-0"])
def test_range_outside(text: str) -> None:
    with pytest.raises(ServiceError) as error:
        conditional.range_of(text, None, TAG, 10)
    assert error.value.status == 416
    assert error.value.headers == {"Content-Range": "bytes */10"}


def test_range_of_nothing() -> None:
    with pytest.raises(ServiceError):
        conditional.range_of("bytes=0-", None, TAG, 0)


@pytest.mark.parametrize(
    ("if_range", "whole"), [(TAG, False), ('"abc"', True), ("W/" + TAG, True), ("Mon, 1 Jan 2026", True)]
)
def test_if_range(if_range: str, whole: bool) -> None:
    assert (conditional.range_of("bytes=1-2", if_range, TAG, 10) is None) == whole


@pytest.mark.parametrize(
    ("header", "same"),
    [
        (None, False),
        ("*", True),
        ('"abc.npy"', True),
        ('W/"abc.npy"', True),
        ('"abc"', True),
        ('"abc.safetensors"', False),
        ('"x", "abc.npy"', True),
        ("abc", False),
        ("", False),
    ],
)
def test_unchanged(header: str | None, same: bool) -> None:
    assert conditional.unchanged(header, "abc", "npy") == same


@pytest.mark.parametrize(
    ("if_match", "if_none_match", "etag", "met"),
    [
        (None, None, "abc", True),
        (None, None, None, True),
        ('"abc"', None, "abc", True),
        ('"abc.npy"', None, "abc", True),
        ('W/"abc"', None, "abc", False),  # If-Match compares strongly
        ('"abc"', None, None, False),
        ("*", None, "abc", True),
        ("*", None, None, False),
        ("nonsense", None, "abc", False),
        (None, "*", None, True),
        (None, "*", "abc", False),
        (None, 'W/"abc"', "abc", False),
        (None, '"other"', "abc", True),
    ],
)
def test_conditions(if_match: str | None, if_none_match: str | None, etag: str | None, met: bool) -> None:
    conditions = conditional.conditions(if_match, if_none_match)
    if met:
        conditions.check(etag)
        return
    with pytest.raises(ServiceError, match="If-") as caught:
        conditions.check(etag)
    assert caught.value.field == ("If-Match" if if_match is not None else "If-None-Match")
