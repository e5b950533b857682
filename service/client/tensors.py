"""Arrays here and bytes on the wire: receives numpy or torch arrays, hands on views without a copy.

bfloat16 is ml_dtypes' in numpy and torch's own in torch. What can't be viewed is copied once: arrays with
gaps, foreign byte order, tensors on a GPU. A transposed matrix is sent as it lies, with the flag that says
so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import msgspec
import numpy as np

from service.client.device import OnDevice
from service.client.errors import GemmError

Array = Any
NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float64): "fp64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


_DLPACK_CUDA = 2  # kDLCUDA
#: Types by torch's names for them.
_OF_TORCH = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
#: Their arrays never change; DLPack as they speak it doesn't tell.
_IMMUTABLE = ("jax", "jaxlib")


@dataclass(frozen=True, slots=True)
class Handle:
    """A matrix that the service keeps. `name` is enough to use it; the rest is what the service told."""

    name: str
    etag: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    durable: bool | None = None
    expires: str | float | None = None


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor as it goes over the wire: `data` are its little-endian, row-major bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | OnDevice


def is_torch(value: object) -> bool:
    """Whether `value` is a torch tensor; torch isn't imported to find out."""
    kind = type(value)
    found = _KINDS.get(kind)
    if found is None:
        # While torch is being imported it has no Tensor yet, and nobody has one of its tensors.
        found = _KINDS[kind] = issubclass(kind, getattr(sys.modules.get("torch"), "Tensor", ()))
    return found


#: By type: whether it is torch's.
_KINDS: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _package(value: object) -> str:
    """The package that defines a value's type."""
    return type(value).__module__.partition(".")[0]


def _library(value: Any) -> Any:
    """What makes arrays like `value`: as the array API standard has it, else (CuPy before 14) its package; or None."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return None
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__()
    package = sys.modules.get(_package(value))
    return package if hasattr(package, "from_dlpack") else None


def adopt(value: Any) -> Any:
    """An array of another library (CuPy, JAX, …) as numpy's or, on a GPU, torch's, over the same memory by DLPack."""
    if value is None or isinstance(value, np.ndarray) or is_torch(value):
        return value
    if not hasattr(value, "__dlpack_device__"):
        return value
    kind = int(value.__dlpack_device__()[0])
    if kind == _DLPACK_CUDA:
        from torch.utils.dlpack import from_dlpack

        return from_dlpack(value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # types that numpy's DLPack lacks, such as bfloat16
        return np.asarray(value)


def tensor(value: Array, name: str) -> Tensor:
    """An array as it is sent; `name` is for complaints."""
    if _on_gpu(value):
        return _tensor_on_gpu(value, name)
    array = _numpy(value, name)
    _check_dimensions(array.ndim, name)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return Tensor(NAMES[array.dtype], array.shape, _bytes(array))


def matrix(value: Array, name: str) -> tuple[Tensor, bool]:
    """A matrix or a batch of them, and whether it is sent transposed because it lies so in memory."""
    if _on_gpu(value):
        turned = not value.is_contiguous() and value.dim() >= 2 and value.mT.is_contiguous()
        return _tensor_on_gpu(value.mT if turned else value, name), turned
    array = _numpy(value, name)
    if array.ndim >= 2 and not array.flags.c_contiguous:
        turned = array.swapaxes(-1, -2)
        if turned.flags.c_contiguous:
            return Tensor(NAMES[array.dtype], turned.shape, _bytes(turned)), True
    return tensor(array, name), False


def _tensor_on_gpu(value: Array, name: str) -> Tensor:
    shape = tuple(value.shape)
    _check_dimensions(len(shape), name)
    whole = value if value.is_contiguous() else value.detach().contiguous()
    return Tensor(_torch_name(value, name), shape, OnDevice(whole))


def _check_dimensions(dimensions: int, name: str) -> None:
    if dimensions == 0:
        raise TypeError(f"{name} is no array: it has no dimensions")


def target(out: Array) -> Tensor:
    """An array that a result is to be written into."""
    if _package(out) in _IMMUTABLE:
        raise ValueError("out must be writable; arrays of JAX never change")
    out = adopt(out)
    if _on_gpu(out):
        if not out.is_contiguous():
            raise ValueError("out must be C-contiguous and writable")
        return Tensor(_torch_name(out, "out"), tuple(out.shape), OnDevice(out))
    array = _numpy_of_torch(out) if is_torch(out) else out
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"out must be a numpy array or a torch tensor, not {type(out).__name__}; "
            "Handle(NAME) keeps D on the service"
        )
    array = _plain(array, "out")
    if array.dtype not in NAMES:
        raise TypeError(f"out has dtype {array.dtype}; it must be one of {', '.join(map(str, NAMES))}")
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("out must be C-contiguous and writable")
    return Tensor(NAMES[array.dtype], array.shape, _bytes(array))


class Unfit(ValueError):
    """A result isn't of the dtype and shape of the array that was given for it."""


