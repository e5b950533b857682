"""Device memory of clients on this host: receives an IPC handle, hands on its bytes through the worker.

The front knows no CUDA: the worker opens the handle, checks its size, and copies between it and the arena. The
handle goes along with each question, so a worker that was started again opens it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from service.decode import Bound
from service.errors import ServiceError

KIND = "cuda"
#: Bytes of a cudaIpcMemHandle_t.
HANDLE_BYTES = 64
#: Seconds in which a copy, or opening a handle, is done on any working device.
_PATIENCE = 30.0

Ask = Callable[[str, dict[str, Any], float], Awaitable[Any]]
log = logging.getLogger("gemm.inference")


class CudaMemory:
    """Memory of another process on device `device`."""

    kind = KIND

    def __init__(self, ask: Ask, handle: bytes, device: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._ask = ask
        self._device = device
        self._arguments = {"handle": handle, "device": device, "size": nbytes}

    @classmethod
    async def open(cls, ask: Ask, handle: bytes, device: int, nbytes: int) -> CudaMemory:
        """The first `nbytes` of the allocation that the handle names; ServiceError where they can't be had."""
        if len(handle) != HANDLE_BYTES:
            raise _wrong(f"raw_handle: has {len(handle)} bytes, a CUDA IPC handle has {HANDLE_BYTES}")
        if nbytes == 0:
            raise _wrong("byte_size: a region has 1 byte or more")
        memory = cls(ask, handle, device, nbytes)
        try:
            await ask("region_open", memory._arguments, _PATIENCE)
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
        """Let the worker close the handle; one that is gone has closed it."""
        try:
            await self._ask("region_close", self._arguments, _PATIENCE)
        except ServiceError as error:
            log.info("CUDA shared memory was not closed: %s", error.detail)

    async def _copy(self, what: str, offset: int, bound: Bound) -> None:
        """Ask for the copy, and don't return before it has ended, even if cancelled: it touches the slot."""
        operand = bound.operand
        place = {"offset": offset, "at": operand.offset, "nbytes": operand.nbytes}
        asked = asyncio.ensure_future(self._ask(what, {**self._arguments, **place}, _PATIENCE))
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
