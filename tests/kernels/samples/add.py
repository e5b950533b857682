"""Two small kernels in one library: receives a vector, adds a constant to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kernels.targets import Function

THREADS = 128
STAGED = 1000  # floats of dynamic shared memory


@cute.kernel
def add_kernel(x: cute.Tensor, n: cutlass.Int32, summand: cutlass.Constexpr):
    """x[i] += summand, through shared memory."""
    staged = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(STAGED), 128)
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    i = b * THREADS + t
    if i < n:
        staged[t] = x[i]
        x[i] = staged[t] + cutlass.Float32(summand)


@cute.jit
def add(x: cute.Tensor, stream, summand: cutlass.Constexpr):
    """Launch over every element of x."""
    n = cute.size(x)
    grid = (cute.ceil_div(n, THREADS), 1, 1)
    add_kernel(x, n, summand).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def compile_add(summand: int) -> Any:
    """Compiled `add` for vectors of any length."""
    x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(add, x, stream, summand, options="--enable-tvm-ffi")


def functions() -> list[Function]:
    """add_1 and add_2 for sm_90a, in one library."""
    return [
        Function(f"add_{n}", "sm_90a", partial(compile_add, n), library="add", config={"summand": n})
        for n in (1, 2)
    ]
