"""What all forms share: receives dtype names and shapes, hands on checked `Tensor`s and numpy dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from service.errors import ServiceError

#: Element types by the API's names; all little-endian.
DTYPES: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype("<f2"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype("<f4"),
    "fp64": np.dtype("<f8"),
}

#: Largest dimension: kernels index rows and columns with 32 bits.
MAX_DIM = 2**31 - 1
#: Most dimensions of a tensor, and levels of nested lists.
MAX_DIMS = 8

_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Type and shape of one tensor, checked."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, compact."""
        return nbytes(self.dtype, self.shape)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype of an API name."""
    return DTYPES[dtype]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a compact tensor."""
    return _SIZES[dtype] * math.prod(shape)


def checked(dtype: Any, shape: Any, *, field: str) -> Tensor:
    """A Tensor from values that came over the wire, or a ServiceError that names `field`."""
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ServiceError(
            "invalid", f"{field}: dtype {_short(dtype)} isn't one of {', '.join(DTYPES)}", field=field
        )
    return Tensor(dtype, checked_shape(shape, field=field))


def checked_shape(shape: Any, *, field: str) -> tuple[int, ...]:
    """A shape from a list or tuple of whole numbers in [0, MAX_DIM], at most MAX_DIMS of them."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS:
        raise ServiceError(
            "invalid",
            f"{field}: a shape is a list of at most {MAX_DIMS} whole numbers",
            field=field,
            limit=MAX_DIMS,
        )
    for dim in shape:
        if type(dim) is not int or dim < 0:
            raise ServiceError(
                "invalid", f"{field}: dimension {_short(dim)} isn't a whole number ≥ 0", field=field
            )
        if dim > MAX_DIM:
            raise ServiceError(
                "invalid", f"{field}: dimension {_short(dim)} is above {MAX_DIM}", field=field, limit=MAX_DIM
            )
    return tuple(shape)


def _short(value: Any) -> str:
    """A value for an error message: never longer than a line, whatever the client sent."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "with more than 38 digits"
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "…'"
