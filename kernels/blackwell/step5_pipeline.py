"""Step 5, a software pipeline: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        a ring of PIPE_DEPTH stages: the load of a later block is started before the tensor core is done
            with this one.
Why faster  a load's latency (most of a microsecond) hides behind the multiplication of the block before; the
            tensor core always has work queued, as MMAs and commits of one thread run in order by themselves.
Costs       a place and a phase for each side of the ring. One thread does both, so it can't start a load
            while it waits for a block; and nothing hides the start and the end of a tile.
Roles       one elected thread of warp 0 loads PIPE_DEPTH - 1 blocks ahead and issues; 128 threads write back.
Barriers    tma2mma[s]: 1 arrival (expect_tx) + 32,768 B, CTA scope: stage s has landed.
            mma2tma[s]: 1 arrival (commit), CTA scope: stage s is multiplied and may be overwritten.
            mma2ld: 1 arrival (commit), CTA scope: the accumulator is complete.
            CTA-wide: a chunk of D is staged; the chunk before it has been read by TMA.
Shared      2 × 32,768 B + D 16,384 B + 44 B = 81,964 B: two CTAs an SM. TMEM: 128 columns.
Limits      16-bit output, no epilogue; addresses at 16 bytes, leading dimensions in multiples of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.blackwell.epilogue import EPI_N, read_chunk, stage_row
from kernels.blackwell.parts import (
    BLK_K,
    SMEM,
    WARPGROUP,
    instruction,
    k_major,
    load,
    multiply,
    step_functions,
    tensor_map,
)
from kernels.blackwell.pipeline import barriers, consumer, init, producer, wait, wait_phase
from kernels.targets import Function

BLK_M = 128
BLK_N = 128
PIPE_DEPTH = 2
A_TILE = BLK_M * BLK_K  # elements
B_TILE = BLK_N * BLK_K
STAGE_BYTES = (A_TILE + B_TILE) * 2


def load_stage(
    sA: cutlass.Array,
    sB: cutlass.Array,
    a_map: cuda.TensorMap,
    b_map: cuda.TensorMap,
    tma2mma: cutlass.Array,
    stage: Int32,
    m: Int32,
    n: Int32,
    k: Int32,
) -> None:
    """Start the loads of block k of tile (m, n) into a stage."""
    full = tma2mma.subview(stage)
    prims.mbarrier_arrive_expect_tx(full, STAGE_BYTES)
    load(sA.subview(stage * A_TILE), a_map, m * BLK_M, k * BLK_K, full)
    load(sB.subview(stage * B_TILE), b_map, n * BLK_N, k * BLK_K, full)


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
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    sA = cutlass.Array(dtype, PIPE_DEPTH * A_TILE, space=SMEM, alignment=1024)  # (PIPE_DEPTH, BLK_M, BLK_K)
    sB = cutlass.Array(dtype, PIPE_DEPTH * B_TILE, space=SMEM, alignment=1024)  # (PIPE_DEPTH, BLK_N, BLK_K)
    sD = cutlass.Array(dtype, BLK_M * EPI_N, space=SMEM, alignment=1024)  # (BLK_M, EPI_N)
    tma2mma, mma2tma, mma2ld = barriers(PIPE_DEPTH), barriers(PIPE_DEPTH), barriers(1)
    slot = cutlass.Array(Int32, 1, space=SMEM)

    if warp == 0:
        if prims.elect_sync():
            init(tma2mma, PIPE_DEPTH, 1)
            init(mma2tma, PIPE_DEPTH, 1)
            init(mma2ld, 1, 1)
        prims.tcgen05_alloc(slot, BLK_N, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    prims.fence_mbarrier_init()
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    tmem = slot.load()
    accumulator = prims.make_tmem_ptr(tmem, Float32)  # (128 lanes, BLK_N columns)

    if warp == 0:
        if prims.elect_sync():
            descriptor = instruction(dtype, BLK_M, BLK_N)
            filling = producer(PIPE_DEPTH)
            for k in range(cutlass.min(k_blocks, PIPE_DEPTH - 1)):
                load_stage(sA, sB, a_map, b_map, tma2mma, filling.stage, m, n, k)
                filling.advance()
            reading = consumer(PIPE_DEPTH)
            for k in range(k_blocks):
                wait(tma2mma, reading)
                tile_a, tile_b = sA.subview(reading.stage * A_TILE), sB.subview(reading.stage * B_TILE)
                multiply("cta_1", accumulator, k_major(tile_a), k_major(tile_b), descriptor, k > 0)
                prims.tcgen05_commit(mma2tma.subview(reading.stage), group="cta_1")
                reading.advance()
                if k + PIPE_DEPTH - 1 < k_blocks:
                    wait(
                        mma2tma, filling
                    )  # for the block before this one: this one is still being multiplied
                    load_stage(sA, sB, a_map, b_map, tma2mma, filling.stage, m, n, k + PIPE_DEPTH - 1)
                    filling.advance()
            prims.tcgen05_commit(mma2ld, group="cta_1")

    wait_phase(mma2ld, 0)
    prims.tcgen05_fence("after_thread_sync")
    for chunk in cutlass.range_constexpr(BLK_N // EPI_N):
        values = read_chunk(tmem, warp, chunk * EPI_N)
        prims.tcgen05_wait("load")
        stage_row(sD.data_ptr(), tid, values.to(dtype), EPI_N * 2)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(0)
        if warp == 0:
            if prims.elect_sync():
                prims.cp_async_bulk_tensor_global_shared_cta(
                    d_map.get_ptr(), sD, [n * BLK_N + chunk * EPI_N, m * BLK_M]
                )
                prims.cp_async_bulk_commit_group()
                prims.cp_async_bulk_wait_group(0, read=True)
        prims.barrier_cta_sync(0)

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, BLK_N, group="cta_1")


kernel.set_name_prefix("blackwell_step5", remove_cutlass_symbol=True, keep_mangled_name=False)


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
