"""The plan of operands sent as raw bytes: receives a query and the body's length, hands on tensors, plan, arithmetic.

Clients ask few different products, many times: what depends on query and length alone is remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from service.errors import ServiceError
from service.formats import Tensor
from service.formats.raw import parse_shape
from service.messages import Params
from service.model import GemmQuery
from service.plan import NAMES, Plan, check_present, params_of, plan, unfit
from service.query import handle_in, query_fields


class Most(NamedTuple):
    """Bounds of one product, by which what was planned is found again."""

    max_output_bytes: int
    max_flops: float


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What a query says of a product all of whose operands come as raw bytes, in the order of the body."""

    fields: GemmQuery
    here: Mapping[str, Tensor]
    sizes: list[int]


@lru_cache(maxsize=512)
def sent(query: bytes, length: int | None) -> Sent | None:
    """By the query and the body's length, on which alone it depends; None where it names stored tensors."""
    fields = query_fields(query)
    if any(handle_in(getattr(fields, name)) is not None for name in NAMES):
        return None
    here = raw_tensors(fields, {}, length)
    return Sent(fields, here, [tensor.nbytes for tensor in here.values()])


@lru_cache(maxsize=512)
def planned(known: Sent, most: Most) -> tuple[Plan, Params]:
    """The plan of what `sent` found, and its arithmetic. Refusals are made anew each time."""
    made = plan(known.fields, known.here, most)
    return made, params_of(known.fields, made)


def raw_tensors(fields: GemmQuery, pinned: Mapping[str, Tensor], length: int | None) -> dict[str, Tensor]:
    """Tensors in the body, in their order there."""
    default: str | None = fields.dtype or next(
        (pinned[name].dtype for name in ("a", "b") if name in pinned), None
    )
    here: dict[str, Tensor] = {}
    for name, shape, dtype in (
        ("a", fields.a_shape, default),
        ("b", fields.b_shape, default),
        ("c", fields.c_shape, fields.c_dtype or default),
    ):
        if shape is None:
            continue
        if dtype is None:
            raise ServiceError("invalid", f"dtype: is missing; {name} needs it", field="dtype")
        here[name] = Tensor(dtype, parse_shape(shape, field=f"{name}_shape"))
    if fields.c_dtype is not None and "c" not in here:
        raise unfit("c_dtype", "is given without c_shape")
    check_present(pinned, here, way="say its {}_shape")
    bias = _raw_bias(fields, {**pinned, **here}, here, length)
    if bias is not None:
        here["bias"] = bias
        check_present(pinned, here)
    return here


def _raw_bias(
    fields: GemmQuery, tensors: Mapping[str, Tensor], here: Mapping[str, Tensor], length: int | None
) -> Tensor | None:
    """A bias at the body's end: said by bias_dtype, or seen where the body is longer by exactly its bytes."""
    bias = bias_of(fields, tensors)
    if bias is None or fields.bias_dtype is not None:
        return bias
    rest = (length or 0) - sum(tensor.nbytes for tensor in here.values())
    return bias if rest > 0 and rest == bias.nbytes else None


def bias_of(fields: GemmQuery, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The bias that fits the product; None where A or B has no rows and columns."""
    if fields.bias_dim == "m":
        shape, axis = tensors["a"].shape, -1 if fields.trans_a else -2
    else:
        shape, axis = tensors["b"].shape, -2 if fields.trans_b else -1
    if len(shape) < 2:
        return None  # plan says what is wrong with it
    return Tensor(fields.bias_dtype or fields.dtype or tensors["a"].dtype, (shape[axis],))
