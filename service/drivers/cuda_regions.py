"""Device memory of other processes: receives IPC handles, moves their bytes to and from the arena.

Called from the worker's thread of questions; copies have a stream of their own, so that no batch waits for them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from service.arena import Arena


@dataclass(slots=True)
class _Opened:
    """An open handle: its address here, bytes from there to the allocation's end, registrations."""

    pointer: int
    nbytes: int
    count: int = 0


class CudaRegions:
    """All that this process has open. Faults are ValueErrors without a word of the driver's."""

    def __init__(self, arena: Arena, runtime: Any = None, driver: Any = None) -> None:
        if runtime is None:
            runtime, driver = import_module("cuda.bindings.runtime"), import_module("cuda.bindings.driver")
        self._arena = arena
        self._driver = driver
        self._runtime = runtime
        self._opened: dict[tuple[int, bytes], _Opened] = {}
        self._streams: dict[int, Any] = {}

    def ask(self, what: str, args: dict[str, Any]) -> None:
        """region_open, region_close, region_read (into the arena), region_write (from it)."""
        key = (int(args["device"]), bytes(args["handle"]))
        if what == "region_open":
            self._open(key, args["size"]).count += 1
        elif what == "region_close":
            self._close(key)
        elif what in ("region_read", "region_write"):
            self._copy(key, args, inward=what == "region_read")
        else:
            raise ValueError(f"a GPU can't answer {what!r}")

    def close(self) -> None:
        """Close all handles."""
        for key in list(self._opened):
            self._opened[key].count = 0
            self._close(key)

    def _open(self, key: tuple[int, bytes], size: int) -> _Opened:
        opened = self._opened.get(key)
        if opened is None:
            self._use_device(key[0])
            handle = self._runtime.cudaIpcMemHandle_t()
            ctypes.memmove(handle.getPtr(), key[1], len(key[1]))
            flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
            pointer = self._call(self._runtime.cudaIpcOpenMemHandle(handle, flags), "be opened")
            error, base, total = self._driver.cuMemGetAddressRange(int(pointer))
            known = error == self._driver.CUresult.CUDA_SUCCESS
            opened = _Opened(int(pointer), int(total) - (int(pointer) - int(base)) if known else 0)
            self._opened[key] = opened
        if size > opened.nbytes:
            held = opened.nbytes
            self._close_unused(key)
            raise ValueError(f"byte_size: {size} bytes are asked of CUDA memory of {held}")
        return opened

    def _close(self, key: tuple[int, bytes]) -> None:
        opened = self._opened.get(key)
        if opened is not None:
            opened.count -= 1
            self._close_unused(key)

    def _close_unused(self, key: tuple[int, bytes]) -> None:
        if self._opened[key].count <= 0:
            opened = self._opened.pop(key)
            self._use_device(key[0])
            self._call(self._runtime.cudaIpcCloseMemHandle(opened.pointer), "be closed")

    def _copy(self, key: tuple[int, bytes], args: dict[str, Any], *, inward: bool) -> None:
        opened = self._open(key, args["size"])
        offset, nbytes = args["offset"], args["nbytes"]
        if offset < 0 or nbytes < 0 or offset > opened.nbytes or nbytes > opened.nbytes - offset:
            raise ValueError("a copy would pass the end of CUDA shared memory")
        if not nbytes:
            return
        self._use_device(key[0])
        host = np.frombuffer(self._arena.view(args["at"], nbytes), np.uint8).ctypes.data
        device = opened.pointer + offset
        kinds = self._runtime.cudaMemcpyKind
        target, source, kind = (
            (host, device, kinds.cudaMemcpyDeviceToHost)
            if inward
            else (device, host, kinds.cudaMemcpyHostToDevice)
        )
        stream = self._stream(key[0])
        self._call(self._runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream), "be copied")
        self._call(self._runtime.cudaStreamSynchronize(stream), "be copied")

    def _stream(self, device: int) -> Any:
        if device not in self._streams:
            flags = self._runtime.cudaStreamNonBlocking
            self._streams[device] = self._call(self._runtime.cudaStreamCreateWithFlags(flags), "be copied")
        return self._streams[device]

    def _use_device(self, device: int) -> None:
        self._call(self._runtime.cudaSetDevice(device), "be used: there is no such device")

    def _call(self, result: tuple[Any, ...], what: str) -> Any:
        """The value of a CUDA call; a fault is taken from the driver, so that no later call finds it."""
        error, *values = result
        if error != self._runtime.cudaError_t.cudaSuccess:
            self._runtime.cudaGetLastError()
            raise ValueError(f"CUDA shared memory can't {what}")
        return values[0] if values else None
