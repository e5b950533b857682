"""Tensors on the wire: receives bytes or JSON values, hands on dtypes, shapes and places, and the way back.

Pure functions, no I/O. Tensors are row-major and little-endian; dtypes are named as in the API. Every fault
is a ServiceError that names the field: `malformed` where the bytes can't be parsed, `invalid` where they can
but mean nothing here.
"""

from service.formats.base import DTYPES, MAX_DIM, Tensor, nbytes, numpy_dtype

__all__ = ["DTYPES", "MAX_DIM", "Tensor", "nbytes", "numpy_dtype"]
