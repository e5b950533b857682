"""Memory as a GPU sees it: receives the arena and clients' regions, hands on each as a tensor of bytes.

Host memory is page-locked, so that copies run at the full rate and beside kernels. Device memory of another
process is opened by its CUDA IPC handle, once however often it was lent, and used where it lies.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from service import ipc
from service.drivers.flight import Stay
from service.messages import Map

log = logging.getLogger("gemm.worker")


@dataclass(slots=True)
class _Opened:
    """An allocation of another process, and in how many regions it is."""

    pointer: int
    data: Any
    uses: int = 0


class Lent:
    """Regions by number, 0 the arena. `data` has each as a tensor of bytes."""

    def __init__(self, torch: Any, index: int) -> None:
        self._torch = torch
        self._index = index
        self.data: dict[int, Any] = {}
        #: Of regions on the device: what was made over parts of them, for whoever makes it; gone with any region.
        self.views: dict[object, Stay] = {}
        self._handles: dict[int, bytes] = {}
        self._opened: dict[bytes, _Opened] = {}

    def on_device(self, region: int) -> bool:
        """Whether a region is device memory."""
        return region in self._handles

    def add_host(self, region: int, memory: memoryview) -> None:
        """Page-lock `memory`; without that it only is slower."""
        data = self._torch.frombuffer(memory, dtype=self._torch.uint8)
        status = int(self._torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0))
        if status:
            log.warning(
                "%d bytes can't be page-locked (CUDA error %d): copies are slower", len(memory), status
            )
        self.data[region] = data

    def add_device(self, message: Map) -> None:
        """Open device memory. ValueError where the handle, its size or its device aren't right."""
        opened = self._opened.get(message.handle) or self._open(message.handle)
        if message.nbytes > opened.data.numel():
            self._close(message.handle)
            raise ValueError(f"the allocation has {opened.data.numel()} bytes, {message.nbytes} were lent")
        opened.uses += 1
        self._handles[message.region] = message.handle
        self.data[message.region] = opened.data[: message.nbytes]

    def remove(self, region: int) -> None:
        """Let a region go."""
        data = self.data.pop(region, None)
        self.views.clear()
        handle = self._handles.pop(region, None)
        if handle is not None:
            self._opened[handle].uses -= 1
            self._close(handle)
        elif data is not None:
            self._torch.cuda.cudart().cudaHostUnregister(data.data_ptr())

    def _open(self, handle: bytes) -> _Opened:
        try:
            pointer, nbytes = ipc.open_handle(handle)
        except ipc.IpcError as error:
            raise ValueError(str(error)) from None
        try:
            opened = _Opened(pointer, self._torch.as_tensor(ipc.Pointer(pointer, nbytes), device="cuda"))
        except (RuntimeError, TypeError) as error:
            ipc.close_handle(pointer)
            raise ValueError(f"the memory can't be used: {error}") from None
        self._opened[handle] = opened
        if opened.data.device.index != self._index:
            self._close(handle)
            raise ValueError(f"the memory is on GPU {opened.data.device.index}, this worker on {self._index}")
        return opened

    def _close(self, handle: bytes) -> None:
        """Close an allocation that no region is in."""
        opened = self._opened[handle]
        if not opened.uses:
            del self._opened[handle]
            ipc.close_handle(opened.pointer)
