"""Matrices and atomics of a group of lanes: receives addresses a lane, hands on old values or rows of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.virtual.access import AccessMixin
from kernels.virtual.lanes import FLOAT, SIGNED, UNSIGNED, Value


class AtomicMixin(AccessMixin):
    """What generated code calls to change memory in one step, and to move matrices."""

    # --- matrices ---------------------------------------------------------------------------------

    def store_matrix(self, address: np.ndarray, values: tuple[Value, ...], trans: bool) -> None:
        """stmatrix: lane t of matrix k names row t; register k of lane t holds elements 2(t%4) of row t/4."""
        count = len(values)
        rows = address[: 8 * count]
        self._aligned(rows, 16)
        span, offset = self._span("shared", rows, 16)
        self._note(span, offset, 16, write=True, sync=False)
        for k, value in enumerate(values):
            matrix = np.broadcast_to(np.asarray(value, np.uint32), (32,)).copy().view(np.uint16).reshape(8, 8)
            if trans:
                matrix = np.ascontiguousarray(matrix.T)
            span.views[16][offset[8 * k : 8 * k + 8] >> 4] = matrix.view(np.complex128).reshape(8)

    def store_matrix_bytes(self, address: np.ndarray, values: tuple[Value, ...]) -> None:
        """stmatrix of 16 x 8 bytes, transposed: lane 8k + t names where the 16 bytes of column t of matrix k go.

        Byte b of lane t holds element [t/4 + 8(b/2), 2(t%4) + b%2].
        """
        count = len(values)
        columns = address[: 8 * count]
        self._aligned(columns, 16)
        span, offset = self._span("shared", columns, 16)
        self._note(span, offset, 16, write=True, sync=False)
        for k, value in enumerate(values):
            words = np.broadcast_to(np.asarray(value, np.uint32), (32,)).copy()
            parts = words.view(np.uint8).reshape(8, 4, 2, 2)  # row, pair of columns, half of the rows, column
            matrix = np.ascontiguousarray(parts.transpose(1, 3, 2, 0)).reshape(8, 16)
            span.views[16][offset[8 * k : 8 * k + 8] >> 4] = matrix.view(np.complex128).reshape(8)

    def load_matrix(self, address: np.ndarray, count: int, trans: bool) -> list[np.ndarray]:
        """ldmatrix."""
        rows = address[: 8 * count]
        self._aligned(rows, 16)
        span, offset = self._span("shared", rows, 16)
        self._note(span, offset, 16, write=False, sync=False)
        out = []
        for k in range(count):
            matrix = span.views[16][offset[8 * k : 8 * k + 8] >> 4].view(np.uint16).reshape(8, 8)
            if trans:
                matrix = np.ascontiguousarray(matrix.T)
            out.append(matrix.view(np.uint32).reshape(32))
        return out

    # --- atomics ----------------------------------------------------------------------------------

    def atomic(
        self,
        space: str,
        op: str,
        kind: str,
        address: Value,
        operands: tuple[Value, ...],
        mask: np.ndarray | None = None,
    ) -> np.ndarray:
        """atom and red: lane by lane, in order; hands back the old values."""
        if space == "generic":
            space, address = self._space_of(address)
        width = 32 if kind.endswith("x2") else int("".join(c for c in kind.lstrip("b") if c.isdigit()))
        chosen = self._chosen(mask)
        members = range(32) if chosen is None else np.flatnonzero(chosen).tolist()
        old = np.zeros(32, UNSIGNED[width])
        size = width // 8
        for lane in members:
            where = address if isinstance(address, int) else int(address[lane])
            self._aligned(where, size)
            span, offset = self._span(space, where, size)
            self._note(span, offset, size, write=True, sync=True)
            view = span.views[size]
            before = int(view[offset // size])
            values = [v if isinstance(v, int) else int(v[lane]) for v in operands]
            old[lane] = before
            view[offset // size] = combine(op, kind, before, values)
        self.machine.progress += 1
        return old


def combine(op: str, kind: str, before: int, values: list[int]) -> int:
    """The new value of an atomic operation."""
    value = values[0]
    if op == "exch":
        return value
    if op == "cas":
        return values[1] if before == value else before
    width = 32 if kind.endswith("x2") else int("".join(c for c in kind.lstrip("b") if c.isdigit()))
    raw = UNSIGNED[width]
    if kind.endswith("x2") or kind in FLOAT:
        dtype: Any = FLOAT[kind.removesuffix("x2")]
        a, b = (np.array([x], raw).view(dtype) for x in (before, value))
        out = {"add": a + b, "min": np.fmin(a, b), "max": np.fmax(a, b)}[op].astype(dtype)
        return int(out.view(raw)[0])
    top = (1 << width) - 1
    if op == "inc":
        return 0 if before >= value else before + 1
    if op == "dec":
        return value if before == 0 or before > value else before - 1
    a_int, b_int = before, value
    if kind[0] == "s":
        a_int, b_int = (int(raw(x).view(SIGNED[width])) for x in (before, value))
    result = {
        "add": a_int + b_int, "min": min(a_int, b_int), "max": max(a_int, b_int),
        "and": before & value, "or": before | value, "xor": before ^ value,
    }[op]  # fmt: skip
    return result & top
