"""Operands of a product as kernels read them: receives torch views with any strides, hands on what TMA can address.

A view whose rows or starts lie at no multiple of 16 bytes is copied to one that does; sizes of 1 get the strides that
a compiled function expects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kernels.call import Strides
from kernels.problem import DType, Problem

TMA_BYTES = 16  # TMA addresses rows and starts in multiples of this


@dataclass(frozen=True, slots=True)
class Operands:
    """Device tensors of one product as [batch or 1, rows, columns] views; `d` may be `c`."""

    a: Any
    b: Any
    d: Any
    c: Any = None
    bias: Any = None


def as_packed(problem: Problem) -> Problem:
    """The problem that an own kernel sees: leading dimensions of A and B in multiples of 16 bytes."""
    lda, ldb, _, _ = problem.leading
    step = TMA_BYTES // problem.dtype.itemsize or 1
    if lda % step or ldb % step:
        return replace(problem, lda=-(-lda // step) * step, ldb=-(-ldb // step) * step)
    return problem


def packed(x: Any, pack: Callable[..., Any] | None = None, by_column: bool | None = None) -> Any:
    """`x` [layers, rows, columns] as a kernel takes it: itself where TMA can address it, else a copy with row
    pitch in multiples of 16 bytes. Strides of size-1 dimensions are made regular.

    by_column: which of the last two dimensions the function wants contiguous (True: rows); by default the one
    that is. pack: the packing kernel, if it is built. An expanded batch becomes one layer.
    """
    if by_column is not None and _is_plain(x, by_column):
        return x
    import torch

    if x.stride(0) == 0:
        x = x[:1]
    layers, rows, columns = x.shape
    batch, row, column = x.stride()
    size = x.element_size()
    if by_column is None:
        regular = columns == 1 and row % (TMA_BYTES // size) == 0
        by_column = column != 1 and (row == 1 or rows == 1) and not regular
    strides = Strides(batch, row, column).normal(layers, rows, columns, column_major=by_column)
    inner, outer = (strides.row, strides.column) if by_column else (strides.column, strides.row)
    whole = not any(value * size % TMA_BYTES for value in (outer, strides.batch))
    if inner == 1 and outer > 0 and whole and not x.data_ptr() % TMA_BYTES:
        wanted = (strides.batch, strides.row, strides.column)
        return x if wanted == (batch, row, column) else x.as_strided(x.shape, wanted)
    pitch = -(-(rows if by_column else columns) * size // TMA_BYTES) * TMA_BYTES // size
    lines = columns if by_column else rows
    room = torch.empty((layers, lines, pitch), dtype=x.dtype, device=x.device)
    copy = room[..., :rows].transpose(1, 2) if by_column else room[..., :columns]
    if pack is not None and size == 2:
        line, element = (column, row) if by_column else (row, column)
        length = rows if by_column else columns
        pack(room.view(torch.int16), x.data_ptr(), batch, line, element, length, _pack_blocks(room.numel()))
    else:
        copy.copy_(x)
    return packed(copy, by_column=by_column)


def _is_plain(x: Any, by_column: bool) -> bool:
    """Whether it is dense, and TMA can address it: what most are, found without looking at each dimension."""
    _, rows, columns = x.shape
    line, strides = (rows, (1, rows)) if by_column else (columns, (columns, 1))
    dense = x.stride() == (rows * columns, *strides)
    return bool(dense and not line * x.element_size() % TMA_BYTES and not x.data_ptr() % TMA_BYTES)


def _pack_blocks(elements: int) -> int:
    """Blocks of 256 threads that write 8 elements each at a time, up to eight times an SM of the largest chips."""
    return max(1, min(1184, elements // 2048))


def readable(x: Any) -> Any:
    """C or bias in a type that kernels read: fp64 is rounded to the compute type first, as they'd do."""
    import torch

    return x.float() if x.dtype == torch.float64 else x


def maybe_dtype_of(x: Any) -> DType | None:
    """The same; None for None."""
    return None if x is None else dtype_of(x)


def dtype_of(x: Any) -> DType:
    """The service's name of a torch tensor's dtype."""
    found = _names().get(x.dtype)
    if found is None:
        raise TypeError(f"there are fp16, bf16, fp32 and fp64, not {x.dtype}")
    return found


@cache
def _names() -> Mapping[Any, DType]:
    import torch

    return {
        torch.float16: DType.FP16,
        torch.bfloat16: DType.BF16,
        torch.float32: DType.FP32,
        torch.float64: DType.FP64,
    }
