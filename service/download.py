"""A stored tensor leaves: receives a hold and the request's headers, hands bytes to the transfer.

What is in the arena goes out from there; what isn't is read from its file in pieces, so that a download
doesn't push tensors in use out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from service import conditional
from service.decode import Form
from service.formats import Tensor, numbers, numpy_dtype
from service.formats.raw import emit_shape
from service.reply import MEDIA, negotiate, tensor_prefix
from service.store import Hold, TensorStore
from service.transfer import CHUNK, Headers, Transfer


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is to be sent: bytes [start, end) of prefix and elements, or nothing of a body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    prefix: bytes
    start: int
    end: int


async def send(
    transfer: Transfer, store: TensorStore, hold: Hold, *, name: str, default: Form = "safetensors"
) -> None:
    """Answer a GET or HEAD with the tensor in the form that Accept chooses; releases the hold.

    `name` is the tensor's in safetensors. Refused: not_acceptable, precondition_failed,
    range_not_satisfiable; lost.
    """
    try:
        row = hold.content.row
        tensor = Tensor(row.dtype, row.shape)
        form = negotiate(transfer.header(b"accept"), default)
        conditional.conditions(transfer.header(b"if-match"), None).check(row.etag)
        tag = conditional.etag(row.etag, form)
        headers = [(b"etag", tag.encode()), (b"vary", b"accept")]
        if conditional.unchanged(transfer.header(b"if-none-match"), row.etag, form):
            await transfer.start(304, headers)
            await transfer.write(b"", more=False)
            return
        headers += [
            (b"content-type", MEDIA[form][0].encode()),
            (b"x-gemm-shape", emit_shape(tensor.shape).encode()),
            (b"x-gemm-dtype", tensor.dtype.encode()),
        ]
        if transfer.scope["method"] != "HEAD":
            await store.contents.bring(hold)
        if form == "json":
            await _send_json(transfer, store, hold, headers)
        else:
            answer = _binary(transfer, tensor, form, headers, name=name, tag=tag)
            await _send_binary(transfer, store, hold, answer)
    finally:
        hold.release()


def _binary(
    transfer: Transfer, tensor: Tensor, form: Form, headers: Headers, *, name: str, tag: str
) -> _Answer:
    prefix = tensor_prefix(tensor, form, name=name)
    length = len(prefix) + tensor.nbytes
    span = None
    if transfer.scope["method"] == "GET":  # of other methods a range means nothing (RFC 9110, 14.2)
        span = conditional.range_of(transfer.header(b"range"), transfer.header(b"if-range"), tag, length)
    start, end = span or (0, length)
    headers = [*headers, (b"accept-ranges", b"bytes"), (b"content-length", str(end - start).encode())]
    if span is not None:
        headers.append((b"content-range", f"bytes {start}-{end - 1}/{length}".encode()))
    return _Answer(206 if span else 200, headers, prefix, start, end)


async def _send_binary(transfer: Transfer, store: TensorStore, hold: Hold, answer: _Answer) -> None:
    head = answer.prefix[answer.start : answer.end]
    first = max(0, answer.start - len(answer.prefix))
    last = max(0, answer.end - len(answer.prefix))
    if transfer.scope["method"] == "HEAD" or not (head or last > first):
        await transfer.start(answer.status, answer.headers)
        await transfer.write(b"", more=False)
        return
    pin = store.contents.resident(hold) if last > first else None
    try:
        # Before the reply begins: where the tensor can't be read now, that can still be said.
        piece = b"" if pin is not None else await store.contents.read(hold, first, min(CHUNK, last - first))
        await transfer.start(answer.status, answer.headers)
        with _uncut(transfer):
            if head:
                await transfer.write(head, more=last > first)
            if pin is not None:
                await transfer.write_view(pin.view()[first:last])
            elif last > first:
                await _send_pieces(transfer, store, hold, piece, first, last)
    finally:
        if pin is not None:
            transfer.on_drained(pin.release)


async def _send_pieces(
    transfer: Transfer, store: TensorStore, hold: Hold, piece: bytes | bytearray, start: int, end: int
) -> None:
    """The elements from `start` on, of which `piece` has been read."""
    while True:
        start += len(piece)
        await transfer.write(piece, more=start < end)
        if start >= end or transfer.gone:
            return
        piece = await store.contents.read(hold, start, min(CHUNK, end - start))


async def _send_json(
    transfer: Transfer, store: TensorStore, hold: Hold, headers: list[tuple[bytes, bytes]]
) -> None:
    """Numbers, with dtype and shape beside them."""
    row = hold.content.row
    if transfer.scope["method"] == "HEAD":
        await transfer.start(200, headers)
        await transfer.write(b"", more=False)
        return
    with await store.contents.load(hold) as pin:
        elements = np.frombuffer(pin.view(), numpy_dtype(row.dtype)).reshape(row.shape)
        head = msgspec.json.encode({"dtype": row.dtype, "shape": row.shape})[:-1] + b',"data":'
        await transfer.start(200, headers)
        with _uncut(transfer):
            await transfer.write(head)
            await transfer.write_pieces(numbers.dumps(elements), b"}")


@contextmanager
def _uncut(transfer: Transfer) -> Iterator[None]:
    """Half a reply must not look whole: what ends the block early cuts the connection."""
    try:
        yield
    except BaseException:
        transfer.abort()
        raise
