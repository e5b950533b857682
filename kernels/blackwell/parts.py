"""Parts that at least three steps hold identically: receives matrices and shared memory, hands on tensor
maps, MMA operands, the order of tiles and compile targets.

Everything is fixed at compile time but sizes, addresses and coordinates. K comes in blocks of 64: 64
elements of 16 bits are 128 bytes, a span of the widest swizzle, so one block of a row is exactly one span.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.targets import Function

ARCHITECTURES = ("sm_100a", "sm_103a")
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16}
BLK_K = 64
MMA_K = 16  # K of one tcgen05.mma on 16-bit operands
SPAN = 128  # bytes of a swizzle span
K_STEP = MMA_K * 2  # bytes from one MMA_K slice of a K-major tile to the next
MN_STEP = MMA_K * SPAN  # the same of an MN-major tile
WARPGROUP = 128  # threads; a warpgroup reaches all 128 lanes of tensor memory
SMEM = cutlass.AddressSpace.smem
S128 = cuda.TensorMapSwizzle.s128b


# Plain loads and stores, Steps 1 to 3


@cute.jit
def fill(
    tile: cutlass.Array, matrix: cute.Tensor, rows: cutlass.Constexpr, row: Int32, k: Int32, tid: Int32
) -> None:
    """Copy rows × BLK_K of a matrix into a swizzled tile, zeros beyond its edges. 64 threads share a row.

    The layout that the tensor core reads: 16-byte chunk c of row r lies at chunk c ^ (r % 8) of that row.
    """
    column = tid % BLK_K
    for i in range(rows * BLK_K // WARPGROUP):
        r = i * (WARPGROUP // BLK_K) + tid // BLK_K
        x = tile.dtype(0.0)
        if row + r < matrix.shape[0] and k + column < matrix.shape[1]:
            x = matrix[row + r, k + column]
        tile[r * BLK_K + ((column // 8) ^ (r % 8)) * 8 + column % 8] = x


@cute.jit
def store_masked(values: cutlass.Vector, d: cute.Tensor, row: Int32, column: Int32) -> None:
    """Store a piece of one row of D, within its edges. Neighbouring threads write different rows: slow."""
    for j in cutlass.range_constexpr(values.shape[0]):
        if row < d.shape[0] and column + j < d.shape[1]:
            d[row, column + j] = values[j].to(d.element_type)


# TMA, from Step 4


def tensor_map(matrix: cute.Tensor, rows: int, columns: int, swizzle: Any = S128) -> cuda.TensorMap:
    """Tensor map of a row-major matrix whose box is rows × columns.

    TMA names the contiguous dimension first and takes strides in units of 16 bytes: hence the multiples of 8
    in leading dimensions.
    """
    return cuda.create_tensor_map_tiled(
        global_address=matrix.iterator.toint(),
        dtype=matrix.element_type,
        global_dims=[matrix.shape[1], matrix.shape[0]],
        global_strides=[matrix.stride[0] * matrix.element_type.width // 128],
        box_dims=[columns, rows],
        swizzle=swizzle,
        l2_promotion=cuda.TensorMapL2Promotion.l2_256b,
    )


@dsl_user_op
def load(
    tile: cutlass.Array,
    source: cuda.TensorMap,
    row: Int32,
    k: Int32,
    full: cutlass.Array,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """Start the load of one box into this CTA; its bytes arrive on `full`. One thread calls this."""
    prims.cp_async_bulk_tensor_shared_cta_global(tile, source.get_ptr(), [k, row], full, loc=loc, ip=ip)


@dsl_user_op
def load_pair(
    tile: cutlass.Array,
    source: cuda.TensorMap,
    coordinates: list[Any],
    full: cutlass.Array,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """The same in a CTA pair: the bytes arrive on the leader's `full`, at the same offset in its memory."""
    prims.cp_async_bulk_tensor_shared_cluster_global(
        tile, source.get_ptr(), coordinates, full, [], group="cta_2", loc=loc, ip=ip
    )


# Tensor core


def k_major(tile: cutlass.Array) -> Any:
    """Descriptor of a K-major tile: rows of M or N, each BLK_K elements in one span; SBO is 8 rows.

    LBO isn't used by swizzled K-major tiles; by convention it reads 16.
    """
    return prims.Tcgen05SmemDesc.build(tile, 16, 8 * SPAN, layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B)


def mn_major(tile: cutlass.Array) -> Any:
    """Descriptor of an MN-major tile: groups of 64 of M or N, each BLK_K spans; LBO a group, SBO 8 of K."""
    return prims.Tcgen05SmemDesc.build(
        tile, BLK_K * SPAN, 8 * SPAN, layout=prims.Tcgen05SmemSwizzle.SWIZZLE_128B
    )


def instruction(dtype: Any, m: int, n: int, a_mn: bool = False, b_mn: bool = False) -> Any:
    """Instruction descriptor: 16-bit operands, fp32 accumulator, m × n of one tcgen05.mma."""
    return prims.Tcgen05InstrDesc.build(
        c_dtype=cutlass.Float32,
        a_dtype=dtype,
        b_dtype=dtype,
        m_dim=m,
        n_dim=n,
        a_major=int(a_mn),
        b_major=int(b_mn),
    )


@dsl_user_op
def multiply(
    group: str,
    accumulator: Any,
    a: Any,
    b: Any,
    descriptor: Any,
    accumulate: Any,
    a_step: int = K_STEP,
    b_step: int = K_STEP,
    *,
    loc: Any = None,
    ip: Any = None,
) -> None:
    """tcgen05.mma over one block of K, BLK_K / MMA_K of them. One thread calls this, and commits.

    accumulate: False for a tile's first block, whose first instruction overwrites what the accumulator held.
    """
    for j in range(BLK_K // MMA_K):
        prims.tcgen05_mma(
            "f16",
            group,
            accumulator,
            a.advance_start_address(a_step * j),
            b.advance_start_address(b_step * j),
            descriptor,
            accumulate if j == 0 else True,
            loc=loc,
            ip=ip,
        )


# Order of tiles, from Step 6


def grouped(tile: Int32, tiles_m: Int32, tiles_n: Int32, group: int = 8) -> tuple[Int32, Int32]:
    """Place (m, n) of the tile-th tile: groups of `group` rows of tiles, column by column inside a group.

    CTAs that run at the same time then share few blocks of A and B, which stay in L2.
    """
    which = tile // (group * tiles_n)
    lines = cutlass.min(tiles_m - which * group, Int32(group))
    within = tile - which * group * tiles_n
    column = within // lines
    return which * group + within - column * lines, column


# Compile targets


def compile_step(host: Callable[..., Any], dtype: Any, aligned: bool) -> Any:
    """Compile a step's host for matrices of any size: A [M, K], B [N, K], D [M, N], row-major.

    aligned: addresses at 16 bytes and leading dimensions in multiples of 8, as TMA needs.
    """

    def matrix() -> Any:
        stride = cute.sym_int64(divisibility=8 if aligned else 1)
        shape = (cute.sym_int32(), cute.sym_int32())
        return make_fake_tensor(dtype, shape, (stride, 1), assumed_align=16 if aligned else 2)

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(host, matrix(), matrix(), matrix(), Int32(1), stream, options="--enable-tvm-ffi")


def step_functions(name: str, host: Callable[..., Any], *, aligned: bool) -> Sequence[Function]:
    """Compile targets of a step: one library an architecture, a function a dtype."""
    return [
        Function(f"{name}_{short}", arch, partial(compile_step, host, dtype, aligned), library=name)
        for arch in ARCHITECTURES
        for short, dtype in DTYPES.items()
    ]
