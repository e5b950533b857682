"""Whether operands fit together: receives fields and tensors, hands on the product's sizes, or a refusal.

Pure; used for requests and for the steps of jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from service.errors import ServiceError
from service.formats import Tensor
from service.messages import Params
from service.model import GemmFields

#: Operands, in the order of a body.
NAMES = ("a", "b", "c", "bias")


class Limits(Protocol):
    """Bounds of one product, as Settings names them."""

    @property
    def max_output_bytes(self) -> int: ...
    @property
    def max_flops(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a product whose operands fit together."""

    m: int
    n: int
    k: int
    batch: int
    out: Tensor
    beta: float

    @property
    def flops(self) -> int:
        """2·M·N·K·batch."""
        return 2 * self.m * self.n * self.k * self.batch


def plan(fields: GemmFields, tensors: Mapping[str, Tensor], limits: Limits) -> Plan:
    """Check that a, b and, where given, c and bias fit together and stay within the limits."""
    a, b = tensors["a"], tensors["b"]
    for name in ("a", "b", "c"):
        if name in tensors and len(tensors[name].shape) not in (2, 3):
            raise unfit(name, f"has {len(tensors[name].shape)} dimensions; 2 or 3 are taken")
    if a.dtype != b.dtype:
        raise unfit("b", f"is {b.dtype} and a is {a.dtype}; they must share a dtype")
    m, k = _oriented(a, fields.trans_a)
    k_of_b, n = _oriented(b, fields.trans_b)
    if k != k_of_b:
        raise unfit("b", f"has K = {k_of_b}, a has K = {k} (stored shapes {a.shape} and {b.shape})")
    batch, batched = _batch(tensors)
    c, bias = tensors.get("c"), tensors.get("bias")
    if c is not None and c.shape[-2:] != (m, n):
        raise unfit("c", f"has shape {c.shape}, the product is {m} × {n}")
    if bias is not None:
        length = n if fields.bias_dim == "n" else m
        if bias.shape != (length,):
            raise unfit("bias", f"has shape {bias.shape}; bias_dim {fields.bias_dim} takes ({length},)")
    beta = fields.beta if fields.beta is not None else float(c is not None)
    if c is None and beta != 0:
        raise ServiceError("invalid", "beta: needs c", field="beta")
    out = Tensor(fields.out_dtype or a.dtype, (batch, m, n) if batched else (m, n))
    made = Plan(m, n, k, batch, out, beta)
    _check_size(made, limits)
    return made


def _oriented(tensor: Tensor, transposed: bool) -> tuple[int, int]:
    rows, columns = tensor.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _batch(tensors: Mapping[str, Tensor]) -> tuple[int, bool]:
    """The batch, and whether D has that dimension."""
    batch, batched = 1, False
    for name in ("a", "b", "c"):
        if name in tensors and len(tensors[name].shape) == 3:
            batched = True
            own = tensors[name].shape[0]
            if own not in (1, batch) and batch != 1:
                raise unfit(name, f"has batch {own}, another operand has {batch}; equal or 1 is taken")
            batch = own if own != 1 else batch
    return batch, batched


def _check_size(made: Plan, limits: Limits) -> None:
    if made.out.nbytes > limits.max_output_bytes:
        raise ServiceError(
            "invalid",
            f"out: the result would take {made.out.nbytes} bytes, above the limit max_output_bytes",
            field="out",
            limit=limits.max_output_bytes,
        )
    if made.flops > limits.max_flops:
        raise ServiceError(
            "invalid",
            f"a: the product takes {made.flops} FLOPs, above the limit max_flops",
            field="a",
            limit=limits.max_flops,
        )


def unfit(name: str, detail: str) -> ServiceError:
    return ServiceError("invalid", f"{name}: {detail}", field=name)


def given_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Type for plain numbers in A or B: the other's, else fp32."""
    return next((tensors[name].dtype for name in ("a", "b") if name in tensors), "fp32")


def check_present(pinned: Mapping[str, Tensor], here: Mapping[str, Tensor], *, way: str = "send it") -> None:
    """A and B come once, in the body or as a handle; `way`: how one comes in the body."""
    for name in NAMES:
        if name in pinned and name in here:
            raise unfit(name, "is named as a handle and sent as well")
        if name in ("a", "b") and name not in pinned and name not in here:
            raise unfit(name, f"is missing: {way.format(name)}, or name a handle: {name}=handle:NAME")


def params_of(fields: GemmFields, made: Plan) -> Params:
    """The arithmetic of a request."""
    return Params(
        out_dtype=made.out.dtype,
        trans_a=fields.trans_a,
        trans_b=fields.trans_b,
        alpha=fields.alpha,
        beta=made.beta,
        bias_dim=fields.bias_dim,
        activation=fields.activation,
        precision=fields.precision,
        batch_invariant=fields.batch_invariant,
        variant=fields.variant,
    )
