"""D by TMA, where only alpha follows the product: receives a consumer's registers, hands on boxes in global memory.

A warp stages the 16 rows of p that it holds and stores them itself, so it waits for no other; TMA clips the edges.
  drain_along    q lies along the rows of D: tiles of 8,192 B in the 128-byte swizzle (stmatrix for 16 bits), two boxes
                 of each warp in flight
  drain_across   p does (`swap`): 16 bits, transposed by stmatrix, all of a warp's columns in one box of 32 bytes a row
Thread t of a consumer holds rows 16·(t/32) + (t%32)/4 + {0, 8} and columns 2·(t%4) + {0, 1} of a 64×8 block.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import cuda

from kernels.hopper.epilogue import TYPES, Terms, is_simple, pack_pair, store_pair

__all__ = [
    "BOX_ROWS",
    "EVICT_FIRST",
    "TILE_BYTES",
    "across_map",
    "drain_across",
    "drain_along",
    "goes_across",
]

EVICT_FIRST = 0x12F0_0000_0000_0000  # L2 policy: D is not read again here, A and B are
TILE_BYTES = 8_192  # of a tile that the four warps of a consumer stage
BOX_ROWS = 16  # of it that a warp holds, and stores by TMA


@dsl_user_op
def _stmatrix(
    address: Int32, words: list[Int32], across: bool = False, *, loc: Any = None, ip: Any = None
) -> None:
    """Store four 8×8 matrices of 16 bits; lane i gives the address of row i%8 of matrix i/8, `across` of column i%8."""
    trans = ".trans" if across else ""
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), *(w.ir_value(loc=loc, ip=ip) for w in words)],
        f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [$0], {{$1, $2, $3, $4}};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _halves(acc: cute.Tensor, row: int, first: int, count: int, dtype: Any) -> list[list[Int32]]:
    """What `_stmatrix` stores: `count` blocks of 8 columns from `first` on, of accumulator rows `row`, rounded."""
    return [
        [
            pack_pair(acc[(1, half, j + side), row, 0], acc[(0, half, j + side), row, 0], dtype)
            for side in range(2)
            for half in range(2)
        ]
        for j in range(first, first + count, 2)
    ]


def _put_half(tile: Int32, words: list[list[Int32]], thread: Int32) -> None:
    """64 columns of `_halves` as a 64×64 tile of 16 bits.

    Row r of the tile is 128 bytes; its 16-byte piece j lies at piece j ^ (r % 8): TMA's 128-byte swizzle.
    """
    lane, warp = thread % 32, thread // 32
    r = 16 * warp + lane % 16  # matrices 0, 2: rows 0-7; 1, 3: rows 8-15
    line = tile + r * 128
    for pair, four in enumerate(words):  # 16 columns: pieces 2·pair and 2·pair + 1
        piece = (2 * pair + lane // 16) ^ (lane % 8)
        _stmatrix(line + piece * 16, four)


def _put_fp32(tile: Int32, acc: cute.Tensor, row: int, first: int, thread: Int32) -> None:
    """32 columns from `first` (in blocks of 8) as a 64×32 tile of fp32, swizzled as above."""
    lane, warp = thread % 32, thread // 32
    for half in range(2):
        r = 16 * warp + lane // 4 + 8 * half
        line = tile + r * 128 + (lane % 2) * 8
        for block in range(4):
            piece = (2 * block + lane % 4 // 2) ^ (r % 8)
            j = first + block
            store_pair(line + piece * 16, acc[(0, half, j), row, 0], acc[(1, half, j), row, 0])


@cute.jit
def drain_along(
    t: cutlass.Constexpr,
    out: cutlass.Constexpr,
    acc: cute.Tensor,
    sd: Any,
    tma_d: Any,
    gd: Any,
    staging: Int32,
    p0: Int32,
    q0: Int32,
    layer: Int32,
    consumer: Int32,
    thread: Int32,
    buffer: Int32,
    alpha: Float32,
) -> Int32:
    """Accumulator → staged tiles → TMA stores, two of each warp in flight; returns which buffer is next.

    A warp stages its 16 rows and stores them itself, so it waits for its own stores alone.
    """
    parts = 1 if t.pingpong else t.consumers
    width = TILE_BYTES // 64 // (out.width // 8)
    boxes = 64 // BOX_ROWS
    pieces = cute.local_tile(gd, (BOX_ROWS, width), (None, None, None))
    ds, dg = cpasync.tma_partition(
        tma_d, 0, cute.make_layout(1), cute.group_modes(sd, 0, 2), cute.group_modes(pieces, 0, 2)
    )
    warp = cute.arch.make_warp_uniform(thread // 32)
    if alpha != 1.0:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * alpha
    for row in cutlass.range_constexpr(t.p // 64 // parts):
        for column in cutlass.range_constexpr(t.q // width):
            slot = consumer * 2 + buffer
            tile = staging + slot * TILE_BYTES
            half = cutlass.const_expr(out.width == 16)
            words = _halves(acc, row, column * 8, 8, out) if half else []  # before the wait, to fill it
            cute.arch.cp_async_bulk_wait_group(1, read=True)
            cute.arch.sync_warp()
            if cutlass.const_expr(half):
                _put_half(tile, words, thread)
            else:
                _put_fp32(tile, acc, row, column * 4, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            where = (None, (p0 // 64 + row * parts) * boxes + warp, q0 // width + column, layer)
            with cute.arch.elect_one():
                cute.copy(tma_d, ds[(None, slot * boxes + warp)], dg[where], cache_policy=Int64(EVICT_FIRST))
                cute.arch.cp_async_bulk_commit_group()
            buffer = buffer ^ 1
    return buffer


@cute.jit
def goes_across(terms: Terms, dtype: cutlass.Constexpr) -> Boolean:
    """Whether `drain_across` may store D: of its inputs' type, along p, at 16 bytes, only alpha to follow."""
    odd = (terms.d | (Int64(terms.p) | terms.d_q | terms.d_batch) * 2) % 16
    kind = (terms.code >> 7) == TYPES[dtype]
    return is_simple(terms) & kind & (odd == 0) & (terms.d_p == 1) & (terms.d_q > 0) & (terms.d_batch >= 0)


