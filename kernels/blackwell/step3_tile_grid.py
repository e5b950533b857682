"""Step 3, a grid of tiles: receives A [M, K] and B [N, K] of any size, hands on D = A·Bᵀ.

Adds        a CTA a tile of D, on a grid of ⌈M / 128⌉ × ⌈N / 128⌉; edges are masked in loads and stores.
Why faster  all SMs work. Up to four CTAs share an SM: one multiplies while others fill.
Costs       each block of A is loaded by every column of tiles, each block of B by every row: L2 must hold
            them. A thread still moves two bytes at a time and computes an address and a mask for each: Step
            4.
Roles       128 threads do everything; warp 0 allocates TMEM, one elected thread of it issues.
Barriers    CTA-wide, once a block: the tile is in shared memory; at the end, TMEM may be freed.
            mma2ld: 1 arrival (commit) a block, CTA scope: the block is multiplied; in the end, all are.
Shared      A 16,384 B + B 16,384 B + 12 B. TMEM: 128 columns, a quarter of an SM's.
Limits      16-bit output, no epilogue. Any leading dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from kernels.blackwell.epilogue import read_chunk
from kernels.blackwell.parts import (
    BLK_K,
    SMEM,
    WARPGROUP,
    fill,
    instruction,
    k_major,
    multiply,
    step_functions,
    store_masked,
)
from kernels.blackwell.pipeline import barriers, consumer, init, wait
from kernels.targets import Function

BLK_M = 128
BLK_N = 128
LD_N = 32  # columns of one read from TMEM


@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor) -> None:
    """One CTA computes one tile of D."""
    dtype = a.element_type
    tid, _, _ = cute.arch.thread_idx()
    m, n, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    sA = cutlass.Array(dtype, BLK_M * BLK_K, space=SMEM, alignment=1024)  # (BLK_M, BLK_K)
    sB = cutlass.Array(dtype, BLK_N * BLK_K, space=SMEM, alignment=1024)  # (BLK_N, BLK_K)
    mma2ld = barriers(1)
    slot = cutlass.Array(Int32, 1, space=SMEM)  # where alloc writes the address in TMEM

    if warp == 0:
        if prims.elect_sync():
            init(mma2ld, 1, 1)
        prims.tcgen05_alloc(slot, BLK_N, group="cta_1")
        prims.tcgen05_relinquish_alloc_permit(group="cta_1")
    prims.fence_mbarrier_init()
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    tmem = slot.load()
    accumulator = prims.make_tmem_ptr(tmem, Float32)  # (128 lanes, BLK_N columns)

    done = consumer(1)
    for k in range(cute.ceil_div(a.shape[1], BLK_K)):
        fill(sA, a, BLK_M, m * BLK_M, k * BLK_K, tid)
        fill(sB, b, BLK_N, n * BLK_N, k * BLK_K, tid)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(0)
        if warp == 0:
            if prims.elect_sync():
                descriptor = instruction(dtype, BLK_M, BLK_N)
                multiply("cta_1", accumulator, k_major(sA), k_major(sB), descriptor, k > 0)
                prims.tcgen05_commit(mma2ld, group="cta_1")
        wait(mma2ld, done)
        done.advance()

    prims.tcgen05_fence("after_thread_sync")
    for column in cutlass.range_constexpr(0, BLK_N, LD_N):
        values = read_chunk(tmem, warp, column, LD_N)
        prims.tcgen05_wait("load")
        store_masked(values, d, m * BLK_M + tid, n * BLK_N + column)

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, BLK_N, group="cta_1")


kernel.set_name_prefix("blackwell_step3", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch a CTA a tile; `ctas` is not used."""
    grid = (cute.ceil_div(d.shape[0], BLK_M), cute.ceil_div(d.shape[1], BLK_N), 1)
    kernel(a, b, d).launch(grid=grid, block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step3_tile_grid_fp16 and step3_tile_grid_bf16."""
    return step_functions("step3_tile_grid", host, aligned=False)
