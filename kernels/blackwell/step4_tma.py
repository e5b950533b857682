"""Step 4, TMA: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        the Tensor Memory Accelerator: one thread starts the copy of a whole box between global and shared
            memory; it swizzles, fills zeros beyond the edges and clips stores by itself. D leaves through
            it too.
Why faster  no thread computes an address or holds an element; the 32,768 bytes of a block are in flight at
            once, and D is written in full lines.
Costs       a tensor map a matrix, made on the host, whose strides are multiples of 16 bytes. A barrier counts
            bytes: expect_tx says how many belong to its phase. D is staged in shared memory under the swizzle
            that its tensor map names, with a proxy fence before TMA reads what threads wrote.
Roles       one elected thread of warp 0 loads and issues, in lockstep; 128 threads write back.
Barriers    tma2mma: 1 arrival (expect_tx) + 32,768 B, CTA scope: the block has landed.
            mma2tma: 1 arrival (commit), CTA scope: the block is multiplied, its tile may be overwritten.
            mma2ld: 1 arrival (commit), CTA scope: the accumulator is complete.
            CTA-wide: a chunk of D is staged; the chunk before it has been read by TMA.
Shared      A 16,384 B + B 16,384 B + D 16,384 B (128 × EPI_N) + 28 B = 49,180 B. TMEM: 128 columns.
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
from kernels.blackwell.pipeline import barriers, consumer, init, wait, wait_phase
from kernels.targets import Function

BLK_M = 128
BLK_N = 128
STAGE_BYTES = (BLK_M + BLK_N) * BLK_K * 2


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
    sA = cutlass.Array(dtype, BLK_M * BLK_K, space=SMEM, alignment=1024)  # (BLK_M, BLK_K)
    sB = cutlass.Array(dtype, BLK_N * BLK_K, space=SMEM, alignment=1024)  # (BLK_N, BLK_K)
    sD = cutlass.Array(dtype, BLK_M * EPI_N, space=SMEM, alignment=1024)  # (BLK_M, EPI_N)
    tma2mma, mma2tma, mma2ld = barriers(1), barriers(1), barriers(1)
    slot = cutlass.Array(Int32, 1, space=SMEM)

    if warp == 0:
        if prims.elect_sync():
            init(tma2mma, 1, 1)
            init(mma2tma, 1, 1)
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
            block = consumer(1)
            for k in range(k_blocks):
                prims.mbarrier_arrive_expect_tx(tma2mma, STAGE_BYTES)
                load(sA, a_map, m * BLK_M, k * BLK_K, tma2mma)
                load(sB, b_map, n * BLK_N, k * BLK_K, tma2mma)
                wait(tma2mma, block)
                multiply("cta_1", accumulator, k_major(sA), k_major(sB), descriptor, k > 0)
                prims.tcgen05_commit(mma2tma, group="cta_1")
                wait(mma2tma, block)
                block.advance()
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


kernel.set_name_prefix("blackwell_step4", remove_cutlass_symbol=True, keep_mangled_name=False)


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
