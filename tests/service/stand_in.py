"""A service without a worker: requests go through the real decode and reply, numpy multiplies here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service.arena import Arena, Slots
from service.decode import GemmRequest, decode
from service.errors import ServiceError
from service.formats import Tensor, numpy_dtype
from service.messages import Operand
from service.reply import elements, reply_form, send, send_stored
from service.transfer import ClientGone, Transfer


@dataclass
class Limits:
    max_body_bytes: int = 1 << 20
    max_json_bytes: int = 1 << 20
    max_output_bytes: int = 1 << 20
    max_flops: float = 1e9


@dataclass
class Principal:
    owner: str = "someone"


@dataclass
class Pin:
    operand: Operand
    store: Store

    def release(self) -> None:
        self.store.pins -= 1


@dataclass
class Store:
    """Tensors in "tensor" slots by name."""

    slots: Slots
    operands: dict[str, Operand] = field(default_factory=dict)
    pins: int = 0

    def keep(self, name: str, array: np.ndarray[Any, Any], dtype: str) -> None:
        data = np.ascontiguousarray(array).astype(numpy_dtype(dtype)).tobytes()
        slot = self.slots.allocate(len(data), state="tensor")
        slot.view(len(data))[:] = data
        self.operands[name] = Operand(slot.offset, len(data), dtype, array.shape, f"someone/{name}@1")

    async def pin(self, owner: str, name: str) -> Pin:
        if name not in self.operands:
            raise ServiceError("not_found", f"there is no tensor {name}")
        self.pins += 1
        return Pin(self.operands[name], self)

    def reclaim(self, nbytes: int) -> int:
        return 0

    def abandon(self, tensor: str) -> None:
        pass


@dataclass
class Stored:
    name: str
    etag: str = "e1"
    durable: bool = False


@dataclass
class Outcome:
    variant: str = "numpy"
    reason: str = "only_one"
    why: str = "there is no other"
    queue_seconds: float = 0.001
    compute_seconds: float = 0.002


class Services:
    """Settings, slots and store; what decode needs."""

    def __init__(self, arena_bytes: int = 1 << 24, **limits: Any) -> None:
        self.settings = Limits(**limits)
        self.arena = Arena.create(arena_bytes)
        self.slots = Slots(self.arena)
        self.store = Store(self.slots)

    @property
    def held(self) -> int:
        """Bytes of requests and replies."""
        return self.slots.bytes_by_state["request"] + self.slots.bytes_by_state["reply"]


def compute(services: Services, request: GemmRequest) -> None:
    """D in fp64, rounded once."""
    p = request.params

    def load(operand: Operand) -> np.ndarray[Any, Any]:
        view = services.arena.view(operand.offset, operand.nbytes)
        return np.frombuffer(view, numpy_dtype(operand.dtype)).reshape(operand.shape).astype(np.float64)

    a, b = load(request.a.operand), load(request.b.operand)
    a = a.swapaxes(-1, -2) if p.trans_a else a
    b = b.swapaxes(-1, -2) if p.trans_b else b
    with np.errstate(all="ignore"):
        d = p.alpha * (a @ b)
        if request.c is not None and p.beta:
            d = d + p.beta * load(request.c.operand)
        if request.bias is not None:
            bias = load(request.bias.operand)
            d = d + (bias if p.bias_dim == "n" else bias[:, None])
        if p.activation == "relu":
            d = np.where(d < 0, 0, d)
        elements(request.out, request.plan.out)[...] = d.astype(numpy_dtype(p.out_dtype))


def app(services: Services) -> Any:
    """Plain ASGI: every path is /gemm."""

    async def gemm(scope: Any, receive: Any, send_: Any) -> None:
        if scope["type"] != "http":
            return
        transfer = Transfer.of(scope, receive, send_)
        try:
            request = await decode(transfer, scope, services, Principal())
            try:
                form = reply_form(transfer, request)
                compute(services, request)
            except BaseException:
                request.release()
                raise
            if request.out_handle is not None:
                stored = Stored(request.out_handle, durable=request.durable)
                services.store.keep(
                    stored.name, elements(request.out, request.plan.out), request.params.out_dtype
                )
                request.release()
                await send_stored(transfer, request, stored, Outcome(), request_id="r")
            else:
                await send(transfer, request, form, Outcome(), request_id="r")
        except ClientGone:
            return
        except ServiceError as error:
            body = error.body()
            headers = [
                (b"content-type", b"application/problem+json"),
                (b"content-length", str(len(body)).encode()),
            ]
            await transfer.start(error.status, headers)
            await transfer.write(body, more=False)

    return gemm


def tensor(array: np.ndarray[Any, Any], dtype: str) -> tuple[Tensor, bytes]:
    """An array as a wire tensor."""
    return Tensor(dtype, array.shape), array.astype(numpy_dtype(dtype)).tobytes()
