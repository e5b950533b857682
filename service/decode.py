"""Bytes of a request become a `GemmRequest`: receives a transfer, hands on operands in slots.

Everything that can be refused is refused before memory is taken, and what the headers and the query tell
before the body is read. Tensors of binary forms go from the socket into their place: one copy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from service.arena import Sizes, Slot, Slots
from service.errors import ServiceError
from service.formats import Tensor, numbers, safetensors
from service.messages import Operand, Params
from service.model import Base64, GemmBody, GemmFields, GemmQuery, Handle, validate
from service.plan import NAMES, Limits, Plan, check_present, given_dtype, params_of, plan, unfit
from service.query import JSON, RAW, SAFETENSORS, handle_in, media_of, parse_query, query_fields
from service.raw_plan import Most, bias_of, planned, raw_tensors, sent
from service.regions import Region
from service.store import new_id, tensor_of
from service.transfer import Scope, Transfer
from service.turns import LARGE_JSON, parsing

Form = Literal["json", "safetensors", "npy", "raw"]

#: Operands begin at multiples of this within a slot: what TMA and vector loads like best.
ALIGN = 256

Run = Callable[..., Awaitable[Any]]

_RAW_ONLY = ("a_shape", "b_shape", "c_shape", "dtype", "c_dtype", "bias_dtype")


class BodyLimits(Limits, Protocol):
    """Bounds that decode holds, as Settings names them."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_json_bytes(self) -> int: ...


class Pin(Protocol):
    """A stored tensor that stays as and where it is until released."""

    operand: Operand

    def release(self) -> None: ...


class Sized(Protocol):
    """What is known of a stored tensor."""

    @property
    def nbytes(self) -> int: ...


class Store(Protocol):
    """What decode asks of the tensor store."""

    async def pin(self, owner: str, name: str) -> Pin: ...
    async def head(self, owner: str, name: str) -> Sized: ...
    def reclaim(self, nbytes: int) -> object: ...
    def abandon(self, tensor: str) -> None: ...


class Parts(Protocol):
    """What decode needs of `Services`."""

    @property
    def settings(self) -> BodyLimits: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def store(self) -> Store: ...


class Owner(Protocol):
    """Whose request it is."""

    @property
    def owner(self) -> str: ...


@dataclass(slots=True)
class Bound:
    """An operand in memory, and how to let go of it."""

    operand: Operand
    slot: Slot | Region | None = None
    _release: Callable[[], None] | None = None

    def release(self) -> None:
        """Let go; again is no harm."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def hold(self) -> Callable[[], None]:
        """Keep its memory, whatever becomes of this; call what is returned to let go."""
        assert self.slot is not None
        return self.slot.hold().release

    def view(self) -> memoryview:
        """The operand's bytes, of one that lies in a slot of the arena."""
        assert isinstance(self.slot, Slot)
        start = self.operand.offset - self.slot.offset
        return self.slot.view(start + self.operand.nbytes)[start:]


@dataclass(slots=True)
class GemmRequest:
    """One GEMM, ready to be admitted. Whoever has it releases it, the output once the reply has drained.

    `out_id`: the content's id that D becomes under `out_handle`, given already so that a device may keep D by it.
    """

    params: Params
    plan: Plan
    a: Bound
    b: Bound
    out: Bound
    c: Bound | None = None
    bias: Bound | None = None
    form: Form = "json"
    out_handle: str | None = None
    out_id: str = ""
    durable: bool = False
    ttl_seconds: float | None = None
    deadline: float | None = None
    priority: int = 0
    held: list[Bound] = field(default_factory=list)

    def release_operands(self) -> None:
        """Let go of A, B, C and bias; again is no harm."""
        for bound in self.held:
            bound.release()

    def release(self) -> None:
        """Let go of everything; again is no harm."""
        self.release_operands()
        self.out.release()


