"""A kernel that the gates must refuse: receives a vector, picks from an array that registers can't hold."""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from kernels.targets import Function

LENGTH = 500


@cute.kernel
def spill_kernel(x: cute.Tensor):
    """x[i] = the element that x[i + 1] names in an array indexed at run time."""
    t, _, _ = cute.arch.thread_idx()
    kept = cutlass.Array(cutlass.Float32, LENGTH, space=cutlass.AddressSpace.rmem)
    for i in cutlass.range(LENGTH, unroll=1):
        kept[i] = x[i]
    x[t] = kept[cutlass.Int32(x[t + 1]) % LENGTH]


@cute.jit
def spill(x: cute.Tensor, stream):
    """One CTA."""
    spill_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)


def compile_spill() -> Any:
    """Compiled `spill`."""
    x = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16)
    return cute.compile(spill, x, make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi")


def functions() -> list[Function]:
    """spill, for sm_90a."""
    return [Function("spill", "sm_90a", partial(compile_spill))]
