"""Step 4, TMA: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        the tensor memory accelerator: one thread asks for a whole block, and the engine computes
            addresses, swizzles, fills edges with zeros and reports bytes to a barrier. D leaves the same way,
            from shared memory, clipped at the edges.
Why faster  Step 3 spends hundreds of instructions a thread to copy one block; here it is two, of one thread,
            and 128 bytes a row move at once. Nothing passes through registers on the way in.
Costs       an mbarrier and its phase instead of a CTA-wide barrier; D is staged in shared memory. Leading
            dimensions must be multiples of 8 elements. Still one stage: loads and products take turns within
            a CTA, and only other CTAs of the SM fill the gaps.
Roles       one warpgroup; thread elected in warp 0 loads and stores.
Barriers    tma2mma: 1 arrival (expect_tx) + 32,768 B, CTA scope: the block has landed.
            CTA-wide, once a block: every warp's wgmma has read it. Before the store: the tile is staged.
Shared      A 16,384 B + B 16,384 B + D 32,768 B + barrier 8 B = 65,544 B.
Limits      16-bit output, no epilogue; addresses at 16 bytes, leading dimensions in multiples of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.hopper.parts import (
    BLK_K,
    BLK_M,
    BLK_N,
    EPI_N,
    WARPGROUP,
    accumulator,
    barriers,
    fragments,
    load,
    multiply,
    operand,
    stage_tile,
    staging,
    step_functions,
    store_tile,
    tensor_map,
    wait,
)
from kernels.targets import Function


@cute.kernel
def kernel(
    a_map: cutlass.GridConstant[cuda.TensorMap],
    b_map: cutlass.GridConstant[cuda.TensorMap],
    d_map: cutlass.GridConstant[cuda.TensorMap],
    k_blocks: Int32,
) -> None:
    """One CTA computes one tile of D."""
    dtype = a_map.dtype
    tid, _, _ = cute.arch.thread_idx()
    m, n, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(tid // 32)
    sA = operand(dtype, BLK_M)  # (BLK_M, BLK_K, 1)
    sB = operand(dtype, BLK_N)  # (BLK_N, BLK_K, 1)
    sD = staging(dtype)
    tma2mma = barriers(1)
    tCrA, tCrB = fragments(sA, sB)
    acc = accumulator(dtype)
    if warp == 0 and prims.elect_sync():
        prims.mbarrier_init(tma2mma, 1)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)

    for k in cutlass.range(k_blocks, unroll=1):
        if warp == 0 and prims.elect_sync():
            load(sA, sB, a_map, b_map, tma2mma, Int32(0), m, n, k)
        wait(tma2mma, Int32(0), k % 2)
        multiply(dtype, acc, tCrA, tCrB, Int32(0), k == 0)
        warpgroup.wait_group(0)
        prims.barrier_cta_sync(0)

    stage_tile(acc, sD, dtype, tid)
    prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
    prims.barrier_cta_sync(0)
    if warp == 0 and prims.elect_sync():
        store_tile(sD, d_map, m, n)
        prims.cp_async_bulk_wait_group(0)


kernel.set_name_prefix("hopper_step4", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch a CTA a tile; `ctas` is not used."""
    grid = (cute.ceil_div(d.shape[0], BLK_M), cute.ceil_div(d.shape[1], BLK_N), 1)
    kernel(
        tensor_map(a, BLK_M, BLK_K),
        tensor_map(b, BLK_N, BLK_K),
        tensor_map(d, BLK_M, EPI_N),
        cute.ceil_div(a.shape[1], BLK_K),
    ).launch(grid=grid, block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step4_tma_fp16 and step4_tma_bf16."""
    return step_functions("step4_tma", host, aligned=True)
