"""Parts that several steps of the ladder hold identically: receives tiles, hands on operands, stages, stores.

Shapes are those of Steps 1 to 8: a CTA tile of 128×128, K in blocks of 64. 64 elements of 16 bits are 128
bytes, the span of the widest swizzle, so one K block of a row is exactly one span. Everything but sizes,
addresses and coordinates is fixed at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.targets import Function

BLK_M = 128
BLK_N = 128
BLK_K = 64
WARPGROUP = 128  # threads that issue one wgmma together
STAGE_BYTES = (BLK_M + BLK_N) * BLK_K * 2  # A and B of one K block
STAGES = 6  # of the ring, from Step 5: 196,608 B, and 32,768 B remain for D
EPI_N = 64  # columns of one store: 128 bytes, a span of the swizzle
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}


# Shared memory and the tensor core


def operand(dtype: type, rows: int, stages: int = 1) -> cute.Tensor:
    """Shared memory for `stages` blocks of an operand, (rows, BLK_K, stages), K-major, 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    layout = cute.tile_to_shape(atom, (rows, BLK_K, stages), order=(0, 1, 2))
    allocator = cutlass.memory.SmemAllocator()
    return allocator.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)


def staging(dtype: type) -> cutlass.Array:
    """Shared memory through which a tile leaves: BLK_N / EPI_N pieces of BLK_M × EPI_N, 32,768 B."""
    return cutlass.Array(dtype, BLK_M * BLK_N, space=cutlass.AddressSpace.smem, alignment=1024)


def barriers(count: int) -> cutlass.Array:
    """`count` mbarriers of 8 bytes."""
    return cutlass.Array(cutlass.Int64, count, space=cutlass.AddressSpace.smem, alignment=8)


def tiled_mma(dtype: type) -> cute.TiledMma:
    """wgmma of one warpgroup, m64n128k16: A and B from shared memory, both K-major, fp32 accumulator."""
    shape = (64, BLK_N, 16)
    source = warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, cutlass.Float32, shape, source, OperandMajorMode.K, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op))


def accumulator(dtype: type) -> cute.Tensor:
    """fp32 registers of one thread for the CTA tile: ((2, 2, BLK_N / 8), BLK_M / 64, 1), 128 of them."""
    return cute.make_rmem_tensor(tiled_mma(dtype).partition_shape_C((BLK_M, BLK_N)), cutlass.Float32)


