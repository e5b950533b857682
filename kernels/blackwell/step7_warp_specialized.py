"""Step 7, warp specialization: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        a role a warp: one loads, one issues MMAs, a warpgroup writes back. They meet at barriers only,
            so each runs ahead as far as its ring lets it.
Why faster  the next block loads while this one waits to be multiplied, whatever the other roles do; the next
            tile's loads start while this one is written back, and its MMAs once the accumulator is drained.
Costs       two rings, four barriers, each side with its own place and phase; no CTA-wide barrier inside a
            role, or the others would wait for it: the writeback warpgroup has a named one.
Roles       warpgroup 0 (warps 0–3) writes back. Warpgroup 1: warp 0 (4) issues MMAs, warp 3 (7) loads, one
            elected thread each; the other two idle. Warp 0 allocates and frees TMEM.
Timeline    load       | k0 k1 ·· | next tile's k0 k1 ··
            multiply   |    k0 k1 ·· | (drained?) k0 k1 ··
            write back |             | ld st ld st |
Barriers    tma2mma[s]: 1 arrival (expect_tx) + 32,768 B, CTA scope: stage s has landed.
            mma2tma[s]: 1 arrival (commit), CTA scope: stage s is multiplied and may be overwritten.
            mma2ld: 1 arrival (commit), CTA scope: the accumulator is complete.
            ld2mma: 128 arrivals, CTA scope: every writeback thread has drained its row.
            named 10, 128 threads: a chunk of D is staged; the chunk before it has been read by TMA.
            CTA-wide: set up; all done, TMEM may be freed.
Shared      2 × 32,768 B + D 16,384 B + 52 B = 81,972 B: two CTAs an SM. TMEM: 128 columns.
Limits      16-bit output, no epilogue; addresses at 16 bytes, leading dimensions in multiples of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.blackwell.epilogue import EPI_BARRIER, EPI_N, read_chunk, stage_row
from kernels.blackwell.parts import (
    BLK_K,
    SMEM,
    WARPGROUP,
    grouped,
    instruction,
    k_major,
    load,
    multiply,
    step_functions,
    tensor_map,
)
from kernels.blackwell.pipeline import barriers, consumer, init, producer, wait
from kernels.targets import Function

BLK_M = 128
BLK_N = 128
PIPE_DEPTH = 2
A_TILE = BLK_M * BLK_K  # elements
B_TILE = BLK_N * BLK_K
STAGE_BYTES = (A_TILE + B_TILE) * 2
THREADS = 2 * WARPGROUP
MMA_WARP = 4  # warp 0 of warpgroup 1
TMA_WARP = 7  # warp 3 of warpgroup 1


@cute.kernel
def kernel(
    a_map: cutlass.GridConstant[cuda.TensorMap],
    b_map: cutlass.GridConstant[cuda.TensorMap],
    d_map: cutlass.GridConstant[cuda.TensorMap],
    tiles_m: Int32,
    tiles_n: Int32,
    k_blocks: Int32,
) -> None:
    """One CTA computes tiles of D."""
    dtype = a_map.dtype
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    sA = cutlass.Array(dtype, PIPE_DEPTH * A_TILE, space=SMEM, alignment=1024)  # (PIPE_DEPTH, BLK_M, BLK_K)
    sB = cutlass.Array(dtype, PIPE_DEPTH * B_TILE, space=SMEM, alignment=1024)  # (PIPE_DEPTH, BLK_N, BLK_K)
    sD = cutlass.Array(dtype, BLK_M * EPI_N, space=SMEM, alignment=1024)  # (BLK_M, EPI_N)
    tma2mma, mma2tma = barriers(PIPE_DEPTH), barriers(PIPE_DEPTH)
    mma2ld, ld2mma = barriers(1), barriers(1)
    slot = cutlass.Array(Int32, 1, space=SMEM)

    if warp == 0:
        if prims.elect_sync():
            init(tma2mma, PIPE_DEPTH, 1)
            init(mma2tma, PIPE_DEPTH, 1)
            init(mma2ld, 1, 1)
            init(ld2mma, 1, WARPGROUP)
        prims.tcgen05_alloc(slot, BLK_N, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    prims.fence_mbarrier_init()
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    tmem = slot.load()
    accumulator = prims.make_tmem_ptr(tmem, Float32)  # (128 lanes, BLK_N columns)
    tiles = tiles_m * tiles_n

    if warp == TMA_WARP:
        if prims.elect_sync():
            filling = producer(PIPE_DEPTH)
            for tile in range(cta, tiles, ctas):
                m, n = grouped(tile, tiles_m, tiles_n)
                for k in range(k_blocks):
                    wait(mma2tma, filling)
                    full = tma2mma.subview(filling.stage)
                    prims.mbarrier_arrive_expect_tx(full, STAGE_BYTES)
                    load(sA.subview(filling.stage * A_TILE), a_map, m * BLK_M, k * BLK_K, full)
                    load(sB.subview(filling.stage * B_TILE), b_map, n * BLK_N, k * BLK_K, full)
                    filling.advance()

    if warp == MMA_WARP:
        if prims.elect_sync():
            descriptor = instruction(dtype, BLK_M, BLK_N)
            reading, drained = consumer(PIPE_DEPTH), producer(1)
            for _tile in range(cta, tiles, ctas):
                wait(ld2mma, drained)
                prims.tcgen05_fence("after_thread_sync")
                for k in range(k_blocks):
                    wait(tma2mma, reading)
                    tile_a, tile_b = sA.subview(reading.stage * A_TILE), sB.subview(reading.stage * B_TILE)
                    multiply("cta_1", accumulator, k_major(tile_a), k_major(tile_b), descriptor, k > 0)
                    prims.tcgen05_commit(mma2tma.subview(reading.stage), group="cta_1")
                    reading.advance()
                prims.tcgen05_commit(mma2ld, group="cta_1")
                drained.advance()

    if warp < 4:
        ready = consumer(1)
        for tile in range(cta, tiles, ctas):
            m, n = grouped(tile, tiles_m, tiles_n)
            wait(mma2ld, ready)
            ready.advance()
            prims.tcgen05_fence("after_thread_sync")
            for chunk in cutlass.range_constexpr(BLK_N // EPI_N):
                values = read_chunk(tmem, warp, chunk * EPI_N)
                prims.tcgen05_wait("load")
                if cutlass.const_expr((chunk + 1) * EPI_N == BLK_N):
                    prims.tcgen05_fence("before_thread_sync")
                    prims.mbarrier_arrive(ld2mma)  # drained: the next tile's MMAs may start
                stage_row(sD.data_ptr(), tid, values.to(dtype), EPI_N * 2)
                prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
                prims.barrier_cta_sync(EPI_BARRIER, thread_count=WARPGROUP)
                if warp == 0:
                    if prims.elect_sync():
                        prims.cp_async_bulk_tensor_global_shared_cta(
                            d_map.get_ptr(), sD, [n * BLK_N + chunk * EPI_N, m * BLK_M]
                        )
                        prims.cp_async_bulk_commit_group()
                        prims.cp_async_bulk_wait_group(0, read=True)
                prims.barrier_cta_sync(EPI_BARRIER, thread_count=WARPGROUP)

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, BLK_N, group="cta_1")


kernel.set_name_prefix("blackwell_step7", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch at most `ctas` CTAs, as many as can be resident."""
    tiles_m, tiles_n = cute.ceil_div(d.shape[0], BLK_M), cute.ceil_div(d.shape[1], BLK_N)
    grid = (cutlass.min(tiles_m * tiles_n, ctas), 1, 1)
    kernel(
        tensor_map(a, BLK_M, BLK_K),
        tensor_map(b, BLK_N, BLK_K),
        tensor_map(d, BLK_M, EPI_N),
        tiles_m,
        tiles_n,
        cute.ceil_div(a.shape[1], BLK_K),
    ).launch(grid=grid, block=(THREADS, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step7_warp_specialized_fp16 and step7_warp_specialized_bf16."""
    return step_functions("step7_warp_specialized", host, aligned=True)