@cute.jit
def across_map(
    t: cutlass.Constexpr, dtype: cutlass.Constexpr, terms: Terms, batch: Int32, other: Int64
) -> cuda.TensorMap:
    """Tensor map of D for `drain_across`. Where that may not store it, one of `other`, by which nothing is stored."""
    place, row, layer = terms.d, terms.d_q, terms.d_batch
    if layer == 0:  # of one layer
        layer = row
    if not goes_across(terms, dtype):
        place, row, layer = other, Int64(8), Int64(8)
    return cuda.create_tensor_map_tiled(
        global_address=place,
        dtype=dtype,
        global_dims=[terms.p, terms.q, batch],
        global_strides=[row // 8, layer // 8],
        box_dims=[BOX_ROWS, t.box_columns, 1],
        swizzle=cuda.TensorMapSwizzle.s32b,
    )


@cute.jit
def drain_across(
    t: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    acc: cute.Tensor,
    d_map: cuda.TensorMap,
    staging: Int32,
    p0: Int32,
    q0: Int32,
    layer: Int32,
    consumer: Int32,
    thread: Int32,
    buffer: Int32,
    alpha: Float32,
) -> Int32:
    """Accumulator → boxes of each warp, a column to a line of 32 bytes → TMA stores; returns which buffer is next."""
    lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
    columns, buffers = t.box_columns, t.boxes
    size = columns * BOX_ROWS * 2
    # Matrices of lanes 0-7, 8-15: both halves of the rows; 16-31: the same of 8 columns further on. TMA's 32-byte
    # swizzle changes the halves of every other four lines.
    line = (lane // 16 * 8 + lane % 8) * 32 + ((lane // 8 + lane // 4) % 2) * 16
    if alpha != 1.0:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = acc[i] * alpha
    for first in cutlass.range_constexpr(0, t.q, columns):
        words = _halves(acc, 0, first // 8, columns // 8, dtype)
        box = staging + ((consumer * 4 + warp) * buffers + buffer) * size
        cute.arch.cp_async_bulk_wait_group(buffers - 1, read=True)
        cute.arch.sync_warp()
        for number, four in enumerate(words):
            _stmatrix(box + line + number * 512, four, True)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            _store_box(d_map.get_ptr().toint(), box, (p0 + warp * BOX_ROWS, q0 + first, layer))
            cute.arch.cp_async_bulk_commit_group()
        buffer = (buffer + 1) % buffers
    return buffer


@dsl_user_op
def _store_box(
    tensor_map: Int64, source: Int32, place: tuple[Int32, Int32, Int32], *, loc: Any = None, ip: Any = None
) -> None:
    """Start one TMA store of a box."""
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in (tensor_map, *place, source, Int64(EVICT_FIRST))],
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [$0, {$1, $2, $3}], [$4], $5;",
        "l,r,r,r,r,l,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
