"""The plan of operands sent as raw bytes: remembered by query and length; refusals are made anew."""

from __future__ import annotations

import pytest

from service.errors import ServiceError
from service.raw_plan import Most, planned, sent


def test_what_a_query_says_is_found_again_by_query_and_length() -> None:
    query = b"a_shape=4x8&b_shape=8x4&dtype=fp32"
    bare, biased = sent(query, 256), sent(query, 256 + 16)
    assert bare is not None
    assert biased is not None
    assert sent(query, 256) is bare
    assert bare.sizes == [128, 128]
    assert biased.sizes == [128, 128, 16]
    assert sent(query + b"&bias=handle:x", 256) is None
    assert sent(b"a=handle:x&b_shape=8x4", 128) is None
    made, params = planned(bare, Most(1 << 20, 1e9))
    assert (made.m, made.n, made.k, params.out_dtype) == (4, 4, 8, "fp32")
    for most in (Most(63, 1e9), Most(1 << 20, 255.0)):
        for _ in range(2):
            with pytest.raises(ServiceError):
                planned(bare, most)
