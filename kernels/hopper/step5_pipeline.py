"""Step 5, a software pipeline: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        a ring of STAGES blocks in shared memory. Loads run STAGES - 1 blocks ahead of the tensor core,
            and one group of wgmma stays in flight while the next block's barrier is awaited.
Why faster  the latency of a load (around a microsecond) is paid once a tile, not once a block.
Costs       two barriers a stage, with a place in the ring and a phase for each side; the ring fills shared
            memory, so one CTA an SM runs, and nothing hides the start and the end of a tile: Step 6.
Roles       one warpgroup; the thread elected in warp 0 also loads and stores. Lockstep: it can't issue a load
            while it waits for a product.
Barriers    tma2mma[s]: 1 arrival (expect_tx) + 32,768 B, CTA scope: stage s has landed.
            mma2tma[s]: 4 arrivals, one elected lane a warp, CTA scope: every warp has read stage s.
            CTA-wide: before the store, the tile is staged.
Shared      6 × 32,768 B + D 32,768 B + barriers 96 B = 229,472 B.
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
    STAGES,
    WARPGROUP,
    PipelineState,
    accumulator,
    barriers,
    fragments,
    init,
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
    sA = operand(dtype, BLK_M, STAGES)  # (BLK_M, BLK_K, STAGES)
    sB = operand(dtype, BLK_N, STAGES)  # (BLK_N, BLK_K, STAGES)
    sD = staging(dtype)
    tma2mma, mma2tma = barriers(STAGES), barriers(STAGES)
    tCrA, tCrB = fragments(sA, sB)
    acc = accumulator(dtype)
    if warp == 0 and prims.elect_sync():
        init(tma2mma, STAGES, 1)
        init(mma2tma, STAGES, WARPGROUP // 32)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)

    filling = PipelineState.producer(STAGES)
    if warp == 0:
        for k in cutlass.range(cutlass.min(k_blocks, STAGES - 1), unroll=1):
            if prims.elect_sync():
                load(sA, sB, a_map, b_map, tma2mma, filling.stage, m, n, k)
            filling.advance()

    reading, releasing = PipelineState.consumer(STAGES), PipelineState.consumer(STAGES)
    for k in cutlass.range(k_blocks, unroll=1):
        wait(tma2mma, reading.stage, reading.phase)
        multiply(dtype, acc, tCrA, tCrB, reading.stage, k == 0)
        reading.advance()
        warpgroup.wait_group(1)  # the group before this one has read its stage
        if k > 0:
            if prims.elect_sync():
                prims.mbarrier_arrive(mma2tma.subview(releasing.stage))
            releasing.advance()
        if warp == 0 and k + STAGES - 1 < k_blocks:
            wait(mma2tma, filling.stage, filling.phase)
            if prims.elect_sync():
                load(sA, sB, a_map, b_map, tma2mma, filling.stage, m, n, k + STAGES - 1)
            filling.advance()
    warpgroup.wait_group(0)

    stage_tile(acc, sD, dtype, tid)
    prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
    prims.barrier_cta_sync(0)
    if warp == 0 and prims.elect_sync():
        store_tile(sD, d_map, m, n)
        prims.cp_async_bulk_wait_group(0)


kernel.set_name_prefix("hopper_step5", remove_cutlass_symbol=True)


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
    """step5_pipeline_fp16 and step5_pipeline_bf16."""
    return step_functions("step5_pipeline", host, aligned=True)
