"""Step 7, warp specialization: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        two teams. A producer warpgroup does nothing but ask for blocks; a consumer warpgroup does nothing
            but multiply and store. The ring is all that they share.
Why faster  neither waits on the other's behalf: the consumer never computes coordinates or polls for a free
            stage between two products, and the producer runs ahead through the epilogue as far as the ring
            goes.
Costs       a warpgroup of which one thread works, and its registers. No CTA-wide barrier may stand in either
            branch: the consumer synchronizes by named barrier 10. D still leaves while the tensor core idles.
Roles       warpgroup 0: producer, the thread elected in warp 0. Warpgroup 1: consumer; its warp 0 stores.
Barriers    tma2mma[s]: 1 arrival (expect_tx) + 32,768 B, CTA scope: stage s has landed.
            mma2tma[s]: 4 arrivals, one elected lane a consumer warp, CTA scope: every warp has read stage s.
            named 10, 128 threads, twice a tile: staging is free, the tile is staged.
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
    grouped,
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

GROUP_M = 8  # rows of tiles in a band of the raster
CONSUMER_WARP = 4  # the first of warpgroup 1
STAGING = 10  # named barrier of the consumer


@cute.jit
def release(mma2tma: cutlass.Array, stage: Int32) -> None:
    """One arrival a warp: this warp has read the stage."""
    if prims.elect_sync():
        prims.mbarrier_arrive(mma2tma.subview(stage))


@cute.kernel
def kernel(
    a_map: cutlass.GridConstant[cuda.TensorMap],
    b_map: cutlass.GridConstant[cuda.TensorMap],
    d_map: cutlass.GridConstant[cuda.TensorMap],
    tiles_m: Int32,
    tiles_n: Int32,
    k_blocks: Int32,
) -> None:
    """One CTA computes tiles cta, cta + ctas, … of D."""
    dtype = a_map.dtype
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(tid // 32)
    sA = operand(dtype, BLK_M, STAGES)  # (BLK_M, BLK_K, STAGES)
    sB = operand(dtype, BLK_N, STAGES)  # (BLK_N, BLK_K, STAGES)
    sD = staging(dtype)
    tma2mma, mma2tma = barriers(STAGES), barriers(STAGES)
    tCrA, tCrB = fragments(sA, sB)
    if warp == 0 and prims.elect_sync():
        init(tma2mma, STAGES, 1)
        init(mma2tma, STAGES, WARPGROUP // 32)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)

    tiles = tiles_m * tiles_n
    if warp == 0 and prims.elect_sync():
        filling = PipelineState.producer(STAGES)
        for tile in cutlass.range(cta, tiles, ctas, unroll=1):
            m, n = grouped(tile, tiles_m, tiles_n, GROUP_M)
            for k in cutlass.range(k_blocks, unroll=1):
                wait(mma2tma, filling.stage, filling.phase)
                load(sA, sB, a_map, b_map, tma2mma, filling.stage, m, n, k)
                filling.advance()

    if warp >= CONSUMER_WARP:
        acc = accumulator(dtype)
        reading, releasing = PipelineState.consumer(STAGES), PipelineState.consumer(STAGES)
        for tile in cutlass.range(cta, tiles, ctas, unroll=1):
            m, n = grouped(tile, tiles_m, tiles_n, GROUP_M)
            for k in cutlass.range(k_blocks, unroll=1):
                wait(tma2mma, reading.stage, reading.phase)
                multiply(dtype, acc, tCrA, tCrB, reading.stage, k == 0)
                reading.advance()
                if k > 0:
                    warpgroup.wait_group(1)  # the group before this one has read its stage
                    release(mma2tma, releasing.stage)
                    releasing.advance()
            warpgroup.wait_group(0)
            release(mma2tma, releasing.stage)
            releasing.advance()

            if warp == CONSUMER_WARP and prims.elect_sync():
                prims.cp_async_bulk_wait_group(0, read=True)  # the last tile has left the staging
            prims.barrier_cta_sync(STAGING, thread_count=WARPGROUP)
            stage_tile(acc, sD, dtype, tid % WARPGROUP)
            prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
            prims.barrier_cta_sync(STAGING, thread_count=WARPGROUP)
            if warp == CONSUMER_WARP and prims.elect_sync():
                store_tile(sD, d_map, m, n)
        if warp == CONSUMER_WARP and prims.elect_sync():
            prims.cp_async_bulk_wait_group(0)


kernel.set_name_prefix("hopper_step7", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch as many CTAs as can be resident, `ctas`, or as there are tiles."""
    tiles_m, tiles_n = cute.ceil_div(d.shape[0], BLK_M), cute.ceil_div(d.shape[1], BLK_N)
    kernel(
        tensor_map(a, BLK_M, BLK_K),
        tensor_map(b, BLK_N, BLK_K),
        tensor_map(d, BLK_M, EPI_N),
        tiles_m,
        tiles_n,
        cute.ceil_div(a.shape[1], BLK_K),
    ).launch(grid=(cutlass.min(tiles_m * tiles_n, ctas), 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step7_warp_specialized_fp16 and step7_warp_specialized_bf16."""
    return step_functions("step7_warp_specialized", host, aligned=True)
