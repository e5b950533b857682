"""Stored tensors on this GPU: receives a service's place and a name, hands on a torch tensor over its memory."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, NamedTuple, Self

from service import ipc
from service.client.errors import GemmError
from service.client.local import LocalConnection, Place, open_session
from service.client.shared import Arrays
from service.client.wire import Waiting
from service.local.messages import Loan


class Granted(NamedTuple):
    """A loan, and the session that it ends with."""

    connection: LocalConnection
    loan: Loan


def ask(place: Place, key: str, arrays: Arrays, name: str) -> Waiting:
    """Borrow a stored tensor in a session of its own. Returns a Granted."""
    connection = yield from open_session(place, key, arrays)
    try:
        return Granted(connection, (yield from connection.borrow(name)))
    except BaseException:
        connection.close()
        raise


class Borrowed:
    """A stored tensor in the memory of the GPU that computes for the service: `value`, a torch tensor.

    It is a copy of the caller's own: what is written there is seen by nobody. It ends with `close` or the block
    (`with`, or `async with`, which doesn't hold the event loop up); what still refers to `value` must not be used
    after that.
    """

    def __init__(self, granted: Granted) -> None:
        """Open it; GemmError, and the loan is over, where that can't be done."""
        self._connection: LocalConnection | None = granted.connection
        try:
            self._open(granted.loan)
        except BaseException:
            granted.connection.close()
            raise

    def _open(self, loan: Loan) -> None:
        import torch

        self.etag = loan.etag
        index = _device(loan.device)
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context that the driver's library needs
            try:
                self._pointer, nbytes = ipc.open_handle(loan.handle)
            except ipc.IpcError as error:
                raise GemmError(f"the tensor's memory can't be opened here: {error}") from None
            whole = torch.as_tensor(ipc.Pointer(self._pointer, nbytes), device=f"cuda:{index}")
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
        self.value: Any = whole[: loan.nbytes].view(kinds[loan.dtype]).view(loan.shape)

    def close(self) -> None:
        """Give it back, once what was queued on it is done; again is no harm."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._let_go()
            connection.close()

    def _let_go(self) -> None:
        import torch

        with torch.cuda.device(self.value.device):
            torch.cuda.synchronize()
            self.value = None
            ipc.close_handle(self._pointer)

    @classmethod
    async def opened(cls, granted: Granted) -> Self:
        """Open it in a thread, since torch and CUDA take their time; nothing is left open for who is cancelled."""
        opening = asyncio.ensure_future(asyncio.to_thread(cls, granted))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(asyncio.to_thread(self.close))


def _close_unwanted(opening: asyncio.Task[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _device(uuid: str) -> int:
    """The index of a GPU in this process."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise GemmError(f"GPU {uuid}, where the service computes, can't be seen here")
