"""Works for tests of batch and admission."""

from __future__ import annotations

import itertools
from typing import Any

from service.batch import Work
from service.messages import Operand, Params

_ids = itertools.count(1)


def work(
    *,
    m: int = 4,
    b: str = "",
    c: bool = False,
    bias: str | None = None,
    params: Params | None = None,
    k: int = 8,
    n: int = 16,
    **fields: Any,
) -> Work:
    """A small fp32 product; `b` and `bias` name resident tensors ("" passes through)."""
    if params is None:
        params = Params("fp32")
    shape = (k, m) if params.trans_a else (m, k)
    return Work(
        id=next(_ids),
        a=Operand(0, m * k * 4, "fp32", shape),
        b=Operand(0, k * n * 4, "fp32", (k, n), b),
        out=Operand(0, m * n * 4, "fp32", (m, n)),
        params=params,
        c=Operand(0, m * n * 4, "fp32", (m, n)) if c else None,
        bias=None if bias is None else Operand(0, n * 4, "fp32", (n,), bias),
        **fields,
    )