def check_target(out: Tensor, dtype: str, shape: Sequence[int]) -> None:
    """Unfit where a result doesn't fit the array that was given for it."""
    if (out.dtype, out.shape) != (dtype, tuple(shape)):
        raise Unfit(f"the result is {dtype} of shape {tuple(shape)}, out is {out.dtype} of {out.shape}")


def empty(dtype: str, shape: Sequence[int]) -> tuple[np.ndarray[Any, Any], memoryview]:
    """A fresh array for a result, and its bytes."""
    if dtype not in DTYPES:
        raise GemmError(f"the service sent dtype {dtype!r}, which this client doesn't know")
    array = np.empty(tuple(shape), DTYPES[dtype])
    return array, _bytes(array)


def on_gpu_like(values: Iterable[Any], dtype: str, shape: Sequence[int]) -> Array | None:
    """A fresh torch tensor on the GPU where `as_like` wants the result; None where that is host memory."""
    like = adopt(_like(values))
    if not _on_gpu(like):
        return None
    import torch

    return torch.empty(tuple(shape), dtype=_torch_dtype(dtype), device=like.device)


def as_like(array: Array, values: Iterable[Any]) -> Array:
    """The array as the first of `values` that isn't numpy's is: on its device, by its library (torch, CuPy, JAX, …).

    `array` is numpy's, or torch's where it is on the GPU already. Without such a value, and where that library
    can't hold these elements, it is numpy's, or torch's on a GPU.
    """
    like = _like(values)
    if like is None or (is_torch(like) and is_torch(array)):
        return array
    adopted = adopt(like)
    own = as_torch(array, adopted) if is_torch(adopted) and not is_torch(array) else array
    return own if is_torch(like) else _by_library(own, _library(like))


def _like(values: Iterable[Any]) -> Any:
    """The first value that isn't numpy's and whose library is known."""
    return next((value for value in values if is_torch(value) or _library(value) is not None), None)


def _by_library(own: Array, library: Any) -> Array:
    """A numpy or torch array by another library, over the same memory where that library can."""
    try:
        made = library.from_dlpack(own)
    except (BufferError, RuntimeError, TypeError):  # numpy's DLPack has no bfloat16
        if is_torch(own):
            return own
        made = library.asarray(own)
    # JAX makes fp32 of fp64 unless told otherwise; nothing is to be lost here.
    return made if made.dtype.itemsize == own.dtype.itemsize else own


def as_torch(array: np.ndarray[Any, Any], like: Array) -> Array:
    """A torch tensor over the array's memory, moved to where `like` is."""
    import torch

    if array.dtype == DTYPES["bf16"]:
        made = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        made = torch.from_numpy(array)
    return made.to(like.device)


def _on_gpu(value: object) -> bool:
    return is_torch(value) and bool(value.is_cuda)  # type: ignore[attr-defined]


def _torch_name(value: Array, name: str) -> str:
    kind = _name_of_torch(value.dtype)
    if kind is None:
        told = str(value.dtype).removeprefix("torch.")
        raise TypeError(f"{name} has dtype {told}; convert it to one of {', '.join(_OF_TORCH)}")
    return kind


@cache
def _name_of_torch(dtype: Any) -> str | None:
    return _OF_TORCH.get(str(dtype).removeprefix("torch."))


@cache
def _torch_dtype(name: str) -> Any:
    import torch

    return next(getattr(torch, own) for own, known in _OF_TORCH.items() if known == name)


def _numpy(value: Array, name: str) -> np.ndarray[Any, Any]:
    if is_torch(value):
        array = _numpy_of_torch(value.detach().cpu())
    elif isinstance(value, np.ndarray):
        array = _plain(value, name)
    else:
        # Plain numbers have no type of their own; the service reads them as fp32 too.
        try:
            array = np.asarray(value, np.float32)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} is no array of numbers: {error}") from None
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype not in NAMES:
        raise TypeError(f"{name} has dtype {array.dtype}; convert it to one of {', '.join(map(str, NAMES))}")
    return array


def _plain(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """The same memory without what a subclass (numpy.matrix, numpy.memmap) makes of it."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, and a product knows no mask; see its `filled` and `data`")
    return np.asarray(array)


def _numpy_of_torch(value: Array) -> np.ndarray[Any, Any]:
    import torch

    if value.is_cuda:
        raise TypeError("out must be in host memory")
    if value.dtype == torch.bfloat16:
        halves: np.ndarray[Any, Any] = value.view(torch.int16).numpy()
        return halves.view(ml_dtypes.bfloat16)
    array: np.ndarray[Any, Any] = value.numpy()
    return array


def _bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
