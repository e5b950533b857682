"""Raw bodies: receives the text of `a_shape` and its kin, hands on shapes, and the text for `X-Gemm-Shape`.

A shape is written `2x3` or `2,3` (`4x2x3` with a batch); replies use `x`, which no proxy folds or splits.
"""

from __future__ import annotations

import re
from functools import lru_cache

from service.errors import ServiceError
from service.formats.base import checked_shape

# Dimensions of more than 19 digits, and more than MAX_DIMS of them, are refused anyway; the bounds keep int() cheap.
_SHAPE = re.compile(r"[0-9]{1,19}(?:[x,][0-9]{1,19}){0,99}", re.ASCII)


@lru_cache(1024)  # few different ones come, many times
def parse_shape(text: str, *, field: str) -> tuple[int, ...]:
    """The shape in `2x3` or `2,3`."""
    if not _SHAPE.fullmatch(text):
        raise ServiceError(
            "invalid", f"{field}: write a shape as 2x3 or 2,3 (4x2x3 with a batch)", field=field
        )
    return checked_shape([int(dim) for dim in re.split("[x,]", text)], field=field)


@lru_cache(1024)
def emit_shape(shape: tuple[int, ...]) -> str:
    """A shape as `2x3`."""
    return "x".join(map(str, shape))
