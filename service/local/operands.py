"""Operands of a client on this machine: receives pieces of its memory, hands on a `GemmRequest` over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.decode import Bound, GemmRequest, Operands
from service.errors import ServiceError
from service.formats import Tensor
from service.local.messages import ALIGN, Multiply, Piece
from service.messages import Operand
from service.plan import plan
from service.query import handle_in, query_fields
from service.raw_plan import Sent, planned, raw_tensors, sent
from service.regions import Region

#: Says how large `out` has to be, where it was too small.
ROOM = "x-gemm-room"


async def bind(operands: Operands, message: Multiply, regions: Mapping[int, Region]) -> GemmRequest:
    """Check that the pieces are there and fit together. What is held is in `operands`, also on refusal."""
    fields = query_fields(message.query.encode())
    tensors = await operands.pin_references(fields)
    sizes = [piece.nbytes for piece in message.body]
    here = raw_tensors(fields, tensors, sum(sizes))
    _check_sizes(operands, sizes, [tensor.nbytes for tensor in here.values()])
    made = plan(fields, tensors | here, operands.limits)
    _bind(operands, message, here, regions)
    out_handle = handle_in(fields.out)
    if out_handle is not None:
        operands.place({}, made)
    else:
        _bind_out(operands, message, made.out, regions)
    return operands.request(fields, made, "raw", out_handle)


def bind_at_once(
    operands: Operands, message: Multiply, known: Sent, regions: Mapping[int, Region]
) -> GemmRequest:
    """`bind` of what `alone` knows: nothing has to be waited for."""
    _check_sizes(operands, [piece.nbytes for piece in message.body], known.sizes)
    made, params = planned(known, operands.most)
    _bind(operands, message, known.here, regions)
    _bind_out(operands, message, made.out, regions)
    return operands.request(known.fields, made, "raw", None, params)


def alone(message: Multiply) -> Sent | None:
    """What is asked, of a product of the client's memory alone; None for others, and what can't be understood."""
    try:
        known = sent(message.query.encode(), sum([piece.nbytes for piece in message.body]))
    except ServiceError:
        return None
    return known if known is not None and handle_in(known.fields.out) is None else None


def _check_sizes(operands: Operands, sizes: list[int], wanted: list[int]) -> None:
    operands.bound_total(sum(wanted))
    if sizes != wanted:
        raise ServiceError(
            "malformed",
            f"the pieces have {sum(sizes)} bytes, the shapes in the query take"
            f" {' + '.join(map(str, wanted)) or 0}",
            field="body",
        )


def _bind(
    operands: Operands, message: Multiply, here: Mapping[str, Tensor], regions: Mapping[int, Region]
) -> None:
    for (name, tensor), piece in zip(here.items(), message.body, strict=True):
        operands.bounds[name] = _bound(name, piece, tensor, piece.nbytes, regions)


def _bind_out(operands: Operands, message: Multiply, out: Tensor, regions: Mapping[int, Region]) -> None:
    operands.out = _out(message.out, out, regions)
    _check_apart(operands.out.operand, [bound.operand for bound in operands.bounds.values()])


def _bound(name: str, piece: Piece, tensor: Tensor, nbytes: int, regions: Mapping[int, Region]) -> Bound:
    """`nbytes`: the tensor's; D's room may be larger."""
    if piece.nbytes == 0 and name != "out":
        return Bound(Operand(0, 0, tensor.dtype, tensor.shape))
    region = regions.get(piece.region)
    if region is None:
        raise ServiceError("invalid", f"{name}: no memory is shared as region {piece.region}", field=name)
    if piece.offset < 0 or piece.nbytes < 0 or piece.offset + piece.nbytes > region.nbytes:
        raise ServiceError(
            "invalid",
            f"{name}: bytes {piece.offset} to {piece.offset + piece.nbytes} lie outside the region",
            field=name,
            limit=region.nbytes,
        )
    if piece.offset % ALIGN:
        raise ServiceError(
            "invalid", f"{name}: must begin at a multiple of {ALIGN} bytes in its region", field=name
        )
    operand = Operand(piece.offset, nbytes, tensor.dtype, tensor.shape, "", region.number)
    return Bound(operand, region.hold(), region.release)


def _out(piece: Piece | None, out: Tensor, regions: Mapping[int, Region]) -> Bound:
    if piece is None:
        raise ServiceError("invalid", "out: memory for the result is needed, or a handle", field="out")
    nbytes = out.nbytes
    if piece.nbytes < nbytes:
        raise ServiceError(
            "invalid",
            f"out: the result takes {nbytes} bytes, there is room for {piece.nbytes}",
            field="out",
            limit=nbytes,
            headers={ROOM: str(nbytes)},
        )
    return _bound("out", piece, out, nbytes, regions)


def _check_apart(out: Operand, others: Iterable[Operand]) -> None:
    """D is written while operands are read."""
    for other in others:
        first, last = max(out.offset, other.offset), min(out.offset + out.nbytes, other.offset + other.nbytes)
        if other.region == out.region and first < last:
            raise ServiceError("invalid", "out: overlaps an operand", field="out")
