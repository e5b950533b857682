"""Who may name which memory: receives a registration as a client words it, hands on a region or a refusal."""

from __future__ import annotations

import binascii
from typing import Any

from pydantic import BaseModel, ConfigDict

from service.errors import ServiceError
from service.inference import cuda_memory, system_memory
from service.inference.cuda_memory import CudaMemory
from service.inference.regions import Memory
from service.inference.request import Bytes
from service.inference.system_memory import SystemMemory
from service.keys import Principal
from service.model import validate
from service.services import Services


class _System(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    key: str
    offset: Bytes = 0
    byte_size: Bytes


class _Handle(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    b64: str


class _Cuda(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    raw_handle: _Handle
    device_id: Bytes
    byte_size: Bytes


async def register(
    services: Services, principal: Principal, kind: str, name: str, document: dict[str, Any]
) -> None:
    """Register memory of a kind under a name; the document is the protocol's."""
    if not services.settings.shared_memory:
        raise ServiceError(
            "not_implemented", "shared memory is off here; the setting shared_memory turns it on"
        )
    opening = _system if kind == system_memory.KIND else _cuda

    async def open_it() -> Memory:
        return await opening(services, document)

    await services.inference.regions.register(principal, name, open_it)


async def _system(services: Services, document: dict[str, Any]) -> Memory:
    asked = validate(_System, document)
    keys = services.settings.shared_memory_keys
    return await SystemMemory.open(asked.key, asked.offset, asked.byte_size, keys)


async def _cuda(services: Services, document: dict[str, Any]) -> Memory:
    asked = validate(_Cuda, document)
    try:
        handle = binascii.a2b_base64(asked.raw_handle.b64.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ServiceError(
            "invalid", f"raw_handle: isn't base64 of {cuda_memory.HANDLE_BYTES} bytes", field="raw_handle"
        ) from None
    return await CudaMemory.open(services.supervisor, handle, asked.device_id, asked.byte_size)
