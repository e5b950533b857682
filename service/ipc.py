"""CUDA IPC through the driver's library: receives device pointers, hands on handles that another process opens.

Needs a CUDA context that is current in the calling thread; whoever computes with torch has one. A handle names a
whole allocation, so a pointer within it goes with its offset.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple

HANDLE_BYTES = 64
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
#: Allocations whose handles are remembered, those used longest ago forgotten.
_REMEMBERED = 256
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag there is


class IpcError(Exception):
    """The driver refused, or there is none."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


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
    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
    return pointer.value


def free(pointer: int) -> None:
    """Give it back."""
    _call("cuMemFree_v2", ctypes.c_uint64(pointer))


#: By address: the allocation that was there, and its handle.
_exported: OrderedDict[int, tuple[int, bytes]] = OrderedDict()


def export(pointer: int) -> Exported:
    """The handle of the allocation that holds a device pointer. IpcError for memory that can't be shared.

    Asked for again it costs no call that makes one, as long as the same allocation is at that address: the driver
    numbers them, and gives no number twice in a process.
    """
    base, nbytes = _range(pointer)
    number = ctypes.c_uint64()
    _call("cuPointerGetAttribute", ctypes.byref(number), ctypes.c_int(_BUFFER_ID), ctypes.c_uint64(base))
    known, handle = _exported.get(base, (-1, b""))
    if known != number.value:
        made = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(made), ctypes.c_uint64(base))
        handle = bytes(made)
        _exported[base] = number.value, handle
        while len(_exported) > _REMEMBERED:
            _exported.popitem(last=False)
    return Exported(handle, nbytes, pointer - base)


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
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


def _range(pointer: int) -> tuple[int, int]:
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(pointer))
    return base.value, nbytes.value


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise IpcError(f"{name} failed with CUDA error {status}")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise IpcError(f"there is no CUDA driver: {error}") from None
