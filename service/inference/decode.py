"""The body of POST …/infer: receives JSON and then raw tensors, hands on what is asked for, operands in slots."""

from __future__ import annotations

from service.decode import GemmRequest, Operands, json_text
from service.errors import ServiceError
from service.formats import DTYPES, Tensor
from service.inference.bind import bind
from service.inference.encoding import Body, body_of
from service.inference.models import INPUT_OF, Model
from service.inference.regions import Regions
from service.inference.request import Inference, InferenceFields, Input, parse
from service.model import GemmQuery
from service.query import handle_in, query_fields
from service.raw_plan import raw_tensors
from service.transfer import Transfer
from service.turns import parsing

#: The header that tells where JSON ends and tensors begin.
HEADER = b"inference-header-content-length"


async def decode(
    transfer: Transfer, operands: Operands, regions: Regions, model: Model
) -> tuple[Inference, GemmRequest]:
    """Read and check a request. What it holds is in `operands`, for whoever refuses it to release."""
    limits = operands.limits
    body = body_of(transfer, limits.max_body_bytes)
    length = _json_length(transfer)
    if length == 0:
        inference = await _raw(transfer.scope["query_string"], operands, body, model)
    else:
        if length is not None and body.content_length is not None and length > body.content_length:
            raise _malformed(f"the JSON is said to have {length} bytes, the body has {body.content_length}")
        limit = min(limits.max_json_bytes, limits.max_body_bytes)
        if length is not None and length > limit:
            raise ServiceError("too_large", f"JSON of {length} bytes is above the limit", limit=limit)
        inference = await _from_json(body, length, limit, operands, model)
    expected = sum(one.tensor.nbytes for one in inference.inputs if one.binary)
    if body.content_length is not None and length is not None and length + expected != body.content_length:
        raise _malformed(
            f"the body has {body.content_length - length} bytes of tensors, its inputs take {expected}"
        )

    async def read(views: list[memoryview]) -> None:
        await body.receive_into(*views)
        await body.finish()

    return inference, await bind(operands, inference, regions, read)


def _json_length(transfer: Transfer) -> int | None:
    """Bytes of JSON; None where all of the body is JSON, 0 where none is."""
    text = transfer.header(HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise ServiceError(
            "malformed", "Inference-Header-Content-Length isn't a whole number", field=HEADER.decode()
        )
    return int(text)


async def _from_json(
    body: Body, length: int | None, limit: int, operands: Operands, model: Model
) -> Inference:
    """The request in the body's JSON part."""
    async with (
        json_text(body, operands.services, operands.owner, limit, length) as text,
        parsing(text) as document,
    ):
        return parse(document, model)


async def _raw(query: bytes, operands: Operands, body: Body, model: Model) -> Inference:
    """Raw-binary mode: the body is A‖B‖C‖bias and nothing else; query fields, as /gemm has them, say the rest."""
    fields = query_fields(query)
    if model.dtype is not None:
        if fields.dtype not in (None, model.dtype):
            raise ServiceError("invalid", f"model {model.name} takes {model.dtype}", field="dtype")
        fields = fields.model_copy(update={"dtype": model.dtype})
    pinned = {}
    for operand in INPUT_OF:
        handle = handle_in(getattr(fields, operand))
        if handle is not None:
            pinned[operand] = await operands.pin(operand, handle)
    fields = _with_shape(fields, pinned, body.content_length)
    here = raw_tensors(fields, pinned, body.content_length)
    given = fields.model_dump(include=set(InferenceFields.model_fields), exclude_unset=True)
    inputs = tuple(Input(operand, tensor, binary=True) for operand, tensor in here.items())
    operands.release()  # bind pins them again, with all its checks
    return Inference(model, "", InferenceFields.model_validate(given), inputs, binary=True, place=None)


def _with_shape(fields: GemmQuery, pinned: dict[str, Tensor], length: int | None) -> GemmQuery:
    """Fields with the shape of A, or of B, where the other is stored and the body's length leaves one choice."""
    for name, other, rows_first in (("a", "b", not fields.trans_a), ("b", "a", fields.trans_b)):
        if other not in pinned or name in pinned or getattr(fields, f"{name}_shape") or length is None:
            continue
        stored = pinned[other]
        inner = -2 if (other == "b") != getattr(fields, f"trans_{other}") else -1
        k = stored.shape[inner] if len(stored.shape) == 2 else 0
        row = k * DTYPES[fields.dtype or stored.dtype].itemsize
        if row == 0 or length % row:
            raise ServiceError(
                "invalid",
                f"{name}_shape is missing, and the body's {length} bytes are no rows of {k} elements",
                field=f"{name}_shape",
            )
        extents = (length // row, k) if rows_first else (k, length // row)
        return fields.model_copy(update={f"{name}_shape": "{}x{}".format(*extents)})
    return fields


def _malformed(detail: str) -> ServiceError:
    return ServiceError("malformed", detail, field="body")
