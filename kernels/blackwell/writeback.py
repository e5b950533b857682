"""Writeback of Step 9: receives accumulators in tensor memory, hands on D, fused, stored by TMA or by element.

A warpgroup a consumer runs `write_back`. D leaves in pieces of 8,192 bytes through two staging buffers; a C of
D's type comes in through them, one piece ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.blackwell.epilogue import (
    EPI_BARRIER,
    EPI_N,
    EVICT_FIRST,
    Fused,
    c_line,
    fuse,
    read_chunk,
    stage_row,
    store_element,
    unstage_element,
    unstage_row,
)
from kernels.blackwell.parts import SMEM, WARPGROUP
from kernels.blackwell.pipeline import PipelineState, arrive_at, barriers, consumer, init, wait, wait_phase
from kernels.blackwell.raster import place
from kernels.blackwell.tilings import (
    A_TILE,
    B_TILE,
    BLK_M,
    CLC_DEPTH,
    CTA_GROUP,
    MMA_M,
    MMA_N,
    PIECE_BYTES,
    PIECES,
    Tiling,
)

LEADER = 0
PIECE_PITCH = PIECE_BYTES // BLK_M  # bytes of a row of a piece


class Shared:
    """Shared memory of a CTA: operand stages, staging buffers, barriers."""

    def __init__(self, tiling: Tiling, dtype: Any, out: Any) -> None:
        both = tiling.consumers * tiling.accumulators
        piece = PIECE_BYTES * 8 // out.width
        self.a = cutlass.Array(dtype, tiling.depth * tiling.consumers * A_TILE, space=SMEM, alignment=1024)
        self.b = cutlass.Array(dtype, tiling.depth * B_TILE, space=SMEM, alignment=1024)
        self.pieces = cutlass.Array(out, tiling.consumers * PIECES * piece, space=SMEM, alignment=1024)
        self.tma2mma, self.mma2tma = barriers(tiling.depth), barriers(tiling.depth)
        self.mma2ld, self.ld2mma = barriers(both), barriers(both)
        self.c2ld = barriers(tiling.consumers * PIECES)
        self.clc2read, self.read2clc = barriers(CLC_DEPTH), barriers(CLC_DEPTH)
        self.answers = cutlass.Array(cutlass.Int128, CLC_DEPTH, space=SMEM, alignment=16)
        self.slot = cutlass.Array(Int32, 1, space=SMEM)

    def init(self, tiling: Tiling) -> None:
        """Arrival counts. One thread calls this."""
        both = tiling.consumers * tiling.accumulators
        init(self.tma2mma, tiling.depth, 1)
        init(self.mma2tma, tiling.depth, tiling.consumers)
        init(self.mma2ld, both, 1)
        init(self.ld2mma, both, CTA_GROUP * WARPGROUP)
        init(self.c2ld, tiling.consumers * PIECES, 1)
        init(self.clc2read, CLC_DEPTH, 1)
        init(self.read2clc, CLC_DEPTH, tiling.readers)


class Writeback:
    """What a writeback warpgroup does. `MultiConsumer.kernel` sets the attributes, traced values among them."""

    tiling: Tiling
    out: Any  # type of D, fp32 where it is stored element by element
    plain: bool
    piece_n: int  # columns of a piece
    shared: Shared
    rank: Int32
    cluster: Int32
    tiles_m: Int32
    tiles_n: Int32
    tiles: Int32
    raster: Int32
    consumer: Int32
    quarter: Int32  # warp of the warpgroup: which 32 lanes of tensor memory it reaches
    thread: Int32  # of the warpgroup: which row it holds
    f: Fused
    d_map: cuda.TensorMap
    c_map: cuda.TensorMap
    c_by_tma: Int32

    def next_tile(self, tile: Int32, answer: PipelineState, warps: bool) -> Int32:
        """The tile after this one."""
        raise NotImplementedError

    @cute.jit
    def write_back(self, tmem: Int32) -> None:
        """Drain this warpgroup's accumulators and store D."""
        tiling, f = self.tiling, self.f
        base = self.consumer * tiling.accumulators
        ready, answer = consumer(tiling.accumulators), consumer(CLC_DEPTH)
        tile = self.cluster
        while tile < self.tiles:
            m, n, layer = place(tile, self.tiles_m, self.tiles_n, self.raster)
            top = m * tiling.tile_m + self.consumer * MMA_M + self.rank * BLK_M
            left = n * MMA_N
            if cutlass.const_expr(not self.plain):
                if self.c_by_tma != 0:
                    self.fetch_piece(0, top, left, layer)
            wait(self.shared.mma2ld.subview(base), ready, "cluster")
            prims.tcgen05_fence("after_thread_sync")
            accumulator = tmem + (base + ready.stage) * MMA_N
            ld2mma = self.shared.ld2mma.subview(base + ready.stage)
            if cutlass.const_expr(self.plain):
                self.store_elements(accumulator, ld2mma, top, left, layer)
            elif cutlass.const_expr(self.out.width == 32):
                self.store_while_draining(accumulator, ld2mma, top, left, layer)
            else:  # noqa: PLR5501 (the first two choose at compile time)
                if f.has_c:
                    self.store_while_draining(accumulator, ld2mma, top, left, layer)
                else:
                    self.drain_then_store(accumulator, ld2mma, top, left, layer)
            ready.advance()
            tile = self.next_tile(tile, answer, True)
            answer.advance()
        if self.quarter == 0:
            if prims.elect_sync():
                prims.cp_async_bulk_wait_group(0)

    def release(self, ld2mma: cutlass.Array) -> None:
        """This thread has drained its row: the leader's MMA thread may overwrite the accumulator."""
        prims.tcgen05_fence("before_thread_sync")
        arrive_at(ld2mma, LEADER)

    @cute.jit
    def drain_then_store(
        self, accumulator: Int32, ld2mma: cutlass.Array, top: Int32, left: Int32, layer: Int32
    ) -> None:
        """16-bit output without C: a row fits 128 registers, so the accumulator is free at once."""
        zeros = cutlass.full((EPI_N // 2,), 0, Int32)
        p0, p1, p2, p3 = zeros, zeros, zeros, zeros  # the row, packed; a chunk moves in at the end
        for chunk in range(MMA_N // EPI_N):
            column = chunk * EPI_N
            values = read_chunk(accumulator, self.quarter, column)
            prims.tcgen05_wait("load")
            values = fuse(self.f, values, None, top + self.thread, left + column)
            p0, p1, p2, p3 = p1, p2, p3, values.to(self.out).bitcast(Int32)
        self.release(ld2mma)
        words = self.piece_n // 2
        for piece in cutlass.range_constexpr(MMA_N // self.piece_n):
            first = piece * words % (EPI_N // 2)
            row = (p0, p1, p2, p3)[piece * self.piece_n // EPI_N][first : first + words]
            column = left + piece * self.piece_n
            self.store_piece(piece % PIECES, row.bitcast(self.out), top, column, layer)

    @cute.jit
    def store_while_draining(
        self, accumulator: Int32, ld2mma: cutlass.Array, top: Int32, left: Int32, layer: Int32
    ) -> None:
        """fp32 output, or a C: the row doesn't fit the registers, so it is stored chunk by chunk."""
        f, c_by_tma = self.f, self.c_by_tma
        chunks, pieces = MMA_N // EPI_N, EPI_N // self.piece_n
        row = top + self.thread
        for chunk in range(chunks):
            values = read_chunk(accumulator, self.quarter, chunk * EPI_N)
            prims.tcgen05_wait("load")
            if chunk == chunks - 1:
                self.release(ld2mma)
            for j in range(pieces):
                piece = chunk * pieces + j
                column = left + piece * self.piece_n
                which = piece % PIECES
                c = cutlass.full((self.piece_n,), 0.0, Float32)
                if c_by_tma != 0:
                    # A tile uses each buffer an even number of times: its first use is always at phase 0.
                    landed = self.shared.c2ld.subview(self.consumer * PIECES + which)
                    wait_phase(landed, piece // PIECES % 2)
                    c = unstage_row(self.piece(which), self.thread, PIECE_PITCH)
                elif f.has_c:
                    c = c_line(f, row, column, layer, self.piece_n)
                # The piece in front is taken off, so that one copy of this code does all pieces.
                elements = values.to_elements()
                front, rest = elements[: self.piece_n], elements[self.piece_n :]
                fused = fuse(f, cutlass.Vector.from_elements(front, Float32), c, row, column)
                values = cutlass.Vector.from_elements((*rest, *front), Float32)
                self.store_piece(which, fused.to(self.out), top, column, layer)
                if c_by_tma != 0 and piece + 1 < chunks * pieces:
                    self.fetch_piece(which ^ 1, top, column + self.piece_n, layer)

    def piece(self, which: int | Int32) -> Any:
        """Staging buffer `which` of this warpgroup."""
        return self.shared.pieces.data_ptr() + (self.consumer * PIECES + which) * (
            PIECE_BYTES * 8 // self.out.width
        )

    @cute.jit
    def store_piece(
        self, which: int | Int32, row: cutlass.Vector, top: Int32, column: Int32, layer: Int32
    ) -> None:
        """Stage this thread's row; one thread stores the piece, and waits until the other buffer is free."""
        buffer = self.piece(which)
        prims.barrier_cta_sync(EPI_BARRIER + self.consumer, thread_count=WARPGROUP)
        stage_row(buffer, self.thread, row, PIECE_PITCH)
        prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
        prims.barrier_cta_sync(EPI_BARRIER + self.consumer, thread_count=WARPGROUP)
        if self.quarter == 0:
            if prims.elect_sync():
                prims.cp_async_bulk_tensor_global_shared_cta(
                    self.d_map.get_ptr(), buffer, [column, top, layer], l2_cache_hint=EVICT_FIRST
                )
                prims.cp_async_bulk_commit_group()
                prims.cp_async_bulk_wait_group(PIECES - 1, read=True)

    @cute.jit
    def fetch_piece(self, which: int | Int32, top: Int32, column: Int32, layer: Int32) -> None:
        """Start the load of a piece of C into a staging buffer whose last store has been read."""
        c_layer = layer * Int32(self.f.c_batch != 0)
        if self.quarter == 0:
            if prims.elect_sync():
                barrier = self.shared.c2ld.subview(self.consumer * PIECES + which)
                prims.mbarrier_arrive_expect_tx(barrier, PIECE_BYTES)
                prims.cp_async_bulk_tensor_shared_cta_global(
                    self.piece(which),
                    self.c_map.get_ptr(),
                    [column, top, c_layer],
                    barrier,
                    l2_cache_hint=EVICT_FIRST,
                )

    @cute.jit
    def store_elements(
        self, accumulator: Int32, ld2mma: cutlass.Array, top: Int32, left: Int32, layer: Int32
    ) -> None:
        """Any D: 32 fp32 columns are staged, and neighbouring threads take neighbouring elements."""
        f, buffer = self.f, self.piece(0)
        barrier = EPI_BARRIER + self.consumer
        columns = PIECES * PIECE_PITCH // 4
        steps = MMA_N // columns
        for step in range(steps):
            values = read_chunk(accumulator, self.quarter, step * columns, columns)
            prims.tcgen05_wait("load")
            if step == steps - 1:
                self.release(ld2mma)
            prims.barrier_cta_sync(barrier, thread_count=WARPGROUP)
            stage_row(buffer, self.thread, values, PIECES * PIECE_PITCH)
            prims.barrier_cta_sync(barrier, thread_count=WARPGROUP)
            for i in range(columns):
                index = i * WARPGROUP + self.thread
                row, column = index // columns, index % columns
                value = unstage_element(buffer, row, column)
                row += top
                column += left + step * columns
                if row < f.rows and column < f.columns:
                    one = cutlass.Vector.from_elements((value,), Float32)
                    fused = fuse(f, one, c_line(f, row, column, layer, 1), row, column)
                    place = Int64(layer) * f.d_batch + Int64(row) * f.d_row + Int64(column) * f.d_column
                    store_element(f.d, place, fused[0], (f.code >> 7) & 3)
