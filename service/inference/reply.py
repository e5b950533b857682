"""The reply of POST …/infer: receives what was computed, hands JSON and then raw elements to the transfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from service.decode import GemmRequest
from service.formats import numbers
from service.inference.decode import HEADER
from service.inference.encoding import compressed, reply_encoding
from service.inference.models import DATATYPE_OF, OUTPUT, VERSION
from service.inference.request import Inference
from service.outcome import Outcome
from service.reply import elements, outcome_headers
from service.transfer import CHUNK, Transfer


async def send(
    transfer: Transfer,
    inference: Inference,
    request: GemmRequest,
    outcome: Outcome,
    kept: dict[str, Any] | None = None,
) -> None:
    """Send the result. Operands and output are released here, the output once nothing refers to it.

    `kept` is what the reply tells of an output that isn't sent: it is in the store, or in a region.
    """
    request.release_operands()
    try:
        parts = _parts(inference, request, outcome, kept)
        encoding = reply_encoding(transfer.header(b"accept-encoding"))
        if encoding is None:
            await _send(transfer, parts, outcome_headers(outcome))
        else:
            await _send_compressed(transfer, parts, outcome_headers(outcome), encoding)
    except BaseException:
        # Half a reply must not look whole, and bytes of this slot may still be on their way.
        if transfer.started:
            transfer.abort()
        raise
    finally:
        transfer.on_drained(request.out.release)


def document_of(
    inference: Inference,
    request: GemmRequest,
    outcome: Outcome,
    *,
    follows: int | None = None,
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The reply's JSON; `follows`: D comes after it in so many bytes.

    Only then D has parameters: C++ clients expect binary_data_size in them and fail without. What else there is to
    tell stands in those of the reply.
    """
    out = request.plan.out
    output: dict[str, Any] = {"name": OUTPUT, "datatype": DATATYPE_OF[out.dtype], "shape": list(out.shape)}
    if follows is not None:
        output["parameters"] = {"binary_data_size": follows}
    document: dict[str, Any] = {"model_name": inference.model.name, "model_version": VERSION}
    if inference.id:
        document["id"] = inference.id
    document["parameters"] = {"variant": outcome.variant, "reason": outcome.reason, **(kept or {})}
    document["outputs"] = [output]
    return document


@dataclass(slots=True)
class _Parts:
    """A reply's JSON, then D's bytes where they follow, or the numbers that the JSON goes on with."""

    text: bytes
    view: memoryview | None = None
    numbers: Iterator[bytes] | None = None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What tells the client how to read it."""
        if self.view is None:
            return [(b"content-type", b"application/json")]
        length = str(len(self.text)).encode()
        return [(b"content-type", b"application/octet-stream"), (HEADER, length)]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield self.text
        view = self.view or memoryview(b"")
        yield from (view[start : start + CHUNK] for start in range(0, len(view), CHUNK))
        yield from self.numbers or ()


def _parts(
    inference: Inference, request: GemmRequest, outcome: Outcome, kept: dict[str, Any] | None
) -> _Parts:
    if kept is not None:
        return _Parts(msgspec.json.encode(document_of(inference, request, outcome, kept=kept)))
    if inference.binary:
        text = msgspec.json.encode(document_of(inference, request, outcome, follows=request.plan.out.nbytes))
        return _Parts(text, request.out.view())
    text = msgspec.json.encode(document_of(inference, request, outcome))
    values = elements(request.out, request.plan.out)
    # The text ends with `}]}`: its last object, the output, goes on with the numbers.
    head = text.removesuffix(b"}]}") + b',"data":['
    if values.size <= numbers.PIECE:
        return _Parts(head + b"".join(_numbers(values)))
    return _Parts(head, numbers=_numbers(values))


def _numbers(values: np.ndarray[Any, Any]) -> Iterator[bytes]:
    """D's elements, flat, and the JSON's end."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, numbers.PIECE):
        yield (b"," if start else b"") + numbers.bare(flat[start : start + numbers.PIECE])
    yield b"]}]}"


async def _send(transfer: Transfer, parts: _Parts, headers: list[tuple[bytes, bytes]]) -> None:
    view = parts.view or memoryview(b"")
    if parts.numbers is None:
        length = str(len(parts.text) + len(view)).encode()
        await transfer.start(200, [*parts.headers, (b"content-length", length), *headers])
        await transfer.write(parts.text, more=bool(len(view)))
        if len(view):
            await transfer.write_view(view)
        return
    await transfer.start(200, [*parts.headers, *headers])
    await transfer.write_pieces(map(bytes, parts), b"")


async def _send_compressed(
    transfer: Transfer, parts: _Parts, headers: list[tuple[bytes, bytes]], encoding: str
) -> None:
    await transfer.start(200, [*parts.headers, (b"content-encoding", encoding.encode()), *headers])
    async for piece in compressed(parts, encoding):
        if transfer.gone:
            return
        await transfer.write(piece)
    await transfer.write(b"", more=False)