async def decode(transfer: Transfer, scope: Scope, services: Parts, principal: Owner) -> GemmRequest:
    """Read and check the request. On refusal nothing stays held."""
    arrived = time.monotonic()
    media = media_of(transfer)
    query: bytes = scope["query_string"]
    decoder = _Decoder(transfer, services, principal.owner, arrived)
    try:
        if media == JSON:
            return await decoder.from_json(query)
        if media == SAFETENSORS:
            return await decoder.from_safetensors(query)
        if media == RAW:
            return await decoder.from_raw(query)
    except BaseException:
        decoder.release()
        raise
    raise ServiceError(
        "unsupported_media_type",
        f"Content-Type {media[:80] or '(none)'} isn't one of {JSON}, {SAFETENSORS}, {RAW}",
        field="content-type",
        headers={"Accept": f"{JSON}, {SAFETENSORS}, {RAW}"},
    )


def allocate(services: Parts, nbytes: int, *, owner: str, state: str) -> Slot:
    """A slot, for which cached tensors may have to go."""
    try:
        return services.slots.allocate(nbytes, owner=owner, state=state)
    except ServiceError as error:
        if error.code != "no_room" or not services.store.reclaim(nbytes):
            raise
        return services.slots.allocate(nbytes, owner=owner, state=state)


class Arriving(Protocol):
    """A request's body, read once, front to back; `Transfer` is one."""

    @property
    def content_length(self) -> int | None:
        """Bytes in all, where that is known."""
        ...

    async def fill(self, view: memoryview) -> int: ...
    async def more(self) -> bool: ...


@asynccontextmanager
async def json_text(
    body: Arriving, services: Parts, owner: str, limit: int, length: int | None = None
) -> AsyncIterator[bytearray | memoryview]:
    """JSON of at most `limit` bytes, for the length of a block: all of the body, or the `length` that it begins with.

    A long one is in the arena meanwhile. Raises ServiceError: malformed, too_large, no_room.
    """
    size = length if length is not None else body.content_length
    short = bytearray(LARGE_JSON if size is None else min(LARGE_JSON, size))
    n = await body.fill(memoryview(short))
    if n < min(len(short), length or 0):
        raise _cut_short()
    if n == size or (length is None and not await body.more()):
        del short[n:]
        yield short
        return
    if size is None:  # room for as much as may come, of what can be had at all
        limit = min(limit, services.slots.share)
    size = min(limit, size or limit)
    slot = allocate(services, size, owner=owner, state="request")
    try:
        view = slot.view(size)
        view[:n] = short
        n += await body.fill(view[n:])
        if length is None and await body.more():
            raise ServiceError("too_large", "the JSON is above the limit", field="body", limit=limit)
        if n < (length or 0):
            raise _cut_short()
        yield view[:n]
    finally:
        slot.release()


def _cut_short() -> ServiceError:
    return ServiceError("malformed", "the body is cut short within its JSON", field="body")


