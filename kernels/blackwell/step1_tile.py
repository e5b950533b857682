"""Step 1, one tensor-core tile: receives A [M, K] and B [N, K] with M, N ≤ 128 and K ≤ 64, hands on D = A·Bᵀ.

Adds        tcgen05.mma: one thread tells the tensor core to multiply 128×16 by 16×128 from shared memory
            and to add to 128×128 fp32 in tensor memory (TMEM); four of them make this tile.
Why faster  one instruction does 262,144 multiply-adds, and no thread holds any of the sum in its registers.
Costs       operands lie in shared memory as the tensor core reads them (K-major, 128-byte swizzle). Threads
            write there through the generic proxy, it reads through the async proxy: a proxy fence and a
            barrier stand between. It works on its own: commit makes a barrier follow it, and TMEM, which is
            allocated and freed by hand, is read back by tcgen05.ld, whose registers count after wait::ld
            only.
Roles       128 threads do everything; warp 0 allocates TMEM, one elected thread of it issues.
Barriers    CTA-wide: the tile is in shared memory; later, TMEM may be freed.
            mma2ld: 1 arrival (commit), CTA scope: the accumulator is complete.
Shared      A 16,384 B + B 16,384 B + 12 B. TMEM: 128 columns (of 512) × 128 lanes.
Limits      one tile, 16-bit output, no epilogue. Any leading dimension: elements are loaded one by one, and
            those beyond the matrices are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.experimental import primitives as prims

from kernels.blackwell.parts import (
    BLK_K,
    K_STEP,
    MMA_K,
    SMEM,
    SPAN,
    WARPGROUP,
    fill,
    step_functions,
    store_masked,
)
from kernels.blackwell.pipeline import barriers, init, wait_phase
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
    fill(sA, a, BLK_M, Int32(0), Int32(0), tid)
    fill(sB, b, BLK_N, Int32(0), Int32(0), tid)
    prims.fence_mbarrier_init()
    prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    tmem = slot.load()
    accumulator = prims.make_tmem_ptr(tmem, Float32)  # (128 lanes, BLK_N columns)

    if warp == 0:
        if prims.elect_sync():
            descriptor = prims.Tcgen05InstrDesc.build(
                c_dtype=Float32, a_dtype=dtype, b_dtype=dtype, m_dim=BLK_M, n_dim=BLK_N
            )
            swizzle = prims.Tcgen05SmemSwizzle.SWIZZLE_128B
            tile_a = prims.Tcgen05SmemDesc.build(sA, 16, 8 * SPAN, layout=swizzle)
            tile_b = prims.Tcgen05SmemDesc.build(sB, 16, 8 * SPAN, layout=swizzle)
            for j in cutlass.range_constexpr(BLK_K // MMA_K):
                prims.tcgen05_mma(
                    "f16",
                    "cta_1",
                    accumulator,
                    tile_a.advance_start_address(j * K_STEP),
                    tile_b.advance_start_address(j * K_STEP),
                    descriptor,
                    j > 0,  # the first overwrites what TMEM held, the others add
                )
            prims.tcgen05_commit(mma2ld, group="cta_1")

    wait_phase(mma2ld, 0)
    prims.tcgen05_fence("after_thread_sync")
    for n in cutlass.range_constexpr(0, BLK_N, LD_N):
        # A warp reaches 32 lanes, those of its index modulo 4: thread t holds row t.
        piece = prims.make_tmem_ptr_from_warp_row_col(tmem, warp, n + (tmem & 0xFFFF), Float32)
        values = prims.tcgen05_ld("32x32b", piece, num=LD_N)
        prims.tcgen05_wait("load")
        store_masked(values, d, tid, Int32(n))

    prims.tcgen05_fence("before_thread_sync")
    prims.barrier_cta_sync(0)
    prims.tcgen05_fence("after_thread_sync")
    if warp == 0:
        prims.tcgen05_dealloc(accumulator, BLK_N, group="cta_1")


# Names without "cutlass": with it in the name of an entry, ptxas crashed or spilled.
kernel.set_name_prefix("blackwell_step1", remove_cutlass_symbol=True, keep_mangled_name=False)


@cute.jit
def host(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32, stream: Any) -> None:
    """Launch one CTA; `ctas` is not used."""
    kernel(a, b, d).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1), stream=stream)


def functions() -> Sequence[Function]:
    """step1_tile_fp16 and step1_tile_bf16."""
    return step_functions("step1_tile", host, aligned=False)
