"""Device memory of clients on this host: receives an IPC handle, hands on its bytes through the worker.

The front knows no CUDA: the worker opens the handle, checks its size, and copies between it and the arena. The
handle goes along with each question, so a worker that was started again opens it again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from service.decode import Bound
from service.errors import ServiceError

KIND = "cuda"
#: Bytes of a cudaIpcMemHandle_t.
HANDLE_BYTES = 64
#: Seconds in which a copy, or opening a handle, is done on any working device.
_PATIENCE = 30.0


class Workers(Protocol):
    """The supervisor, as far as it is needed here."""

    async def ask(self, what: str, args: dict[str, Any], timeout: float) -> Any:
        """Ask a worker; it may be another one the next time."""

    async def tell_all(self, what: str, args: dict[str, Any], timeout: float) -> None:
        """Ask all of them what has no answer."""


class CudaMemory:
    """Memory of another process on device `device`."""

    kind = KIND

    def __init__(self, workers: Workers, handle: bytes, device: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._workers = workers
        self._device = device
        self._arguments = {"handle": handle, "device": device, "size": nbytes}

    @classmethod
    async def open(cls, workers: Workers, handle: bytes, device: int, nbytes: int) -> CudaMemory:
        """The first `nbytes` of the allocation that the handle names; ServiceError where they can't be had."""
        if len(handle) != HANDLE_BYTES:
            raise _wrong(f"raw_handle: has {len(handle)} bytes, a CUDA IPC handle has {HANDLE_BYTES}")
        if nbytes == 0:
            raise _wrong("byte_size: a region has 1 byte or more")
        memory = cls(workers, handle, device, nbytes)
        try:
            await workers.ask("region_open", memory._arguments, _PATIENCE)
        except ServiceError as error:
            if error.code == "unsupported":
                raise ServiceError("not_implemented", error.detail) from None
            raise
        return memory

    def told(self) -> dict[str, Any]:
        """Its status."""
        return {"device_id": self._device, "byte_size": self.nbytes}

    async def read(self, offset: int, target: Bound) -> None:
        """Fill the operand."""
        await self._copy("region_read", offset, target)

    async def write(self, offset: int, source: Bound) -> None:
        """Copy the result."""
        await self._copy("region_write", offset, source)

    async def close(self) -> None:
        """Let the workers close the handle; one that is gone has closed it."""
        await self._workers.tell_all("region_close", self._arguments, _PATIENCE)

    async def _copy(self, what: str, offset: int, bound: Bound) -> None:
        """Ask for the copy, and don't return before it has ended, even if cancelled: it touches the slot."""
        operand = bound.operand
        place = {"offset": offset, "at": operand.offset, "nbytes": operand.nbytes}
        asked = asyncio.ensure_future(self._workers.ask(what, {**self._arguments, **place}, _PATIENCE))
        cancelled: asyncio.CancelledError | None = None
        while not asked.done():
            try:
                await asyncio.wait([asked])
            except asyncio.CancelledError as news:
                cancelled = news
        error = asked.exception()
        if isinstance(error, ServiceError) and error.code == "no_worker" and bound.slot is not None:
            # Nobody knows whether the copy goes on: its slot is never used again.
            bound.slot.hold()
        if cancelled is not None:
            raise cancelled
        if error is not None:
            raise error


def _wrong(detail: str) -> ServiceError:
    return ServiceError("invalid", detail, field=detail.partition(":")[0])
