"""Consumers of Step 9: receive stages that the producer filled, hand on tiles of D.

A warpgroup a consumer runs `consume`: it multiplies what the ring holds, then drains its accumulator, by TMA where
only alpha follows, else through the epilogue. Where blocks divide K each parks its part, and `reduce` adds them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from kernels.hopper.boxes import drain_across, drain_along, goes_across
from kernels.hopper.epilogue import (
    Terms,
    clear_sixteen,
    consumer_barrier,
    is_simple,
    load,
    peer_address,
    put_rows,
    send_four,
    store_any,
)
from kernels.hopper.marks import Mark, mark, nothing
from kernels.hopper.pipeline import FastTiles, PipelineState, release, wait_empty, wait_full
from kernels.hopper.producer import major_of
from kernels.hopper.tilings import STAGING_BYTES, TILE_K, Tiling

__all__ = ["consume", "drain_any", "mma_of", "multiply", "reduce"]


def mma_of(t: Tiling, dtype: Any, x_k_major: bool, y_k_major: bool) -> cute.TiledMma:
    """m64·q·k16, side by side for the consumers that split a tile's rows."""
    return sm90.make_trivial_tiled_mma(
        dtype,
        dtype,
        major_of(x_k_major).sm90_mma_major_mode(),
        major_of(y_k_major).sm90_mma_major_mode(),
        Float32,
        (1 if t.pingpong else t.consumers, 1, 1),
        tiler_mn=(64, t.q),
    )


