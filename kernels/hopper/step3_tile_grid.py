"""Step 3, a grid of tiles: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        a CTA for each 128×128 tile of D, on a 2-D grid; tiles over the edge are masked.
Why faster  every SM works, and several CTAs an SM hide one another's waiting.
Costs       each row of tiles reads all of B again and each column all of A: L2 has to serve them.
Roles       one warpgroup a CTA does everything.
Barriers    CTA-wide, twice a block: filled, and read.
Shared      A 16,384 B + B 16,384 B = 32,768 B.
Limits      16-bit output, no epilogue; any leading dimension. Fewer than 2³¹ elements an operand and at most
            65,535 tiles along N. Element-wise loads keep the tensor cores idle most of the time: Step 4.
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
    """One CTA computes one tile of D."""
    tid, _, _ = cute.arch.thread_idx()
    m, n, _ = cute.arch.block_idx()
    dtype = mA.element_type
    sA = operand(dtype, BLK_M)  # (BLK_M, BLK_K, 1)
    sB = operand(dtype, BLK_N)  # (BLK_N, BLK_K, 1)
    tCrA, tCrB = fragments(sA, sB)
    acc = accumulator(dtype)

    for k in cutlass.range(cute.ceil_div(mA.shape[1], BLK_K), unroll=1):
        fill(sA, mA, BLK_M, m, k, tid)
        fill(sB, mB, BLK_N, n, k, tid)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(0)
        multiply(dtype, acc, tCrA, tCrB, Int32(0), k == 0)
        warpgroup.wait_group(0)
        prims.barrier_cta_sync(0)

    store_masked(acc, mD, m, n, tid)


kernel.set_name_prefix("hopper_step3", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch a CTA a tile; `ctas` is not used."""
    grid = (cute.ceil_div(d.shape[0], BLK_M), cute.ceil_div(d.shape[1], BLK_N), 1)
    kernel(a, b, d).launch(grid=grid, block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step3_tile_grid_fp16 and step3_tile_grid_bf16."""
    return step_functions("step3_tile_grid", host, aligned=False)
