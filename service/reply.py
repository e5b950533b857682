"""A finished product becomes a reply: receives the request and what happened, hands bytes to the transfer.

The client's Accept chooses JSON, safetensors, .npy or raw; without one, D comes in the form the operands had.
Binary forms leave straight from the arena slot, which is freed once the socket has drained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec
import numpy as np

from service.decode import Bound, Form, GemmRequest
from service.errors import ServiceError
from service.formats import Tensor, npy, numbers, numpy_dtype, safetensors
from service.formats.raw import emit_shape
from service.outcome import Outcome
from service.query import JSON, RAW, SAFETENSORS
from service.transfer import Transfer

NPY = "application/x-npy"

#: Media types by form, the one that is sent first.
MEDIA: dict[Form, tuple[str, ...]] = {
    "json": (JSON,),
    "safetensors": (SAFETENSORS, "application/x-safetensors"),
    "npy": (NPY, "application/npy", "application/x-numpy"),
    "raw": (RAW,),
}


class Stored(Protocol):
    """A tensor that was kept under a handle."""

    @property
    def name(self) -> str: ...
    @property
    def etag(self) -> str: ...
    @property
    def durable(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Preference:
    """One range of Accept."""

    media: str
    quality: float
    specific: int


@lru_cache(maxsize=256)
def negotiate(accept: str | None, default: Form) -> Form:
    """The form to reply in; ServiceError not_acceptable where Accept allows none."""
    ranges = [_preference(part) for part in (accept or "").split(",") if part.strip()]
    if not ranges:
        return default
    # The request's own form first: it wins among equals.
    forms: list[Form] = [default, *(form for form in MEDIA if form != default)]
    quality, form = max(
        ((max(_quality(media, ranges) for media in MEDIA[form]), form) for form in forms),
        key=lambda pair: pair[0],
    )
    if quality > 0:
        return form
    offered = ", ".join(names[0] for names in MEDIA.values())
    raise ServiceError("not_acceptable", f"Accept allows none of {offered}", field="accept")


def reply_form(transfer: Transfer, request: GemmRequest) -> Form:
    """The form of this request's reply; to be asked before the work is queued."""
    if request.out_handle is not None:
        # What is told of a kept tensor is JSON, also to whoever prefers tensors in another form.
        negotiate(transfer.header(b"accept"), "json")
        return "json"
    form = negotiate(transfer.header(b"accept"), request.form)
    if form == "npy":
        npy.emit(request.plan.out)  # refuses bf16, before any work
    return form


async def send(
    transfer: Transfer, request: GemmRequest, form: Form, outcome: Outcome, *, request_id: str = ""
) -> None:
    """Send D in `form`. Operands and output are released here, the output once nothing refers to it."""
    request.release_operands()
    out = request.out
    try:
        headers = outcome_headers(outcome)
        if form == "json":
            await _send_json(transfer, request, outcome, headers, request_id)
        else:
            await send_tensor(transfer, out.view(), request.plan.out, form, headers, name="d")
    except BaseException:
        # Half a reply must not look whole, and bytes of this slot may still be on their way.
        if transfer.started:
            transfer.abort()
        raise
    finally:
        transfer.on_drained(out.release)


async def send_tensor(
    transfer: Transfer,
    view: memoryview,
    tensor: Tensor,
    form: Form,
    headers: list[tuple[bytes, bytes]],
    *,
    name: str,
    status: int = 200,
) -> None:
    """Send a tensor's bytes in a binary form; `name` is the tensor's in safetensors."""
    prefix = tensor_prefix(tensor, form, name=name)
    length = len(prefix) + len(view)
    await transfer.start(status, [*_tensor_headers(tensor, form, length), *headers])
    if prefix:
        await transfer.write(prefix, more=bool(len(view)))
        if not len(view):
            return
    await transfer.write_view(view)


@lru_cache(1024)  # few different ones come, many times
def _tensor_headers(tensor: Tensor, form: Form, length: int) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"content-type", MEDIA[form][0].encode()),
        (b"content-length", str(length).encode()),
        (b"x-gemm-shape", emit_shape(tensor.shape).encode()),
        (b"x-gemm-dtype", tensor.dtype.encode()),
    )


def tensor_prefix(tensor: Tensor, form: Form, *, name: str) -> bytes:
    """What stands before the elements in a binary form."""
    if form == "safetensors":
        return safetensors.emit({name: tensor})
    return npy.emit(tensor) if form == "npy" else b""