@cute.jit
def multiply(
    make_mma: cutlass.Constexpr,
    acc: cute.Tensor,
    rx: cute.Tensor,
    ry: cute.Tensor,
    full: cute.Pointer,
    empty: cute.Pointer,
    k_tiles: Int32,
    state: PipelineState,
    releases: Boolean,
    peer: Int32,
    shared: cutlass.Constexpr,
    note: cutlass.Constexpr = nothing,
    lag: cutlass.Constexpr = 0,
    leads: Any = False,
) -> tuple[PipelineState, Int32]:
    """acc = A·B over the next `k_tiles` stages, the last of them still in flight; of none, acc stays as it was.

    A stage is released once the group after it has been issued and its own is done. Who `leads` lets consumer 1
    begin when `lag` groups are issued. Returns the ring's place, and the stage that the caller releases after
    `wait_group(0)`.
    """
    last = state.stage
    for k in cutlass.range(k_tiles, unroll=1):
        note(Mark.MMA_WAITS, k)
        wait_full(full + state.stage, state.phase)
        note(Mark.MMA_MAY, k)
        warpgroup.fence()
        mma = make_mma()  # a value of its own: the flag set below may not leave the loop
        mma.set(warpgroup.Field.ACCUMULATE, k > 0)
        for block in cutlass.range_constexpr(TILE_K // 16):
            where = (None, None, block, state.stage)
            cute.gemm(mma, acc, rx[where], ry[where], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        note(Mark.MMA_ASKED, k)
        if cutlass.const_expr(lag > 0):
            if leads & (k == lag - 1):
                _pass_turn(1)
        warpgroup.wait_group(1)
        note(Mark.MMA_DONE, k)
        if releases & (k > 0):
            release(empty + last, peer, shared)
        last = state.stage
        state.advance()
    return state, last


@cute.jit
def consume(
    t: cutlass.Constexpr,
    out: cutlass.Constexpr,
    across: cutlass.Constexpr,
    make_mma: cutlass.Constexpr,
    sx: cute.Tensor,
    sy: cute.Tensor,
    sd: Any,
    tma_d: Any,
    gd: Any,
    d_map: Any,
    ring: Int32,
    staging: Int32,
    full: cute.Pointer,
    empty: cute.Pointer,
    inbox: Any,
    tiles: FastTiles,
    first: Int32,
    step: Int32,
    k_tiles: Int32,
    consumer: Int32,
    thread: Int32,
    rank_p: Int32,
    rank_q: Int32,
    part: Int32,
    x: cutlass.Constexpr,
    y: cutlass.Constexpr,
    clock: cutlass.Constexpr,
    terms: Terms,
) -> None:
    """Multiply what the ring holds and write the tiles out. `x`, `y`: how much of it the producer loads.

    out, across: D's type where it leaves along q by TMA (`tma_d`, `gd`), or may across (`d_map`; boxes.py).
    """
    if first < tiles.total:
        tile_p, tile_q, _ = tiles.at(first)
        x_rows = x.within_tile(terms.p, tile_p * t.cluster_p + rank_p)
        y_rows = y.within_tile(terms.q, tile_q * t.cluster_q + rank_q)
        if x_rows + y_rows < t.p + t.q:
            stages = cutlass.min(k_tiles, t.stages)
            _clear(ring, t.p, x_rows, stages, consumer * 128 + thread, t.consumers * 128)
            _clear(
                sy.iterator.toint().to(Int32), t.q, y_rows, stages, consumer * 128 + thread, t.consumers * 128
            )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=9, number_of_threads=128 * t.consumers)
    share = 0 if cutlass.const_expr(t.pingpong) else consumer  # which rows of the tile
    tiled_mma = make_mma()
    slice_ = tiled_mma.get_slice(share * 128)
    rx = tiled_mma.make_fragment_A(slice_.partition_A(sx))  # (atom, p / 64, k / 16, stages)
    ry = tiled_mma.make_fragment_B(slice_.partition_B(sy))  # (atom, 1, k / 16, stages)
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((t.p, t.q)), Float32)  # ((2, 2, q / 8), rows, 1)

    # Lane i of each warp releases to block i of those that share, if that block writes into this one.
    lane = thread % 32
    releases = lane == 0
    peer = part * t.sharing + lane
    if cutlass.const_expr(t.sharing > 1):
        same_p, same_q = lane % t.cluster_p == rank_p, lane // t.cluster_p == rank_q
        releases = (lane < t.sharing) & (same_p | same_q)

    state = PipelineState.consumer(t.stages)
    buffer = Int32(0)
    work = first
    if cutlass.const_expr(t.pingpong):
        if consumer == 1:
            state.skip(k_tiles)
            work = work + step
            _pass_turn(0)
    while work < tiles.total:
        if cutlass.const_expr(t.pingpong):
            _take_turn(consumer)
        # In a tile shorter than the ring the first could come to the next one before the second has begun.
        apart = k_tiles >= t.stages
        if cutlass.const_expr(t.lag > 0):
            if apart & (consumer == 1):
                _take_turn(1)
        if k_tiles == 0:
            acc.fill(0.0)
        state, last = multiply(
            make_mma,
            acc,
            rx,
            ry,
            full,
            empty,
            k_tiles,
            state,
            releases,
            peer,
            t.sharing > 1,
            partial(mark, clock, terms, work, k_tiles, consumer),
            t.lag,
            apart & (consumer == 0),
        )
        if cutlass.const_expr(t.pingpong):
            if work + step < tiles.total:
                _pass_turn(1 - consumer)
        tile_p, tile_q, layer = tiles.at(work)  # while the last group is under way
        warpgroup.wait_group(0)
        mark(clock, terms, work, k_tiles, consumer, Mark.LAST_DONE)
        if releases & (k_tiles > 0):
            release(empty + last, peer, t.sharing > 1)

        p0 = (tile_p * t.cluster_p + rank_p) * t.p + share * 64
        q0 = (tile_q * t.cluster_q + rank_q) * t.q
        whole, written = t, acc
        if cutlass.const_expr(t.exchanges):
            whole, written = t.half, _exchange(t, acc, staging, inbox, consumer, part, thread)
            q0 = q0 + part * t.half.q
        if cutlass.const_expr(t.parks):
            _park(t, acc, ring, consumer, thread)
        elif cutlass.const_expr(across is not None):
            if goes_across(terms, across):
                buffer = drain_across(
                    t, across, acc, d_map, staging, p0, q0, layer, consumer, thread, buffer, terms.alpha
                )
            else:
                drain_any(t, acc, staging + consumer * t.staged, p0, q0, layer, consumer, thread, terms)
        elif cutlass.const_expr(out is None):
            drain_any(
                whole, written, staging + consumer * STAGING_BYTES, p0, q0, layer, consumer, thread, terms
            )
        elif is_simple(terms):
            buffer = drain_along(
                whole,
                out,
                written,
                sd,
                tma_d,
                gd,
                staging,
                p0,
                q0,
                layer,
                consumer,
                thread,
                buffer,
                terms.alpha,
            )
        else:
            drain_any(
                whole, written, staging + consumer * STAGING_BYTES, p0, q0, layer, consumer, thread, terms
            )
        mark(clock, terms, work, k_tiles, consumer, Mark.WRITTEN)
        work = work + step
        if cutlass.const_expr(t.pingpong):
            work = work + step
            state.skip(k_tiles)
    if cutlass.const_expr(out is not None or across is not None):
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _clear(
    ring: Int32,
    rows: cutlass.Constexpr,
    loaded: Int32,
    stages: Int32,
    thread: Int32,
    threads: cutlass.Constexpr,
) -> None:
    """Zeros for those of an operand's `rows` that no load writes, in each of `stages`; a row has 128 bytes.

    They are multiplied for nobody, but under the power cap random bits cost more than zeros. Only of the first tile,
    and no stage more than it fills: into the others the producer may already load the next one.
    """
    for stage in cutlass.range(stages, unroll=1):
        begin = ring + stage * (rows * 128)
        for piece in cutlass.range(loaded * 8 + thread, rows * 8, threads, unroll=1):
            clear_sixteen(begin + piece * 16)


