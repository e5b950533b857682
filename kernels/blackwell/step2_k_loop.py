"""Step 2, the K loop: receives A [M, K] and B [N, K] with M, N ≤ 128 and any K, hands on D = A·Bᵀ.

Adds        a loop over blocks of K; the accumulator stays in TMEM from block to block.
Why faster  D is written once, whatever K is: no sum leaves the tensor core before it is complete.
Costs       lockstep: fill, multiply, wait for the tensor core, fill again. Each side idles while the other
            works, until Step 5. A wait needs to know which flip it waits for: the phase.
Roles       128 threads do everything; warp 0 allocates TMEM, one elected thread of it issues.
Barriers    CTA-wide, once a block: the tile is in shared memory; at the end, TMEM may be freed.
            mma2ld: 1 arrival (commit) a block, CTA scope: the block is multiplied, its tile may be
            overwritten, and after the last block the accumulator is complete.
Shared      A 16,384 B + B 16,384 B + 12 B. TMEM: 128 columns.
Limits      one tile, 16-bit output, no epilogue. Any leading dimension.
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
    """One CTA computes D."""
    dtype = a.element_type
    tid, _, _ = cute.arch.thread_idx()
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
        fill(sA, a, BLK_M, Int32(0), k * BLK_K, tid)
        fill(sB, b, BLK_N, Int32(0), k * BLK_K, tid)
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
    for n in cutlass.range_constexpr(0, BLK_N, LD_N):
        values = read_chunk(tmem, warp, n, LD_N)
        prims.tcgen05_wait("load")
        store_masked(values, d, tid, Int32(n))

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, BLK_N, group="cta_1")


kernel.set_name_prefix("blackwell_step2", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch one CTA; `ctas` is not used."""
    kernel(a, b, d).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step2_k_loop_fp16 and step2_k_loop_bf16."""
    return step_functions("step2_k_loop", host, aligned=False)
