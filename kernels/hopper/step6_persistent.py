"""Step 6, persistent CTAs: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        one CTA an SM that walks over tiles, `ctas` apart, in bands of GROUP_M rows of tiles. The ring
            doesn't end with a tile: K blocks of all its tiles form one stream.
Why faster  blocks of the next tile land while this one is converted and stored, and CTAs that run together
            work on neighbouring tiles, whose A and B stay in L2.
Costs       bookkeeping: which tile a block belongs to. A store must have left shared memory before the next
            tile is staged. The tensor core still idles during the epilogue: one team does both.
Roles       one warpgroup; the thread elected in warp 0 also loads and stores.
Barriers    tma2mma[s]: 1 arrival (expect_tx) + 32,768 B, CTA scope: stage s has landed.
            mma2tma[s]: 4 arrivals, one elected lane a warp, CTA scope: every warp has read stage s.
            CTA-wide, twice a tile: staging is free, the tile is staged.
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
    acc = accumulator(dtype)
    if warp == 0 and prims.elect_sync():
        init(tma2mma, STAGES, 1)
        init(mma2tma, STAGES, WARPGROUP // 32)
    prims.fence_mbarrier_init()
    prims.barrier_cta_sync(0)

    tiles = tiles_m * tiles_n
    blocks = cute.ceil_div(tiles - cta, ctas) * k_blocks  # of all tiles of this CTA
    # The next block to load: its tile's place is worked out once a tile, since divisions would stall each block.
    filling, next_tile, next_k = PipelineState.producer(STAGES), cta, Int32(0)
    next_m, next_n = grouped(next_tile, tiles_m, tiles_n, GROUP_M)
    if warp == 0:
        for _ in cutlass.range(cutlass.min(blocks, STAGES - 1), unroll=1):
            if prims.elect_sync():
                load(sA, sB, a_map, b_map, tma2mma, filling.stage, next_m, next_n, next_k)
            filling.advance()
            next_k += 1
            if next_k == k_blocks:
                next_k, next_tile = Int32(0), next_tile + ctas
                next_m, next_n = grouped(next_tile, tiles_m, tiles_n, GROUP_M)

    reading, releasing = PipelineState.consumer(STAGES), PipelineState.consumer(STAGES)
    block = Int32(0)
    for tile in cutlass.range(cta, tiles, ctas, unroll=1):
        for k in cutlass.range(k_blocks, unroll=1):
            wait(tma2mma, reading.stage, reading.phase)
            multiply(dtype, acc, tCrA, tCrB, reading.stage, k == 0)
            reading.advance()
            warpgroup.wait_group(1)  # the group before this one has read its stage
            if block > 0:
                if prims.elect_sync():
                    prims.mbarrier_arrive(mma2tma.subview(releasing.stage))
                releasing.advance()
            if warp == 0 and block + STAGES - 1 < blocks:
                wait(mma2tma, filling.stage, filling.phase)
                if prims.elect_sync():
                    load(sA, sB, a_map, b_map, tma2mma, filling.stage, next_m, next_n, next_k)
                filling.advance()
                next_k += 1
                if next_k == k_blocks:
                    next_k, next_tile = Int32(0), next_tile + ctas
                    next_m, next_n = grouped(next_tile, tiles_m, tiles_n, GROUP_M)
            block += 1
        warpgroup.wait_group(0)

        if warp == 0 and prims.elect_sync():
            prims.cp_async_bulk_wait_group(0, read=True)  # the last tile has left the staging
        prims.barrier_cta_sync(0)
        stage_tile(acc, sD, dtype, tid)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(0)
        if warp == 0 and prims.elect_sync():
            m, n = grouped(tile, tiles_m, tiles_n, GROUP_M)
            store_tile(sD, d_map, m, n)
    if warp == 0 and prims.elect_sync():
        prims.cp_async_bulk_wait_group(0)


kernel.set_name_prefix("hopper_step6", remove_cutlass_symbol=True)


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
    ).launch(grid=(cutlass.min(tiles_m * tiles_n, ctas), 1, 1), block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step6_persistent_fp16 and step6_persistent_bf16."""
    return step_functions("step6_persistent", host, aligned=True)
