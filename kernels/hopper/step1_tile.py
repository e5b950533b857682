"""Step 1, one tensor-core tile: receives A [M, K] and B [N, K] with M, N ≤ 128 and K ≤ 64, hands on D = A·Bᵀ.

Adds        wgmma, the tensor core's instruction: a warpgroup (4 warps, 128 threads) multiplies 64×16 by
            16×128 from shared memory and adds to fp32 registers; eight of them make this tile.
Why faster  one instruction does 131,072 multiply-adds; with plain arithmetic the warpgroup would issue 1,024
            instructions a thread.
Costs       operands must lie in shared memory in the layout that the instruction reads (K-major, 128-byte
            swizzle). Threads write there through the generic proxy and wgmma reads through the async proxy,
            so a proxy fence and a barrier stand between. The product is asynchronous: fence, commit, wait.
Roles       one warpgroup does everything.
Barriers    CTA-wide, once: the tile is in shared memory.
Shared      A 16,384 B + B 16,384 B = 32,768 B.
Limits      one tile, 16-bit output, no epilogue. Any leading dimension: elements are loaded one by one, and
            those beyond the matrices are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives as prims

from kernels.hopper.parts import (
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

    fill(sA, mA, BLK_M, Int32(0), Int32(0), tid)
    fill(sB, mB, BLK_N, Int32(0), Int32(0), tid)
    prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
    prims.barrier_cta_sync(0)

    multiply(dtype, acc, tCrA, tCrB, Int32(0), True)
    warpgroup.wait_group(0)

    store_masked(acc, mD, Int32(0), Int32(0), tid)


kernel.set_name_prefix("hopper_step1", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch one CTA; `ctas` is not used."""
    kernel(a, b, d).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step1_tile_fp16 and step1_tile_bf16."""
    return step_functions("step1_tile", host, aligned=False)
