"""Arrays in a GPU's memory: receives torch tensors, hands on their bytes, lent by a CUDA IPC handle or brought here.

A service that computes on the same GPU reads and writes them where they are. Everyone else gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from service import ipc


class OnDevice:
    """The bytes of a contiguous torch tensor on a GPU; `nbytes` is their number."""

    __slots__ = ("nbytes", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.nbytes: int = value.nbytes

    @property
    def uuid(self) -> str:
        """The GPU's, as the service tells it."""
        return _uuid(self.value.get_device())

    def lend(self) -> ipc.Exported | None:
        """A handle; None for memory that can't be lent. What is queued may not be done yet: see `settle`."""
        pointer = self.value.data_ptr()
        try:
            return ipc.exported(pointer) or self._export(pointer)
        except ipc.IpcError:  # such as torch's expandable segments
            return None

    def _export(self, pointer: int) -> ipc.Exported:
        import torch

        with torch.cuda.device(self.value.device):
            return ipc.export(pointer)

    def host(self) -> memoryview:
        """A copy in host memory."""
        import torch

        whole = self.value.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        return whole.data if whole.size else memoryview(b"")

    def fill(self, array: np.ndarray[Any, Any]) -> None:
        """Copy an array of the same bytes into it."""
        import torch

        source = torch.from_numpy(array.reshape(-1).view(np.uint8))
        self.value.detach().view(-1).view(torch.uint8).copy_(source)


Bytes = bytes | memoryview | OnDevice


def settle(tensors: Iterable[Bytes]) -> None:
    """Wait until all is done that is queued on the current streams of the GPUs that these are on."""
    indices = {each.value.get_device() for each in tensors if isinstance(each, OnDevice)}
    if not indices:
        return
    import torch

    for index in indices:
        stream = torch.cuda.current_stream(index)
        if not stream.query():  # most have nothing queued, which takes less to ask than to wait for
            stream.synchronize()


@cache
def _uuid(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def nbytes_of(data: Bytes) -> int:
    """How many bytes, without a copy."""
    return len(data) if isinstance(data, bytes) else data.nbytes


def on_host(data: Bytes) -> memoryview:
    """Bytes that a socket takes."""
    return data.host() if isinstance(data, OnDevice) else memoryview(data).cast("B")