def fragments(sA: cute.Tensor, sB: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared-memory descriptors of both operands: (MMA, blocks of 64 rows, K slices of 16, stages)."""
    mma = tiled_mma(sA.element_type)
    whole = mma.get_slice(0)
    return mma.make_fragment_A(whole.partition_A(sA)), mma.make_fragment_B(whole.partition_B(sB))


@cute.jit
def fill(
    s: cute.Tensor, g: cute.Tensor, rows: cutlass.Constexpr, block: Int32, k_block: Int32, tid: Int32
) -> None:
    """Copy block (block, k_block) of [rows, BLK_K] to shared memory by elements, zeros beyond the matrix.

    Neighbouring threads read neighbouring elements. What they write is for wgmma to read: a proxy fence and a
    barrier must follow.
    """
    column = tid % BLK_K
    for i in cutlass.range(rows * BLK_K // WARPGROUP, unroll=8):  # all at once would take every register
        row = (i * WARPGROUP + tid) // BLK_K
        r, k = block * rows + row, k_block * BLK_K + column
        value = g.element_type(0.0)
        if r < g.shape[0] and k < g.shape[1]:
            value = g[r, k]
        s[row, column, 0] = value


@cute.jit
def multiply(
    dtype: cutlass.Constexpr, acc: cute.Tensor, tCrA: cute.Tensor, tCrB: cute.Tensor, stage: Int32, fresh: Any
) -> None:
    """Start acc += A·Bᵀ over one staged K block, as one group; `fresh` overwrites acc instead."""
    mma = tiled_mma(dtype)  # a value of its own: the flag set below may not leave the caller's loop
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, not fresh)
    for k in cutlass.range_constexpr(BLK_K // 16):
        cute.gemm(mma, acc, tCrA[None, None, k, stage], tCrB[None, None, k, stage], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@cute.jit
def store_masked(acc: cute.Tensor, mD: cute.Tensor, m: Int32, n: Int32, tid: Int32) -> None:
    """Write a tile from registers, element by element, leaving out what lies beyond D."""
    thread = tiled_mma(mD.element_type).get_slice(tid)
    tile = (BLK_M, BLK_N)
    tCgD = thread.partition_C(cute.local_tile(mD, tile, (m, n)))
    tCcD = thread.partition_C(cute.local_tile(cute.make_identity_tensor(mD.shape), tile, (m, n)))
    for i in cutlass.range_constexpr(cute.size(acc)):
        if cute.elem_less(tCcD[i], mD.shape):
            tCgD[i] = acc[i].to(mD.element_type)


# Rings of stages


class PipelineState:
    """Place of one side in a ring: a stage, and the phase that its barrier has to have completed.

    `wait(P)` passes once the barrier's phase bit differs from P. The consumer starts at phase 0: it blocks
    until the first block has landed. The producer starts at phase 1: it passes its first lap, for every stage
    is free.
    """

    def __init__(self, stages: int, stage: Int32, phase: Int32) -> None:
        self.stages, self.stage, self.phase = stages, stage, phase

    @staticmethod
    def producer(stages: int) -> PipelineState:
        """The side that fills."""
        return PipelineState(stages, Int32(0), Int32(1))

    @staticmethod
    def consumer(stages: int) -> PipelineState:
        """The side that reads."""
        return PipelineState(stages, Int32(0), Int32(0))

    def advance(self) -> None:
        """To the next stage; the phase flips once a lap. Without a branch."""
        following = self.stage + 1
        wraps = Int32(following == self.stages)
        self.stage = following - wraps * self.stages
        self.phase = self.phase ^ wraps

    # What carries the state through loops and branches of the kernel.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.stage.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> PipelineState:
        return PipelineState(self.stages, Int32(values[0]), Int32(values[1]))


def init(ring: cutlass.Array, stages: int, arrivals: int) -> None:
    """Give each barrier of a ring its arrive count. One thread calls it; a fence and a barrier follow."""
    for stage in range(stages):
        prims.mbarrier_init(ring.subview(stage), arrivals)


# TMA


def tensor_map(matrix: cute.Tensor, rows: int, columns: int) -> cuda.TensorMap:
    """Tensor map of a row-major matrix with boxes of rows × columns under the 128-byte swizzle.

    TMA names the contiguous dimension first and counts strides in 16 bytes, so leading dimensions are
    multiples of 8 elements. What a box holds beyond the matrix is read as zero and never written.
    """
    itemsize = matrix.element_type.width // 8
    return cuda.create_tensor_map_tiled(
        global_address=matrix.iterator.toint(),
        dtype=matrix.element_type,
        global_dims=[matrix.shape[1], matrix.shape[0]],
        global_strides=[matrix.stride[0] * itemsize // 16],
        box_dims=[columns, rows],
        swizzle=cuda.TensorMapSwizzle.s128b,
        l2_promotion=cuda.TensorMapL2Promotion.l2_128b,
    )


def address(tensor: cute.Tensor, stage: Int32, rows: int) -> Any:
    """Where stage `stage` of an operand begins, as TMA takes it."""
    return tensor.iterator.raw_ptr() + stage * (rows * BLK_K)


@cute.jit
def wait(ring: cutlass.Array, stage: Int32, phase: Int32, scope: cutlass.Constexpr = "cta") -> None:
    """Block until the barrier of `stage` has completed the phase; "cluster" where another CTA signals it."""
    while not prims.mbarrier_try_wait_parity(ring.subview(stage), phase, scope=scope):
        pass


@cute.jit
def load(
    sA: cute.Tensor,
    sB: cute.Tensor,
    a_map: cuda.TensorMap,
    b_map: cuda.TensorMap,
    tma2mma: cutlass.Array,
    stage: Int32,
    m: Int32,
    n: Int32,
    k: Int32,
) -> None:
    """Start loading K block `k` of tile (m, n); the stage's barrier gets 1 arrival and STAGE_BYTES bytes.

    One thread calls it.
    """
    full = tma2mma.subview(stage)
    prims.mbarrier_arrive_expect_tx(full, STAGE_BYTES)
    prims.cp_async_bulk_tensor_shared_cta_global(
        address(sA, stage, BLK_M), a_map.get_ptr(), [k * BLK_K, m * BLK_M], full
    )
    prims.cp_async_bulk_tensor_shared_cta_global(
        address(sB, stage, BLK_N), b_map.get_ptr(), [k * BLK_K, n * BLK_N], full
    )


@cute.jit
def stage_tile(acc: cute.Tensor, sD: cutlass.Array, dtype: cutlass.Constexpr, tid: Int32) -> None:
    """Convert a tile and put it where TMA stores from: BLK_N / EPI_N pieces of BLK_M × EPI_N, swizzled.

    In a wgmma accumulator registers 4j and 4j+1 hold row lane/4, columns 8j + 2(lane%4) and the next; 4j+2
    and 4j+3 the same columns eight rows below. So four packed words are four 8×8 matrices of a 16×16 square,
    and stmatrix.x4 writes it whole; lane l gives the address of row l%16, columns 8·(l/16) and up. The
    swizzle exclusive-ors the number of a 16-byte chunk with its row modulo 8.
    """
    rounded = cute.make_rmem_tensor(acc.layout, dtype)
    rounded.store(acc.load().to(dtype))
    words = cute.recast_tensor(rounded, Int32)
    warp, lane = tid // 32, tid % 32
    base = sD.data_ptr()
    for m in cutlass.range_constexpr(BLK_M // 64):
        row = m * 64 + warp * 16 + lane % 16
        for c in cutlass.range_constexpr(BLK_N // 16):
            piece, square = divmod(c, EPI_N // 16)
            chunk = (square * 2 + lane // 16) ^ (row % 8)
            first = m * (BLK_N // 4) + c * 4
            where = base + piece * (BLK_M * EPI_N) + row * EPI_N + chunk * 8
            prims.stmatrix(where, [words[first + i] for i in range(4)], prims.MMALayout.ROW)


@cute.jit
def store_tile(sD: cutlass.Array, d_map: cuda.TensorMap, m: Int32, n: Int32) -> None:
    """Start storing a staged tile, as one group. One thread calls it, and waits for the group."""
    for piece in cutlass.range_constexpr(BLK_N // EPI_N):
        prims.cp_async_bulk_tensor_global_shared_cta(
            d_map.get_ptr(),
            sD.subview(piece * (BLK_M * EPI_N)),
            [n * BLK_N + piece * EPI_N, m * BLK_M],
        )
    prims.cp_async_bulk_commit_group()


# Order of tiles


@cute.jit
def grouped(index: Int32, tiles_m: Int32, tiles_n: Int32, group: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Place (m, n) of a tile when rows of tiles are walked in bands of `group`, column by column.

    CTAs that run together then share `group` blocks of A and few of B, which stay in L2.
    """
    band = index // (group * tiles_n)
    first = band * group
    rows = cutlass.min(tiles_m - first, Int32(group))
    within = index - band * (group * tiles_n)
    column = within // rows
    return first + within - column * rows, column


# Compile targets


def compile_step(host: Callable[..., Any], dtype: type, aligned: bool) -> Any:
    """Compiled `host(a, b, d, ctas, stream)` for any sizes: a [M, K], b [N, K], d [M, N], rows contiguous.

    aligned: operands start at 16 bytes and have leading dimensions in multiples of 8, as TMA needs.
    """

    def matrix() -> Any:
        stride = cute.sym_int64(divisibility=8 if aligned else 1)
        align = 16 if aligned else 2
        return make_fake_tensor(dtype, (cute.sym_int(), cute.sym_int()), (stride, 1), assumed_align=align)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(host, matrix(), matrix(), matrix(), Int32(1), stream, options="--enable-tvm-ffi")


def step_functions(name: str, host: Callable[..., Any], *, aligned: bool) -> Sequence[Function]:
    """Compile targets of a step: one library, a function a dtype."""
    return [
        Function(f"{name}_{short}", "sm_90a", partial(compile_step, host, dtype, aligned), library=name)
        for short, dtype in DTYPES.items()
    ]