@cute.jit
def _exchange(
    t: cutlass.Constexpr,
    acc: cute.Tensor,
    staging: Int32,
    inbox: cute.Pointer,
    consumer: Int32,
    part: Int32,
    thread: Int32,
) -> cute.Tensor:
    """The sum of both blocks' accumulators over the half of the columns that this block writes: left for part 0.

    The other half goes to the same thread of the peer, four registers at a time: st.async counts its bytes at
    the peer's barrier. Nobody's ring is touched, so a block waits for nothing but the half that it lacks; it has
    come whole before the block exits. Of two numbers the sum has the same bits in either order.
    """
    blocks = t.q // 16  # of 8 columns, in a half
    kept = cute.make_rmem_tensor(((2, 2, blocks), 1, 1), Float32)
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(inbox + consumer, blocks * 2048)
    barrier = peer_address((inbox + consumer).toint().to(Int32), 1 - part)
    for block in cutlass.range_constexpr(blocks):
        piece, line = (
            block // 8,
            block % 8,
        )  # 16,384 B a piece of 64 columns; a consumer's first is its staging
        offset = piece * t.consumers * STAGING_BYTES + line * 2048
        sent = []
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                left, right = acc[(i, half, block), 0, 0], acc[(i, half, blocks + block), 0, 0]
                kept[(i, half, block), 0, 0] = cutlass.select_(part == 0, left, right)
                sent.append(Float32(cutlass.select_(part == 0, right, left)))
        place = staging + consumer * STAGING_BYTES + offset + thread * 16
        send_four(peer_address(place, 1 - part), sent, barrier)
    wait_empty(inbox + consumer, Int32(0), True)
    for block in cutlass.range_constexpr(blocks):
        piece, line = block // 8, block % 8
        offset = piece * t.consumers * STAGING_BYTES + line * 2048
        come = load(staging + consumer * STAGING_BYTES + offset + thread * 16, 4, "shared")
        for number in cutlass.range_constexpr(4):
            i, half = number % 2, number // 2
            kept[(i, half, block), 0, 0] = kept[(i, half, block), 0, 0] + come[number]
    consumer_barrier(consumer)  # all have read what came before any warp stages D there
    return kept


@cute.jit
def drain_any(
    t: cutlass.Constexpr,
    acc: cute.Tensor,
    tile: Int32,
    p0: Int32,
    q0: Int32,
    layer: Int32,
    consumer: Int32,
    thread: Int32,
    terms: Terms,
) -> None:
    """Accumulator → fp32 tile → epilogue → D, one 64×64 tile after the other."""
    parts = 1 if t.pingpong else t.consumers
    columns = t.staged_columns
    across = t.q // columns
    count = t.p // 64 // parts * across
    # One copy of the loop over elements, whichever 64×64 of the registers is staged.
    for number in cutlass.range(count, unroll=1):
        consumer_barrier(consumer)
        for each in cutlass.range_constexpr(count):
            if number == each:
                put_rows(
                    tile, acc, each // across, each % across * (columns // 8), columns // 8, t.swap, thread
                )
        consumer_barrier(consumer)
        row, column = number // across, number % across
        store_any(
            tile,
            p0 + row * 64 * parts,
            q0 + column * columns,
            layer,
            columns,
            t.swap,
            1,
            1,
            Int32(0),
            thread,
            terms,
        )


@cute.jit
def _park(t: cutlass.Constexpr, acc: cute.Tensor, ring: Int32, consumer: Int32, thread: Int32) -> None:
    """Accumulator → fp32 tiles in the ring's place, for the blocks of the cluster to add."""
    columns = t.staged_columns
    cute.arch.barrier(barrier_id=9, number_of_threads=128 * t.consumers)  # all warps have read the ring
    across = t.q // columns
    for row in cutlass.range_constexpr(t.p // 64 // t.consumers):
        for column in cutlass.range_constexpr(across):
            number = (row * t.consumers + consumer) * across + column
            put_rows(
                ring + number * STAGING_BYTES, acc, row, column * (columns // 8), columns // 8, t.swap, thread
            )


@cute.jit
def reduce(
    t: cutlass.Constexpr,
    ring: Int32,
    tiles: FastTiles,
    first: Int32,
    rank_p: Int32,
    rank_q: Int32,
    part: Int32,
    consumer: Int32,
    thread: Int32,
    terms: Terms,
) -> None:
    """Add the parts of the cluster: each block sums its share of the 64×64 tiles and writes them out."""
    columns = t.staged_columns
    across = t.q // columns
    count = t.p // 64 * across
    tile_p, tile_q, layer = tiles.at(first)
    p0, q0 = (tile_p * t.cluster_p + rank_p) * t.p, (tile_q * t.cluster_q + rank_q) * t.q
    peer = rank_q * t.cluster_p + rank_p
    for number in cutlass.range(part + consumer * t.split, count, t.split * t.consumers, unroll=1):
        row, column = number // across, number % across
        store_any(
            ring + number * STAGING_BYTES,
            p0 + row * 64,
            q0 + column * columns,
            layer,
            columns,
            t.swap,
            t.split,
            t.sharing,
            peer,
            thread,
            terms,
        )


def _take_turn(consumer: Int32) -> None:
    """Wait until the other consumer passes the turn: in ping-pong, when it has seen all stages of the tile before.

    A phase bit tells apart one lap of the ring, so no consumer may wait for the stages of a later tile.
    """
    cute.arch.barrier(barrier_id=12 + consumer, number_of_threads=256)


def _pass_turn(consumer: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=12 + consumer, number_of_threads=256)
