"""Stored tensors on this GPU: receives a session and a name, hands on a torch tensor over the service's memory."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from service import ipc
from service.client.errors import GemmError
from service.client.local import LocalConnection
from service.local.messages import Loan


class Borrowed:
    """A stored tensor in the memory of the GPU that computes for the service: `value`, a torch tensor.

    It is a copy of the caller's own: what is written there is seen by nobody. It ends with `close` or the block;
    what still refers to `value` must not be used after that.
    """

    def __init__(self, connection: LocalConnection, loan: Loan) -> None:
        import torch

        self.etag = loan.etag
        self._connection: LocalConnection | None = connection
        index = _device(loan.device)
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context that the driver's library needs
            try:
                self._pointer, nbytes = ipc.open_handle(loan.handle)
            except ipc.IpcError as error:
                connection.close()
                raise GemmError(f"the tensor's memory can't be opened here: {error}") from None
            whole = torch.as_tensor(ipc.Pointer(self._pointer, nbytes), device=f"cuda:{index}")
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
        self.value: Any = whole[: loan.nbytes].view(kinds[loan.dtype]).view(loan.shape)

    def close(self) -> None:
        """Give it back, once what was queued on it is done; again is no harm."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        import torch

        with torch.cuda.device(self.value.device):
            torch.cuda.synchronize()
            self.value = None
            ipc.close_handle(self._pointer)
        connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _device(uuid: str) -> int:
    """The index of a GPU in this process."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise GemmError(f"GPU {uuid}, where the service computes, can't be seen here")
