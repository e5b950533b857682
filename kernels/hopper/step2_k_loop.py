"""Step 2, the K loop: receives A [M, K] and B [N, K] with M, N ≤ 128 and any K, hands on D = A·Bᵀ.

Adds        a loop over K blocks of 64; the accumulator stays in registers from block to block.
Why faster  than going through Step 1 once a block: D isn't written and read between blocks.
Costs       a second barrier a block: nobody may overwrite shared memory while wgmma still reads it. Loading
            and multiplying take turns.
Roles       one warpgroup does everything.
Barriers    CTA-wide, twice a block: filled, and read (after every warp has waited for its wgmma).
Shared      A 16,384 B + B 16,384 B = 32,768 B.
Limits      one tile, 16-bit output, no epilogue; any leading dimension. Fewer than 2³¹ elements an operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives as prims

from kernels.hopper.parts import (
    BLK_K,
    BLK_M,
    BLK_N,
    WARPGROUP,
    accumulator,
    fill,
    fragments,
    multiply,
    operand,
    step_functions,
    store_masked,
)
from kernels.targets import Function


@cute.kernel
def kernel(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor) -> None:
    """One CTA computes D."""
    tid, _, _ = cute.arch.thread_idx()
    dtype = mA.element_type
    sA = operand(dtype, BLK_M)  # (BLK_M, BLK_K, 1)
    sB = operand(dtype, BLK_N)  # (BLK_N, BLK_K, 1)
    tCrA, tCrB = fragments(sA, sB)
    acc = accumulator(dtype)

    for k in cutlass.range(cute.ceil_div(mA.shape[1], BLK_K), unroll=1):
        fill(sA, mA, BLK_M, Int32(0), k, tid)
        fill(sB, mB, BLK_N, Int32(0), k, tid)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(0)
        multiply(dtype, acc, tCrA, tCrB, Int32(0), k == 0)
        warpgroup.wait_group(0)
        prims.barrier_cta_sync(0)

    store_masked(acc, mD, Int32(0), Int32(0), tid)


kernel.set_name_prefix("hopper_step2", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch one CTA; `ctas` is not used."""
    kernel(a, b, d).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step2_k_loop_fp16 and step2_k_loop_bf16."""
    return step_functions("step2_k_loop", host, aligned=False)
