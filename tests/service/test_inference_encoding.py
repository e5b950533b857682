"""Which encoding a reply to /v2 has: the one that a client names alone, and doesn't forbid."""

from __future__ import annotations

import pytest

from service.inference.encoding import reply_encoding


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        (None, None),
        ("gzip", "gzip"),
        (" Deflate ", "deflate"),
        ("gzip; q=0.5", "gzip"),
        ("gzip;q=1.000", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000", None),
        ("gzip;q=0, deflate", None),
        ("deflate;q=0, gzip;q=0", None),
        ("gzip, deflate, br", None),
        ("br", None),
        ("gzip;q=much", None),
    ],
)
def test_one_encoding_is_taken_unless_it_is_forbidden(accept: str | None, encoding: str | None) -> None:
    assert reply_encoding(accept) == encoding
