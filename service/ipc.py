"""CUDA IPC through the driver's library: receives device pointers, hands on handles that another process opens.

Needs a CUDA context that is current in the calling thread; whoever computes with torch has one. A handle names a
whole allocation, so a pointer within it goes with its offset.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
#: Allocations, and pointers into them, that are remembered; those exported longest ago are forgotten.
_REMEMBERED = 256
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class IpcError(Exception):
    """The driver refused, or there is none."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


#: By function of the driver: the types of its arguments.
_TAKES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (ctypes.c_void_p, ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemGetAddressRange_v2": (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    "cuPointerGetAttribute": (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64),
    "cuIpcGetMemHandle": (ctypes.c_void_p, ctypes.c_uint64),
    "cuIpcOpenMemHandle_v2": (ctypes.c_void_p, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ctypes.c_uint64,),
}


class Exported(NamedTuple):
    """An allocation that other processes may open, and where in it the pointer was."""

    handle: bytes
    nbytes: int
    offset: int


class Pointer:
    """Device memory in the form that torch takes over without a copy."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def allocate(nbytes: int) -> int:
    """Device memory in an allocation of its own."""
    pointer = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(pointer), nbytes)
    return pointer.value


def free(pointer: int) -> None:
    """Give it back."""
    _call("cuMemFree_v2", pointer)


#: By number of an allocation: its handle.
_handles: OrderedDict[int, bytes] = OrderedDict()
#: By pointer: the number of the allocation that it was in, and what was exported.
_exported: OrderedDict[int, tuple[int, Exported]] = OrderedDict()


def exported(pointer: int) -> Exported | None:
    """What `export` gave for this pointer, if the same allocation still holds it: one call that needs no context.

    The driver numbers allocations, and gives no number twice in a process. IpcError for what is no device memory now.
    """
    known = _exported.get(pointer)
    return known[1] if known is not None and known[0] == _number(pointer) else None


def export(pointer: int) -> Exported:
    """The handle of the allocation that holds a device pointer. IpcError for memory that can't be shared."""
    number = _number(pointer)
    base, nbytes = _range(pointer)
    handle = _handles.get(number)
    if handle is None:
        made = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(made), base)
        handle = _remember(_handles, number, bytes(made))
    return _remember(_exported, pointer, (number, Exported(handle, nbytes, pointer - base)))[1]


def _remember(kept: OrderedDict[int, T], key: int, value: T) -> T:
    kept[key] = value
    while len(kept) > _REMEMBERED:
        kept.popitem(last=False)
    return value


def open_handle(handle: bytes) -> tuple[int, int]:
    """Device pointer and size of an allocation of another process, as the driver knows it."""
    if len(handle) != HANDLE_BYTES:
        raise IpcError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    pointer = ctypes.c_uint64()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    try:
        return pointer.value, _range(pointer.value)[1]
    except IpcError:
        close_handle(pointer.value)
        raise


def close_handle(pointer: int) -> None:
    """Let an opened allocation go."""
    _call("cuIpcCloseMemHandle", pointer)


def _range(pointer: int) -> tuple[int, int]:
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), pointer)
    return base.value, nbytes.value


def _number(pointer: int) -> int:
    """The driver's number of the allocation that holds a pointer."""
    number = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, pointer)
    return number.value


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise IpcError(f"{name} failed with CUDA error {status}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """The driver's library; what its functions take is said once, so that each call passes plain numbers."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise IpcError(f"there is no CUDA driver: {error}") from None
    for name, takes in _TAKES.items():
        getattr(library, name).argtypes = takes
    return library
