"""Step 9, several consumers: the product family of sm_90a. Receives a `Tiling` and types, hands on functions.

Adds        a second consumer warpgroup: both share each staged B, or take turns at tiles (ping-pong).
            Registers move from the producer to them. The whole arithmetic of the service, by kernels/call.py.
Why faster  a tile of 128×256 brings 85 FLOPs a byte from L2 with its B multicast (64 with 128×128); two
            consumers keep the tensor cores busy while one of them waits.
Costs       one block an SM; a tile's epilogue is not hidden by another tile's product, except in ping-pong.
Roles       warpgroup 0: producer, 40 registers: warp 0 loads by TMA, the others idle. Warpgroups 1, 2:
            consumers, 232 registers: wgmma m64·q·k16, one group in flight, then the epilogue, while the
            producer already fills the ring with the next tile. With one consumer nothing is moved.
Barriers    full[s], empty[s]: see pipeline.py. Named, of one consumer: 10 + consumer, 128 threads, twice a
            staged tile (it is free; it is written). Of all: 9, before split-K reuses the ring;
            12 + consumer, 256 threads, ping-pong's turn. Cluster: barriers are initialized; split-K's parts
            are there; nobody signals or reads a peer any more.
Shared      128×256, 2×1: 4 × 49,152 B + 2 consumers × 2 tiles × 8,192 B = 229,376 B, and barriers 64 B.
Limits      16-bit inputs that TMA can address; what it can't is packed by the launcher.

min_blocks_per_mp=1 keeps setmaxnreg in the machine code: without it ptxas drops it silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from kernels.hopper.epilogue import (
    EVICT_FIRST,
    TILE_BYTES,
    Terms,
    consumer_barrier,
    is_simple,
    put_fp32,
    put_half,
    put_rows,
    store_any,
)
from kernels.hopper.pipeline import PipelineState, Tiles, init_ring, release, wait_empty, wait_full
from kernels.hopper.tilings import FAMILY, STAGING_BYTES, TILE_K, Tiling
from kernels.problem import DType
from kernels.targets import Function

PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
DEFAULT_GROUP = 8


@dataclass(frozen=True)
class Gemm:
    """One kernel: a tiling, types and contiguous dimensions. `out` None: stores any type at any stride."""

    tiling: Tiling
    dtype: Any
    out: Any
    trans_a: bool
    trans_b: bool

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: Int64,
        d_batch: Int64,
        d_row: Int64,
        d_column: Int64,
        c: Int64,
        c_batch: Int64,
        c_row: Int64,
        c_column: Int64,
        bias: Int64,
        alpha: Float32,
        beta: Float32,
        code: Int32,
        batch: Int32,
        ctas: Int32,
        raster: Int32,
        stream: Any,
    ) -> None:
        t = self.tiling
        x = cute.make_tensor(a.iterator, cute.select(a.layout, mode=[1, 2, 0]))  # (M, K, La)
        y = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[2, 1, 0]))  # (N, K, Lb)
        x_k_major, y_k_major = not self.trans_a, self.trans_b
        d_p, d_q, c_p, c_q = d_row, d_column, c_row, c_column
        if cutlass.const_expr(t.swap):
            x, y, x_k_major, y_k_major = y, x, y_k_major, x_k_major
            d_p, d_q, c_p, c_q = d_column, d_row, c_column, c_row
        p, q = x.shape[0], y.shape[0]
        terms = Terms(d, d_batch, d_p, d_q, c, c_batch, c_p, c_q, bias, alpha, beta, code, p, q)

        x_major, y_major = _layout(x_k_major), _layout(y_k_major)
        tiled_mma = sm90.make_trivial_tiled_mma(
            self.dtype,
            self.dtype,
            x_major.sm90_mma_major_mode(),
            y_major.sm90_mma_major_mode(),
            Float32,
            (1 if t.pingpong else t.consumers, 1, 1),
            tiler_mn=(64, t.q),
        )
        x_smem = _smem(x_major, t.p, self.dtype, t.stages)
        y_smem = _smem(y_major, t.q, self.dtype, t.stages)
        tma_x, gx = _load_atom(x, x_major, t.p // t.cluster_q, t.cluster_q > 1)
        tma_y, gy = _load_atom(y, y_major, t.q // t.cluster_p, t.cluster_p > 1)

        tma_d, gd, d_smem = None, None, None
        if cutlass.const_expr(self.out is not None):
            width = TILE_BYTES // 64 // (self.out.width // 8)
            pointer = cute.make_ptr(self.out, d, cute.AddressSpace.gmem, assumed_align=16)
            rows = 128 // self.out.width  # elements of 16 bytes
            d_tensor = cute.make_tensor(
                pointer,
                cute.make_layout(
                    (p, q, batch), stride=(cute.assume(d_p, divby=rows), 1, cute.assume(d_batch, divby=rows))
                ),
            )
            atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out)
            d_smem = cute.tile_to_shape(atom, (64, width, 2 * t.consumers), order=(0, 1, 2))
            tma_d, gd = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(), d_tensor, cute.select(d_smem, mode=[0, 1]), (64, width)
            )

        tiles_p = cute.ceil_div(p, t.p * t.cluster_p)
        tiles_q = cute.ceil_div(q, t.q * t.cluster_q)
        total = tiles_p * tiles_q * batch
        clusters = total
        if cutlass.const_expr(t.split == 1):
            clusters = cutlass.min(total, cutlass.max(ctas // t.cluster, 1))
        self.kernel(
            tma_x,
            gx,
            tma_y,
            gy,
            tma_d,
            gd,
            tiled_mma,
            x_smem,
            y_smem,
            d_smem,
            *terms.values(),
            tiles_p,
            tiles_q,
            batch,
            raster,
        ).launch(
            grid=(clusters * t.cluster, 1, 1),
            block=(t.threads, 1, 1),
            cluster=(t.cluster, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        gx: cute.Tensor,
        tma_y: cute.CopyAtom,
        gy: cute.Tensor,
        tma_d: Any,
        gd: Any,
        tiled_mma: cute.TiledMma,
        x_smem: cute.ComposedLayout,
        y_smem: cute.ComposedLayout,
        d_smem: Any,
        d: Int64,
        d_batch: Int64,
        d_p: Int64,
        d_q: Int64,
        c: Int64,
        c_batch: Int64,
        c_p: Int64,
        c_q: Int64,
        bias: Int64,
        alpha: Float32,
        beta: Float32,
        code: Int32,
        p: Int32,
        q: Int32,
        tiles_p: Int32,
        tiles_q: Int32,
        batch: Int32,
        raster: Int32,
    ) -> None:
        t = self.tiling
        terms = Terms(d, d_batch, d_p, d_q, c, c_batch, c_p, c_q, bias, alpha, beta, code, p, q)
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        rank = block % t.cluster
        part = rank // t.sharing  # which part of K
        rank_p, rank_q = rank % t.sharing % t.cluster_p, rank % t.sharing // t.cluster_p

        if warp == 0:
            cpasync.prefetch_descriptor(tma_x)
            cpasync.prefetch_descriptor(tma_y)
            if cutlass.const_expr(self.out is not None):
                cpasync.prefetch_descriptor(tma_d)

        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(Int64, t.stages)
        empty = smem.allocate_array(Int64, t.stages)
        sx = smem.allocate_tensor(self.dtype, x_smem.outer, 1024, x_smem.inner)
        sy = smem.allocate_tensor(self.dtype, y_smem.outer, 1024, y_smem.inner)
        ring = sx.iterator.toint().to(Int32)
        staging, sd = ring, None
        if cutlass.const_expr(self.out is not None):
            sd = smem.allocate_tensor(self.out, d_smem.outer, 1024, d_smem.inner)
            staging = sd.iterator.toint().to(Int32)
        elif cutlass.const_expr(t.split == 1):
            staging = smem.allocate(t.staging_bytes, 1024).toint().to(Int32)

        # A consumer warp releases a stage to each block that writes into it: of the same p (shares X), or q (Y).
        consumers = 1 if t.pingpong else t.consumers
        releases = 4 * consumers * (t.cluster_p + t.cluster_q - 1)
        if warp == 0:
            init_ring(full, empty, t.stages, releases)
        _sync_all(t.cluster)
        cute.arch.griddepcontrol_wait()

        tiles = Tiles(tiles_p, tiles_q, batch, raster if raster != 0 else Int32(DEFAULT_GROUP))
        k_tiles = cute.ceil_div(cute.size(gx, mode=[1]), TILE_K)
        if alpha == 0.0:
            k_tiles = Int32(0)
        k_first = Int32(0)
        if cutlass.const_expr(t.split > 1):
            k_first = part * k_tiles // t.split
            k_tiles = (part + 1) * k_tiles // t.split - k_first
        first, step = block // t.cluster, blocks // t.cluster

        if group == 0:
            if cutlass.const_expr(t.consumers > 1):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self._produce(
                    tma_x,
                    gx,
                    tma_y,
                    gy,
                    sx,
                    sy,
                    full,
                    empty,
                    tiles,
                    first,
                    step,
                    k_first,
                    k_tiles,
                    rank_p,
                    rank_q,
                    part,
                )
            if cutlass.const_expr(t.split > 1):
                _meet()
        else:
            if cutlass.const_expr(t.consumers > 1):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(
                tiled_mma,
                sx,
                sy,
                sd,
                tma_d,
                gd,
                ring,
                staging,
                full,
                empty,
                tiles,
                first,
                step,
                k_tiles,
                group - 1,
                thread % 128,
                rank_p,
                rank_q,
                part,
                terms,
            )
            if cutlass.const_expr(t.split > 1):
                _meet()
                self._reduce(ring, tiles, first, rank_p, rank_q, part, group - 1, thread % 128, terms)
        if cutlass.const_expr(t.cluster > 1):
            _meet()  # no block leaves while a peer may signal it or read from it

    @cute.jit
    def _produce(
        self,
        tma_x: cute.CopyAtom,
        gx: cute.Tensor,
        tma_y: cute.CopyAtom,
        gy: cute.Tensor,
        sx: cute.Tensor,
        sy: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        tiles: Tiles,
        first: Int32,
        step: Int32,
        k_first: Int32,
        k_tiles: Int32,
        rank_p: Int32,
        rank_q: Int32,
        part: Int32,
    ) -> None:
        """Fill the ring: A and B of every k of every tile of this block."""
        t = self.tiling
        # Of each tile that blocks share, every block loads its own slice, to the same place in all of them.
        xs, xg = _slices(
            tma_x, gx, sx, self.trans_a if not t.swap else not self.trans_b, t.p, t.cluster_q, t.stages
        )
        ys, yg = _slices(
            tma_y, gy, sy, not self.trans_b if not t.swap else self.trans_a, t.q, t.cluster_p, t.stages
        )
        x_mask, y_mask = None, None
        if cutlass.const_expr(t.cluster_q > 1):  # blocks of the same p: ranks rank_p + i·cluster_p
            x_mask = cutlass.Int16(
                sum(1 << i * t.cluster_p for i in range(t.cluster_q)) << (part * t.sharing + rank_p)
            )
        if cutlass.const_expr(t.cluster_p > 1):  # blocks of the same q: cluster_p consecutive ranks
            y_mask = cutlass.Int16(((1 << t.cluster_p) - 1) << (part * t.sharing + rank_q * t.cluster_p))
        x_layers, y_layers = cute.size(gx, mode=[2]), cute.size(gy, mode=[2])
        state = PipelineState.producer(t.stages)
        work = first
        while work < tiles.total:
            tile_p, tile_q, layer = tiles.at(work)
            x_layer, y_layer = cutlass.min(layer, x_layers - 1), cutlass.min(layer, y_layers - 1)
            x_row = (tile_p * t.cluster_p + rank_p) * t.cluster_q + rank_q
            y_row = (tile_q * t.cluster_q + rank_q) * t.cluster_p + rank_p
            x_tile, y_tile = xg[(None, x_row, None, x_layer)], yg[(None, y_row, None, y_layer)]
            for k in cutlass.range(k_tiles, unroll=1):
                wait_empty(empty + state.stage, state.phase, t.sharing > 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + state.stage, t.stage_bytes)
                cute.copy(
                    tma_x,
                    x_tile[(None, k_first + k)],
                    xs[(None, state.stage * t.cluster_q + rank_q)],
                    tma_bar_ptr=full + state.stage,
                    mcast_mask=x_mask,
                )
                cute.copy(
                    tma_y,
                    y_tile[(None, k_first + k)],
                    ys[(None, state.stage * t.cluster_p + rank_p)],
                    tma_bar_ptr=full + state.stage,
                    mcast_mask=y_mask,
                )
                state.advance()
            work = work + step
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _consume(
        self,
        tiled_mma: cute.TiledMma,
        sx: cute.Tensor,
        sy: cute.Tensor,
        sd: Any,
        tma_d: Any,
        gd: Any,
        ring: Int32,
        staging: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        tiles: Tiles,
        first: Int32,
        step: Int32,
        k_tiles: Int32,
        consumer: Int32,
        thread: Int32,
        rank_p: Int32,
        rank_q: Int32,
        part: Int32,
        terms: Terms,
    ) -> None:
        """Multiply what the ring holds and write the tiles out."""
        t = self.tiling
        share = 0 if cutlass.const_expr(t.pingpong) else consumer  # which rows of the tile
        slice_ = tiled_mma.get_slice(share * 128)
        rx = tiled_mma.make_fragment_A(slice_.partition_A(sx))  # (atom, p / 64, k / 16, stages)
        ry = tiled_mma.make_fragment_B(slice_.partition_B(sy))  # (atom, 1, k / 16, stages)
        acc = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((t.p, t.q)), Float32
        )  # ((2, 2, q / 8), rows, 1)

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
            tile_p, tile_q, layer = tiles.at(work)
            acc.fill(0.0)
            if cutlass.const_expr(t.pingpong):
                _take_turn(consumer)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            last = state.stage
            for k in cutlass.range(k_tiles, unroll=1):
                wait_full(full + state.stage, state.phase)
                warpgroup.fence()
                for block in cutlass.range_constexpr(TILE_K // 16):
                    where = (None, None, block, state.stage)
                    cute.gemm(tiled_mma, acc, rx[where], ry[where], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if releases & (k > 0):
                    release(empty + last, peer, t.sharing > 1)
                last = state.stage
                state.advance()
            if cutlass.const_expr(t.pingpong):
                if work + step < tiles.total:
                    _pass_turn(1 - consumer)
            warpgroup.wait_group(0)
            if releases & (k_tiles > 0):
                release(empty + last, peer, t.sharing > 1)

            p0 = (tile_p * t.cluster_p + rank_p) * t.p + share * 64
            q0 = (tile_q * t.cluster_q + rank_q) * t.q
            if cutlass.const_expr(t.split > 1):
                self._park(acc, ring, consumer, thread)
            elif cutlass.const_expr(self.out is None):
                self._drain_any(
                    acc, staging + consumer * STAGING_BYTES, p0, q0, layer, consumer, thread, terms
                )
            elif is_simple(terms):
                buffer = self._drain_tma(
                    acc, sd, tma_d, gd, staging, p0, q0, layer, consumer, thread, buffer, terms.alpha
                )
            else:
                self._drain_any(
                    acc, staging + consumer * STAGING_BYTES, p0, q0, layer, consumer, thread, terms
                )
            work = work + step
            if cutlass.const_expr(t.pingpong):
                work = work + step
                state.skip(k_tiles)
        if cutlass.const_expr(self.out is not None):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _drain_tma(
        self,
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
        """Accumulator → staged tiles → TMA stores, two in flight; returns which buffer is next."""
        t = self.tiling
        parts = 1 if t.pingpong else t.consumers
        width = TILE_BYTES // 64 // (self.out.width // 8)
        pieces = cute.local_tile(gd, (64, width), (None, None, None))
        ds, dg = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sd, 0, 2), cute.group_modes(pieces, 0, 2)
        )
        warp = cute.arch.make_warp_uniform(thread // 32)
        for row in cutlass.range_constexpr(t.p // 64 // parts):
            for column in cutlass.range_constexpr(t.q // width):
                slot = consumer * 2 + buffer
                tile = staging + slot * TILE_BYTES
                if warp == 0:
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                consumer_barrier(consumer)
                if cutlass.const_expr(self.out.width == 16):
                    put_half(tile, acc, row, column * 8, thread, alpha, self.out)
                else:
                    put_fp32(tile, acc, row, column * 4, thread, alpha)
                cute.arch.fence_proxy("async.shared", space="cta")
                consumer_barrier(consumer)
                if warp == 0:
                    where = (None, p0 // 64 + row * parts, q0 // width + column, layer)
                    cute.copy(tma_d, ds[(None, slot)], dg[where], cache_policy=Int64(EVICT_FIRST))
                    cute.arch.cp_async_bulk_commit_group()
                buffer = buffer ^ 1
        return buffer

    @cute.jit
    def _drain_any(
        self,
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
        t = self.tiling
        parts = 1 if t.pingpong else t.consumers
        columns = min(64, t.q)
        across = t.q // columns
        count = t.p // 64 // parts * across
        # One copy of the loop over elements, whichever 64×64 of the registers is staged.
        for number in cutlass.range(count, unroll=1):
            consumer_barrier(consumer)
            for each in cutlass.range_constexpr(count):
                if number == each:
                    put_rows(tile, acc, each // across, each % across * 8, columns // 8, t.swap, thread)
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
    def _park(self, acc: cute.Tensor, ring: Int32, consumer: Int32, thread: Int32) -> None:
        """Accumulator → fp32 tiles in the ring's place, for the blocks of the cluster to add."""
        t = self.tiling
        columns = min(64, t.q)
        cute.arch.barrier(barrier_id=9, number_of_threads=128 * t.consumers)  # all warps have read the ring
        across = t.q // columns
        for row in cutlass.range_constexpr(t.p // 64 // t.consumers):
            for column in cutlass.range_constexpr(across):
                number = (row * t.consumers + consumer) * across + column
                put_rows(ring + number * STAGING_BYTES, acc, row, column * 8, columns // 8, t.swap, thread)

    @cute.jit
    def _reduce(
        self,
        ring: Int32,
        tiles: Tiles,
        first: Int32,
        rank_p: Int32,
        rank_q: Int32,
        part: Int32,
        consumer: Int32,
        thread: Int32,
        terms: Terms,
    ) -> None:
        """Add the parts of the cluster: each block sums its share of the 64×64 tiles and writes them out."""
        t = self.tiling
        columns = min(64, t.q)
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
    """Ping-pong: wait until the other consumer has seen all stages of the tile before.

    A phase bit tells apart one lap of the ring, so no consumer may wait for the stages of a later tile.
    """
    cute.arch.barrier(barrier_id=12 + consumer, number_of_threads=256)


def _pass_turn(consumer: Int32) -> None:
    cute.arch.barrier_arrive(barrier_id=12 + consumer, number_of_threads=256)


def _sync_all(cluster: int) -> None:
    """After barriers are initialized, before a peer may signal them."""
    if cluster > 1:
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


def _meet() -> None:
    """All threads of the cluster have come here; what they wrote to shared memory before is visible."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def _layout(k_major: bool) -> LayoutEnum:
    return LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR


def _smem(major: LayoutEnum, rows: int, dtype: Any, stages: int) -> cute.ComposedLayout:
    """Staged (rows, k, stages) layout in the widest swizzle that fits the contiguous dimension."""
    k_major = major == LayoutEnum.ROW_MAJOR
    kind = sm90.get_smem_layout_atom(major, dtype, TILE_K if k_major else rows)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, TILE_K, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def _load_atom(tensor: cute.Tensor, major: LayoutEnum, rows: int, multicast: bool) -> Any:
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    stage = cute.slice_(_smem(major, rows, tensor.element_type, 1), (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, stage, (rows, TILE_K))


def _slices(
    atom: Any, tensor: cute.Tensor, staged: cute.Tensor, mn_major: bool, rows: int, sharing: int, stages: int
) -> Any:
    """Slices of rows/sharing rows: staged (element, stage · sharing), in memory (element, row, k, layer)."""
    part = rows // sharing
    layout = _smem(_layout(not mn_major), part, staged.element_type, stages * sharing)
    sliced = cute.make_tensor(staged.iterator, layout.outer)
    tiles = cute.local_tile(tensor, (part, TILE_K), (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sliced, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def compile_gemm(gemm: Gemm, prefix: str) -> Any:
    """Compile one function by the calling convention, for the architecture in CUTE_DSL_ARCH."""
    from cutlass.cute.runtime import make_fake_tensor
    from cutlass.runtime import make_fake_stream

    def operand(column_major: bool) -> Any:
        shape = tuple(cute.sym_int32() for _ in range(3))
        layer, leading = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8)
        stride = (layer, 1, leading) if column_major else (layer, leading, 1)
        return make_fake_tensor(gemm.dtype, shape, stride, assumed_align=16)

    scalars = [Int64(0)] * 9 + [Float32(0.0)] * 2 + [Int32(0)] * 4
    gemm.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        gemm, operand(gemm.trans_a), operand(gemm.trans_b), *scalars, stream, options="--enable-tvm-ffi"
    )


TYPES = {DType.FP16: Float16, DType.BF16: BFloat16, DType.FP32: Float32}


def functions() -> Sequence[Function]:
    """All functions of the family, a library for each tiling and input type."""
    found = []
    for member in FAMILY:
        tiling = member.tiling
        for name, dtype, out, trans_a, trans_b in member.functions():
            gemm = Gemm(tiling, TYPES[dtype], None if out is None else TYPES[out], trans_a, trans_b)
            library = f"step9_{tiling.name}_{dtype.value}".replace("-", "_")
            config = {"tiling": tiling.name, "cluster": tiling.cluster, "stages": tiling.stages}
            found.append(Function(name, "sm_90a", partial(compile_gemm, gemm, name), library, config))
    return found