async def send_stored(
    transfer: Transfer,
    request: GemmRequest,
    stored: Stored,
    outcome: Outcome,
    *,
    request_id: str = "",
) -> None:
    """Tell where D was kept."""
    request.release_operands()
    document = stored_document(request, stored, outcome, request_id)
    headers = [*outcome_headers(outcome), (b"etag", f'"{stored.etag}"'.encode("latin-1"))]
    await send_json(transfer, document, headers)


def stored_document(
    request: GemmRequest, stored: Stored, outcome: Outcome, request_id: str
) -> dict[str, Any]:
    """What is told of a D that was kept."""
    out = request.plan.out
    return {
        "out": {"handle": stored.name, "etag": stored.etag, "durable": stored.durable},
        "dtype": out.dtype,
        "shape": out.shape,
        **_told(outcome, request_id),
    }


async def send_json(
    transfer: Transfer,
    document: Mapping[str, Any] | Sequence[Any],
    headers: list[tuple[bytes, bytes]],
    *,
    status: int = 200,
) -> None:
    """Send a small JSON document."""
    body = msgspec.json.encode(document)
    length = (b"content-length", str(len(body)).encode())
    await transfer.start(status, [(b"content-type", JSON.encode()), length, *headers])
    await transfer.write(body, more=False)


def outcome_headers(outcome: Outcome) -> list[tuple[bytes, bytes]]:
    """Variant, reason and times, as every reply carries them."""
    return [(name.encode(), value.encode()) for name, value in outcome_texts(outcome).items()]


def outcome_texts(outcome: Outcome) -> dict[str, str]:
    """The same, for who sends no bytes of HTTP."""
    timing = f"queue;dur={outcome.queue_seconds * 1e3:.3f}, compute;dur={outcome.compute_seconds * 1e3:.3f}"
    return {
        "x-gemm-variant": _plain(outcome.variant),
        "x-gemm-reason": _plain(outcome.reason),
        "server-timing": timing,
    }


def _told(outcome: Outcome, request_id: str) -> dict[str, Any]:
    return {
        "variant": outcome.variant,
        "reason": outcome.reason,
        "why": outcome.why,
        "queue_seconds": outcome.queue_seconds,
        "compute_seconds": outcome.compute_seconds,
        "request_id": request_id,
    }


async def _send_json(
    transfer: Transfer,
    request: GemmRequest,
    outcome: Outcome,
    headers: list[tuple[bytes, bytes]],
    request_id: str,
) -> None:
    """D as numbers. A large one leaves in pieces, each made when the one before was taken."""
    out = request.plan.out
    facts = {"dtype": out.dtype, "shape": out.shape, **_told(outcome, request_id)}
    head, tail = msgspec.json.encode(facts)[:-1] + b',"d":', b"}"
    values = elements(request.out, out)
    kind = (b"content-type", JSON.encode())
    if values.size <= numbers.PIECE:
        body = b"".join((head, *numbers.dumps(values), tail))
        await transfer.start(200, [kind, (b"content-length", str(len(body)).encode()), *headers])
        await transfer.write(body, more=False)
        return
    await transfer.start(200, [kind, *headers])
    await transfer.write(head)
    await transfer.write_pieces(numbers.dumps(values), tail)


def elements(bound: Bound, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor in a slot as an array over its memory."""
    return np.frombuffer(bound.view(), numpy_dtype(tensor.dtype)).reshape(tensor.shape)


@lru_cache(1024)  # names of variants and reasons
def _plain(text: str) -> str:
    """Text that is safe in a header."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)


def _preference(part: str) -> _Preference:
    media, *params = (piece.strip().lower() for piece in part.split(";"))
    quality = 1.0
    for param in params:
        name, _, value = param.partition("=")
        if name.strip() == "q":
            quality = _weight(value.strip())
    kind, _, subtype = media.partition("/")
    return _Preference(media, quality, (kind != "*") + (subtype != "*"))


def _weight(text: str) -> float:
    """A q-value; what can't be read counts as not accepted."""
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return min(max(weight, 0.0), 1.0) if math.isfinite(weight) else 0.0


def _quality(media: str, ranges: list[_Preference]) -> float:
    """Quality that Accept gives a media type: of the most specific range that matches."""
    kind = media.partition("/")[0]
    matching = [one for one in ranges if one.media in (media, f"{kind}/*", "*/*")]
    return max(matching, key=lambda one: one.specific).quality if matching else 0.0
