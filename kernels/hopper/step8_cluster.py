"""Step 8, a cluster of two CTAs: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        pairs of CTAs on neighbouring SMs that compute two tiles one above the other, so with the same
            blocks of B. Each CTA loads half of a block of B and multicasts it into both.
Why faster  L2 sends each block of B once for two tiles: 24,576 B a block and CTA instead of 32,768 B.
Costs       the CTAs march together: a stage may be filled when the consumers of *both* have read it. Barriers
            are signalled across CTAs, with cluster scope, and neither CTA may exit while the other can still
            signal it: a cluster barrier at the end. An odd row of tiles leaves one CTA computing zeros.
Roles       warpgroup 0: producer, the thread elected in warp 0. Warpgroup 1: consumer; its warp 0 stores.
Barriers    tma2mma[s]: 1 arrival (expect_tx, own producer) + 32,768 B (own A, both halves of B), CTA scope.
            mma2tma[s]: 8 arrivals, one elected lane a consumer warp of both CTAs, waited for at cluster scope.
            named 10, 128 threads, twice a tile: staging is free, the tile is staged.
            cluster, twice: barriers are initialized; everything is done.
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
    STAGE_BYTES,
    STAGES,
    WARPGROUP,
    PipelineState,
    accumulator,
    address,
    barriers,
    fragments,
    grouped,
    init,
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

GROUP_M = 4  # rows of pairs of tiles in a band of the raster
CONSUMER_WARP = 4  # the first of warpgroup 1
STAGING = 10  # named barrier of the consumer
CLUSTER = 2
HALF_N = BLK_N // CLUSTER  # rows of B that one CTA loads for both
BOTH = 0b11  # multicast mask: every CTA of the cluster


@cute.jit
def load_shared(
    sA: cute.Tensor,
    sB: cute.Tensor,
    a_map: cuda.TensorMap,
    b_map: cuda.TensorMap,
    tma2mma: cutlass.Array,
    stage: Int32,
    m: Int32,
    n: Int32,
    k: Int32,
    rank: Int32,
) -> None:
    """As `load`, but B comes in halves: this CTA's to both, the other's from there. One thread calls it."""
    full = tma2mma.subview(stage)
    prims.mbarrier_arrive_expect_tx(full, STAGE_BYTES)
    prims.cp_async_bulk_tensor_shared_cta_global(
        address(sA, stage, BLK_M), a_map.get_ptr(), [k * BLK_K, m * BLK_M], full
    )
    prims.cp_async_bulk_tensor_shared_cluster_global(
        address(sB, stage, BLK_N) + rank * (HALF_N * BLK_K),
        b_map.get_ptr(),
        [k * BLK_K, n * BLK_N + rank * HALF_N],
        full,
        [],
        multicast_mask=BOTH,
    )


@cute.jit
def release(mma2tma: cutlass.Array, stage: Int32, rank: Int32) -> None:
    """One arrival a warp at both CTAs: this warp has read the stage, so either producer may fill it.

    Relaxed at cluster scope for the peer: a release at that scope is a fence over the whole GPU, every K block,
    and nothing that this warp wrote is handed over. What it read, wgmma has read: `wait_group` came before.
    """
    barrier = mma2tma.subview(stage)
    if prims.elect_sync():
        prims.mbarrier_arrive(barrier)
        prims.mbarrier_arrive(prims.mapa(barrier, rank ^ 1), scope=prims.MemScope.CLUSTER, relaxed=True)


@cute.kernel
def kernel(
    a_map: cutlass.GridConstant[cuda.TensorMap],
    b_map: cutlass.GridConstant[cuda.TensorMap],
    d_map: cutlass.GridConstant[cuda.TensorMap],
    pairs_m: Int32,
    tiles_n: Int32,
    k_blocks: Int32,
) -> None:
    """A cluster computes pairs of tiles cluster, cluster + clusters, … of D; rank 1 has the lower tile."""
    dtype = a_map.dtype
    tid, _, _ = cute.arch.thread_idx()
    cluster, _, _ = cute.arch.cluster_idx()
    clusters, _, _ = cute.arch.cluster_dim()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    warp = cute.arch.make_warp_uniform(tid // 32)
    sA = operand(dtype, BLK_M, STAGES)  # (BLK_M, BLK_K, STAGES)
    sB = operand(dtype, BLK_N, STAGES)  # (BLK_N, BLK_K, STAGES)
    sD = staging(dtype)
    tma2mma, mma2tma = barriers(STAGES), barriers(STAGES)
    tCrA, tCrB = fragments(sA, sB)
    if warp == 0 and prims.elect_sync():
        init(tma2mma, STAGES, 1)
        init(mma2tma, STAGES, CLUSTER * (WARPGROUP // 32))
    prims.fence_mbarrier_init()
    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()

    pairs = pairs_m * tiles_n
    if warp == 0 and prims.elect_sync():
        filling = PipelineState.producer(STAGES)
        for pair in cutlass.range(cluster, pairs, clusters, unroll=1):
            pair_m, n = grouped(pair, pairs_m, tiles_n, GROUP_M)
            for k in cutlass.range(k_blocks, unroll=1):
                wait(mma2tma, filling.stage, filling.phase, "cluster")
                load_shared(sA, sB, a_map, b_map, tma2mma, filling.stage, pair_m * CLUSTER + rank, n, k, rank)
                filling.advance()

    if warp >= CONSUMER_WARP:
        acc = accumulator(dtype)
        reading, releasing = PipelineState.consumer(STAGES), PipelineState.consumer(STAGES)
        for pair in cutlass.range(cluster, pairs, clusters, unroll=1):
            pair_m, n = grouped(pair, pairs_m, tiles_n, GROUP_M)
            for k in cutlass.range(k_blocks, unroll=1):
                wait(tma2mma, reading.stage, reading.phase)  # TMA signals it, from either CTA: no thread
                multiply(dtype, acc, tCrA, tCrB, reading.stage, k == 0)
                reading.advance()
                if k > 0:
                    warpgroup.wait_group(1)  # the group before this one has read its stage
                    release(mma2tma, releasing.stage, rank)
                    releasing.advance()
            warpgroup.wait_group(0)
            release(mma2tma, releasing.stage, rank)
            releasing.advance()

            if warp == CONSUMER_WARP and prims.elect_sync():
                prims.cp_async_bulk_wait_group(0, read=True)  # the last tile has left the staging
            prims.barrier_cta_sync(STAGING, thread_count=WARPGROUP)
            stage_tile(acc, sD, dtype, tid % WARPGROUP)
            prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
            prims.barrier_cta_sync(STAGING, thread_count=WARPGROUP)
            if warp == CONSUMER_WARP and prims.elect_sync():
                store_tile(sD, d_map, pair_m * CLUSTER + rank, n)
        if warp == CONSUMER_WARP and prims.elect_sync():
            prims.cp_async_bulk_wait_group(0)

    prims.barrier_cluster_arrive()
    prims.barrier_cluster_wait()


kernel.set_name_prefix("hopper_step8", remove_cutlass_symbol=True)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch as many clusters as can be resident in `ctas` CTAs, or as there are pairs of tiles."""
    pairs_m, tiles_n = cute.ceil_div(d.shape[0], CLUSTER * BLK_M), cute.ceil_div(d.shape[1], BLK_N)
    clusters = cutlass.min(pairs_m * tiles_n, cutlass.max(ctas // CLUSTER, 1))
    kernel(
        tensor_map(a, BLK_M, BLK_K),
        tensor_map(b, HALF_N, BLK_K),
        tensor_map(d, BLK_M, EPI_N),
        pairs_m,
        tiles_n,
        cute.ceil_div(a.shape[1], BLK_K),
    ).launch(
        grid=(clusters * CLUSTER, 1, 1), block=(2 * WARPGROUP, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream
    )


def functions() -> Sequence[Function]:
    """step8_cluster_fp16 and step8_cluster_bf16."""
    return step_functions("step8_cluster", host, aligned=True)
