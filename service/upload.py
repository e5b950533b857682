"""A tensor's body becomes a slot: receives a transfer and query fields, hands on the tensor in the arena.

safetensors, .npy and raw bodies go from the socket into their place: one copy, two where byte order or Fortran
order must be changed. What can be refused is refused before memory is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.arena import Slot
from service.decode import allocate
from service.errors import ServiceError
from service.formats import Tensor, npy, safetensors
from service.formats.base import checked
from service.formats.raw import parse_shape
from service.model import LONGEST_SECONDS, DTypeName, Finite
from service.query import RAW, SAFETENSORS, media_of
from service.reply import MEDIA
from service.services import Services
from service.transfer import Transfer

#: Refuses a tensor, before its bytes are read.
Admit = Callable[[Tensor], Awaitable[None]]

_NPY_START = 12  # bytes that tell the length of a .npy header
#: Longest name of a tensor within a safetensors body.
TENSOR_CHARACTERS = 256
_SKIP = 1 << 20  # bytes of other tensors that are read at a time


class PutQuery(BaseModel):
    """Query fields of PUT. A raw body needs dtype and shape; the other forms bring their own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: DTypeName | None = Field(
        None, description="Element type of a raw body; for .npy, bf16 says what 2-byte void means"
    )
    shape: str | None = Field(None, description="Shape of a raw body, as 2x3 or 2,3")
    tensor: str | None = Field(
        None,
        max_length=TENSOR_CHARACTERS,
        description="Which tensor of a safetensors body; not needed where it has one",
    )
    ttl_seconds: Annotated[Finite, Field(gt=0, le=LONGEST_SECONDS)] | None = Field(
        None, description="Time to live; unset: until it is deleted"
    )


class Upload:
    """One body on its way into a slot."""

    def __init__(
        self, transfer: Transfer, services: Services, owner: str, query: PutQuery, admit: Admit
    ) -> None:
        self.transfer = transfer
        self.services = services
        self.owner = owner
        self.query = query
        self._admit = admit

    async def receive(self) -> tuple[Slot, Tensor]:
        """The tensor in a slot of the caller's, the whole body read."""
        transfer = self.transfer
        media = media_of(transfer)
        transfer.bound(self.services.settings.max_body_bytes)
        if media == RAW:
            return await self._raw()
        if media in MEDIA["safetensors"]:
            return await self._safetensors()
        if media in MEDIA["npy"]:
            return await self._npy()
        offered = f"{SAFETENSORS}, {MEDIA['npy'][0]}, {RAW}"
        raise ServiceError(
            "unsupported_media_type",
            f"Content-Type {media[:80] or '(none)'} isn't one of {offered}",
            field="content-type",
            headers={"Accept": offered},
        )

    async def _raw(self) -> tuple[Slot, Tensor]:
        query = self.query
        self._refuse("tensor")
        if query.dtype is None or query.shape is None:
            missing = "dtype" if query.dtype is None else "shape"
            raise ServiceError("invalid", f"{missing}: a raw body needs it", field=missing)
        tensor = Tensor(query.dtype, parse_shape(query.shape, field="shape"))
        length = self.transfer.content_length
        if length is not None and length != tensor.nbytes:
            raise ServiceError(
                "malformed", f"the body has {length} bytes, its shape takes {tensor.nbytes}", field="body"
            )
        return await self._into_slot(tensor), tensor

    async def _safetensors(self) -> tuple[Slot, Tensor]:
        self._refuse("dtype", "shape")
        length = safetensors.header_length(await self.transfer.read(safetensors.LENGTH))
        header = safetensors.parse(await self.transfer.read(length))
        self._bound(header.nbytes)
        entry = self._choose(header)
        slot = await self._into_slot(entry.tensor, before=entry.begin, after=header.nbytes - entry.end)
        return slot, entry.tensor

    def _choose(self, header: safetensors.Header) -> safetensors.Entry:
        name = self.query.tensor
        if name is None and len(header.entries) == 1:
            return header.entries[0]
        if name is None:
            raise ServiceError(
                "invalid", f"tensor: the body has {len(header.entries)}; say which", field="tensor"
            )
        entry = header.entry(name)
        if entry is None:
            raise ServiceError("invalid", f"tensor: the body has no {name[:64]!r}", field="tensor")
        return entry

    async def _npy(self) -> tuple[Slot, Tensor]:
        self._refuse("shape", "tensor")
        prefix = await self.transfer.read(_NPY_START)
        rest = npy.header_length(prefix) - len(prefix)
        if rest > 0:
            prefix += await self.transfer.read(rest)
        header = npy.parse(prefix, dtype=self.query.dtype, field="body")
        if header.plain:
            return await self._into_slot(header.tensor), header.tensor
        nbytes = header.tensor.nbytes
        self.services.slots.check(self.owner, [{"body": nbytes}, {"its conversion": nbytes}])
        given = await self._into_slot(header.tensor)
        try:
            slot = allocate(self.services, nbytes, owner=self.owner, state="request")
            try:
                await asyncio.to_thread(npy.convert, header, given.view(nbytes), slot.view(nbytes))
            except BaseException:
                slot.release()
                raise
        finally:
            given.release()
        return slot, header.tensor

    async def _into_slot(self, tensor: Tensor, *, before: int = 0, after: int = 0) -> Slot:
        checked(tensor.dtype, tensor.shape, field="body")
        self._bound(tensor.nbytes)
        self.services.store.contents.check_room(tensor.nbytes)
        await self._admit(tensor)
        slot = allocate(self.services, tensor.nbytes, owner=self.owner, state="request")
        try:
            await self._skip(before)
            await self.transfer.receive_into(slot.view(tensor.nbytes))
            await self._skip(after)
            await self.transfer.finish()
        except BaseException:
            slot.release()
            raise
        return slot

    async def _skip(self, nbytes: int) -> None:
        """Read other tensors of the file and drop them."""
        scratch = memoryview(bytearray(min(nbytes, _SKIP)))
        while nbytes:
            nbytes -= await self.transfer.receive_into(scratch[: min(nbytes, _SKIP)])

    def _bound(self, nbytes: int) -> None:
        """A chunked body's length is told by its header alone."""
        limit = self.services.settings.max_body_bytes
        if nbytes > limit:
            raise ServiceError(
                "too_large", f"tensors of {nbytes} bytes are above the limit", field="body", limit=limit
            )

    def _refuse(self, *fields: str) -> None:
        for field in fields:
            if getattr(self.query, field) is not None:
                raise ServiceError("invalid", f"{field}: doesn't go with this Content-Type", field=field)