class Operands:
    """What one request holds while it is decoded, to be given back if it is refused."""

    def __init__(self, services: Parts, owner: str, arrived: float) -> None:
        self.services = services
        self.limits = services.settings
        self.most = Most(self.limits.max_output_bytes, self.limits.max_flops)
        self.owner = owner
        self.arrived = arrived
        self.bounds: dict[str, Bound] = {}
        self.out: Bound | None = None

    def release(self) -> None:
        """Give everything back."""
        for bound in self.bounds.values():
            bound.release()
        if self.out is not None:
            self.out.release()

    async def pin(self, name: str, handle: str) -> Tensor:
        """Take a stored tensor as the operand `name`."""
        try:
            pin = await self.services.store.pin(self.owner, handle)
        except ServiceError as error:
            error.field = error.field or name
            if error.code == "no_room":
                nbytes = (await self.services.store.head(self.owner, handle)).nbytes
                self.services.slots.check(self.owner, (), [*self._stored(), {name: nbytes}])
            raise
        self.bounds[name] = Bound(pin.operand, None, pin.release)
        return Tensor(pin.operand.dtype, tuple(pin.operand.shape))

    def _stored(self) -> list[Sizes]:
        """Bytes of the stored operands, each tensor once, whichever operands it is."""
        pinned = {name: bound.operand for name, bound in self.bounds.items() if bound.operand.tensor}
        names = {operand.tensor: name for name, operand in reversed(pinned.items())}
        return [{name: pinned[name].nbytes} for name in names.values()]

    async def pin_references(self, fields: GemmQuery) -> dict[str, Tensor]:
        """Tensors of the operands that are named rather than sent."""
        tensors = {}
        for name in NAMES:
            handle = handle_in(getattr(fields, name))
            if handle is not None:
                tensors[name] = await self.pin(name, handle)
        return tensors

    def bound_total(self, nbytes: int) -> None:
        """Bound a body whose length only its shapes tell."""
        limit = self.limits.max_body_bytes
        if nbytes > limit:
            raise ServiceError(
                "too_large", f"tensors of {nbytes} bytes are above the limit", field="body", limit=limit
            )

    def place(self, tensors: Mapping[str, Tensor], made: Plan) -> None:
        """Take memory for the operands, one slot, and for D, another. too_large where there never is enough."""
        sizes = {name: -(-tensor.nbytes // ALIGN) * ALIGN for name, tensor in tensors.items()}
        out = made.out
        own = [{"out": out.nbytes}, sizes] if tensors else [{"out": out.nbytes}]
        self.services.slots.check(self.owner, own, self._stored())
        slot = allocate(self.services, out.nbytes, owner=self.owner, state="reply")
        self.out = Bound(Operand(slot.offset, out.nbytes, out.dtype, out.shape), slot, slot.release)
        if not tensors:
            return
        slot = allocate(self.services, sum(sizes.values()), owner=self.owner, state="request")
        offset = slot.offset
        for name, tensor in tensors.items():
            operand = Operand(offset, tensor.nbytes, tensor.dtype, tensor.shape)
            self.bounds[name] = Bound(operand, slot.hold(), slot.release)
            offset += sizes[name]
        slot.release()

    def request(
        self,
        fields: GemmFields,
        made: Plan,
        form: Form,
        out_handle: str | None,
        params: Params | None = None,
    ) -> GemmRequest:
        """All operands are there: what is to be computed."""
        if params is None:
            params = params_of(fields, made)
        late = fields.deadline_ms
        assert self.out is not None
        out_id = ""
        if out_handle is not None and not fields.durable:
            out_id = new_id()
            self._may_stay(tensor_of(self.owner, out_handle, out_id))
        return GemmRequest(
            params=params,
            plan=made,
            a=self.bounds["a"],
            b=self.bounds["b"],
            c=self.bounds.get("c"),
            bias=self.bounds.get("bias"),
            out=self.out,
            form=form,
            out_handle=out_handle,
            out_id=out_id,
            durable=fields.durable,
            ttl_seconds=fields.ttl_seconds,
            deadline=None if late is None else self.arrived + late / 1000,
            priority=fields.priority,
            held=list(self.bounds.values()),
        )

    def _may_stay(self, tensor: str) -> None:
        """D may be kept by a device under this name; who lets go of its memory before it is stored forgets it."""
        assert self.out is not None
        let_go = self.out.release

        def release() -> None:
            let_go()
            self.services.store.abandon(tensor)

        operand = msgspec.structs.replace(self.out.operand, tensor=tensor)
        self.out = Bound(operand, self.out.slot, release)


class _Decoder(Operands):
    """One request on its way in over HTTP."""

    def __init__(self, transfer: Transfer, services: Parts, owner: str, arrived: float) -> None:
        super().__init__(services, owner, arrived)
        self.transfer = transfer

    # -- the three forms --------------------------------------------

    async def from_raw(self, query: bytes) -> GemmRequest:
        """A‖B‖C‖bias, each as long as the query says."""
        fields = query_fields(query)
        self.transfer.bound(self.limits.max_body_bytes)
        length = self.transfer.content_length
        known = sent(query, length)
        if known is not None:
            here = known.here
            self._check_length(fields, {}, here, length)
            made, params = planned(known, self.most)
        else:
            tensors = await self.pin_references(fields)
            here = raw_tensors(fields, tensors, length)
            self._check_length(fields, tensors, here, length)
            made, params = plan(fields, {**tensors, **here}, self.limits), None
        await self._receive(here, made)
        return self.request(fields, made, "raw", handle_in(fields.out), params)

    async def from_safetensors(self, query: bytes) -> GemmRequest:
        """A header, then the tensors in any order."""
        fields = query_fields(query)
        for name in _RAW_ONLY:
            if getattr(fields, name) is not None:
                raise unfit(name, f"goes with {RAW}; safetensors says shape and dtype itself")
        self.transfer.bound(self.limits.max_body_bytes)
        tensors = await self.pin_references(fields)
        length = safetensors.header_length(await self.transfer.read(safetensors.LENGTH))
        header = safetensors.parse(await self.transfer.read(length), names=NAMES)
        here = {entry.name: entry.tensor for entry in header.entries}
        self.bound_total(header.nbytes)
        check_present(tensors, here)
        made = plan(fields, tensors | here, self.limits)
        await self._receive(here, made)
        return self.request(fields, made, "safetensors", handle_in(fields.out))

    async def from_json(self, query: bytes) -> GemmRequest:
        """Operands as numbers, base64 or handles."""
        for name in parse_query(query):
            raise unfit(name[:64], "stands in the JSON body, not in the query")
        limit = min(self.limits.max_json_bytes, self.limits.max_body_bytes)
        self.transfer.bound(limit)
        async with (
            json_text(self.transfer, self.services, self.owner, limit) as text,
            parsing(text) as document,
        ):
            run: Run = _run if len(text) <= LARGE_JSON else asyncio.to_thread
            body = validate(GemmBody, document)
            tensors, data = await self._json_operands(body, run)
        # The text has left the arena, so operands and D may take the owner's whole share.
        made = plan(body, tensors, self.limits)
        self.place({name: tensors[name] for name in data}, made)
        for name, source in data.items():
            view = self.bounds[name].view()
            view[:] = source if isinstance(source, bytes) else source.reshape(-1).view("u1").data
        handle = body.out.handle if isinstance(body.out, Handle) else None
        return self.request(body, made, "json", handle)

    async def _json_operands(self, body: GemmBody, run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All operands, and the data of those that were sent."""
        tensors: dict[str, Tensor] = {}
        data: dict[str, Any] = {}
        for name in NAMES:
            operand = getattr(body, name)
            if isinstance(operand, Handle):
                tensors[name] = await self.pin(name, operand.handle)
            elif isinstance(operand, Base64):
                decoded = partial(numbers.base64, operand.model_dump(), field=name)
                tensors[name], data[name] = await run(decoded)
        for name in NAMES:
            operand = getattr(body, name)
            if isinstance(operand, list):
                dtype = given_dtype(tensors)
                if name in ("c", "bias"):  # cast to the compute type anyway, so nothing is lost on the way
                    dtype = "fp64" if dtype == "fp64" else "fp32"
                array = await run(partial(numbers.taken, operand, dtype, field=name))
                tensors[name], data[name] = Tensor(dtype, array.shape), array
        return tensors, data

    # -- parts --------------------------------------------

    async def _receive(self, tensors: Mapping[str, Tensor], made: Plan) -> None:
        self.place(tensors, made)
        await self.transfer.receive_into(*self._runs(tensors))
        await self.transfer.finish()

    def _check_length(
        self,
        fields: GemmQuery,
        pinned: Mapping[str, Tensor],
        here: Mapping[str, Tensor],
        length: int | None,
    ) -> None:
        """A body of `length` has the tensors that the query says are in it, and nothing more."""
        total = sum([tensor.nbytes for tensor in here.values()])
        self.bound_total(total)
        if length is None or length == total:
            return
        parts = ", ".join(f"{name} {tensor.nbytes}" for name, tensor in here.items())
        told = f"the body has {length} bytes, the shapes in the query take {total} ({parts})"
        if length > total and "bias" not in here and (bias := bias_of(fields, {**pinned, **here})):
            told += f"; a bias of {bias.shape[0]} × {bias.dtype} would take {bias.nbytes} more"
        raise ServiceError("malformed", told, field="body")

    def _runs(self, names: Iterable[str]) -> list[memoryview]:
        """Where these go, one after the other: as few pieces as their places allow, since each is a read of its own."""
        runs: list[tuple[int, int]] = []
        for operand in (self.bounds[name].operand for name in names):
            start, end = operand.offset, operand.offset + operand.nbytes
            if runs and runs[-1][1] == start:
                start, _ = runs.pop()
            runs.append((start, end))
        return [self.services.slots.arena.view(start, end - start) for start, end in runs]


async def _run(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work` here."""
    return work(*args)
