"""Step 8, a cluster of two CTAs: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        tcgen05.mma on a CTA pair (cta_group::2): 256×256, A by rows and B by halves from both CTAs'
            shared memory, each CTA keeps the sums of its 128 rows. One thread of the leader (rank 0) issues
            for both.
Why faster  an SM stages half of B for twice the columns: 32,768 bytes feed 128×256×64 multiply-adds instead
            of 128×128×64. The accumulator is 256 wide, so a tile's start and end weigh half; the ring is 4
            deep.
Costs       barriers reach across CTAs: both CTAs' loads arrive on the leader's tma2mma, whose expect_tx
            names the bytes of both; a multicast commit (mask 0b11) tells both that a stage is read or an
            accumulator is ready; ld2mma collects both warpgroups. Such waits and arrives have cluster
            scope. A CTA must not leave while its peer may still signal it or read its tile.
Roles       as in Step 7 in both CTAs, but MMAs are issued in the leader only.
Barriers    tma2mma[s]: leader's; 1 arrival (expect_tx) + 65,536 B (CTA_GROUP × 32,768), cluster scope.
            mma2tma[s]: 1 arrival (commit to both CTAs), cluster scope: stage s is multiplied.
            mma2ld: 1 arrival (commit to both CTAs), cluster scope: the accumulator is complete.
            ld2mma: leader's; 256 arrivals, 128 a CTA, cluster scope: both halves of the accumulator are
            drained.
            named 10, 128 threads: a chunk of D is staged; the chunk before it has been read by TMA.
            cluster-wide: set up; all done in both CTAs, TMEM may be freed.
Shared      4 × 32,768 B + D 16,384 B + 84 B = 147,540 B a CTA. TMEM: 256 columns a CTA.
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
    load_pair,
    multiply,
    step_functions,
    tensor_map,
)
from kernels.blackwell.pipeline import arrive_at, barriers, consumer, init, producer, wait, wait_all
from kernels.targets import Function

CTA_GROUP = 2
LEADER = 0
MMA_M = 256
MMA_N = 256
BLK_M = MMA_M // CTA_GROUP  # rows of A, and of D, a CTA
BLK_N = MMA_N // CTA_GROUP  # rows of B a CTA stages
PIPE_DEPTH = 4
A_TILE = BLK_M * BLK_K  # elements
B_TILE = BLK_N * BLK_K
STAGE_BYTES = (A_TILE + B_TILE) * 2  # a CTA
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
    """Two CTAs compute tiles of D, 128 of the 256 rows each."""
    dtype = a_map.dtype
    tid, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    rank = prims.cluster_ctarank()
    cluster, clusters = cta // CTA_GROUP, ctas // CTA_GROUP
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
            init(ld2mma, 1, CTA_GROUP * WARPGROUP)
        prims.tcgen05_alloc(slot, MMA_N, group="cta_2")
        prims.tcgen05_relinquish_alloc_permit(group="cta_2")
    prims.fence_mbarrier_init()
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()
    prims.tcgen05_fence("after_thread_sync")
    tmem = slot.load()
    accumulator = prims.make_tmem_ptr(tmem, Float32)  # (128 lanes, MMA_N columns)
    tiles = tiles_m * tiles_n

    if warp == TMA_WARP:
        if prims.elect_sync():
            filling = producer(PIPE_DEPTH)
            for tile in range(cluster, tiles, clusters):
                m, n = grouped(tile, tiles_m, tiles_n)
                for k in range(k_blocks):
                    wait(mma2tma, filling, "cluster")
                    full = tma2mma.subview(filling.stage)
                    if rank == LEADER:
                        prims.mbarrier_arrive_expect_tx(full, STAGE_BYTES * CTA_GROUP)
                    row, column = m * MMA_M + rank * BLK_M, n * MMA_N + rank * BLK_N
                    load_pair(sA.subview(filling.stage * A_TILE), a_map, [k * BLK_K, row], full)
                    load_pair(sB.subview(filling.stage * B_TILE), b_map, [k * BLK_K, column], full)
                    filling.advance()
            wait_all(mma2tma, filling, "cluster")

    if warp == MMA_WARP and rank == LEADER:
        if prims.elect_sync():
            descriptor = instruction(dtype, MMA_M, MMA_N)
            reading, drained = consumer(PIPE_DEPTH), producer(1)
            for _tile in range(cluster, tiles, clusters):
                wait(ld2mma, drained, "cluster")
                prims.tcgen05_fence("after_thread_sync")
                for k in range(k_blocks):
                    wait(tma2mma, reading, "cluster")
                    tile_a, tile_b = sA.subview(reading.stage * A_TILE), sB.subview(reading.stage * B_TILE)
                    multiply("cta_2", accumulator, k_major(tile_a), k_major(tile_b), descriptor, k > 0)
                    prims.tcgen05_commit(mma2tma.subview(reading.stage), multicast_mask=0b11, group="cta_2")
                    reading.advance()
                prims.tcgen05_commit(mma2ld, multicast_mask=0b11, group="cta_2")
                drained.advance()

    if warp < 4:
        ready = consumer(1)
        for tile in range(cluster, tiles, clusters):
            m, n = grouped(tile, tiles_m, tiles_n)
            wait(mma2ld, ready, "cluster")
            ready.advance()
            prims.tcgen05_fence("after_thread_sync")
            for chunk in cutlass.range_constexpr(MMA_N // EPI_N):
                values = read_chunk(tmem, warp, chunk * EPI_N)
                prims.tcgen05_wait("load")
                if cutlass.const_expr((chunk + 1) * EPI_N == MMA_N):
                    prims.tcgen05_fence("before_thread_sync")
                    arrive_at(ld2mma, LEADER)  # drained: the next tile's MMAs may start
                stage_row(sD.data_ptr(), tid, values.to(dtype), EPI_N * 2)
                prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
                prims.barrier_cta_sync(EPI_BARRIER, thread_count=WARPGROUP)
                if warp == 0:
                    if prims.elect_sync():
                        prims.cp_async_bulk_tensor_global_shared_cta(
                            d_map.get_ptr(), sD, [n * MMA_N + chunk * EPI_N, m * MMA_M + rank * BLK_M]
                        )
                        prims.cp_async_bulk_commit_group()
                        prims.cp_async_bulk_wait_group(0, read=True)
                prims.barrier_cta_sync(EPI_BARRIER, thread_count=WARPGROUP)

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, MMA_N, group="cta_2")


kernel.set_name_prefix("blackwell_step8", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch at most `ctas` CTAs, as many as can be resident."""
    tiles_m, tiles_n = cute.ceil_div(d.shape[0], MMA_M), cute.ceil_div(d.shape[1], MMA_N)
    clusters = cutlass.min(tiles_m * tiles_n, ctas // CTA_GROUP)
    kernel(
        tensor_map(a, BLK_M, BLK_K),
        tensor_map(b, BLK_N, BLK_K),
        tensor_map(d, BLK_M, EPI_N),
        tiles_m,
        tiles_n,
        cute.ceil_div(a.shape[1], BLK_K),
    ).launch(
        grid=(clusters * CTA_GROUP, 1, 1), block=(THREADS, 1, 1), cluster=(CTA_GROUP, 1, 1), stream=stream
    )


def functions() -> Sequence[Function]:
    """step8_cluster_fp16 and step8_cluster_bf16."""
    return step_functions("step8_cluster", host, aligned=True)
