"""Step 9, two consumers of one staged B: receives a call (kernels/call.py), hands on
D = act(alpha · A·B + beta · C + bias). It is the product of sm_100a.

Adds        a second MMA warp and writeback warpgroup a CTA. Both read the same staged B; a cluster computes
            512×256. And what production kernels have: registers moved from the roles of one thread to the
            writeback, programmatic dependent launch, cluster launch control, four layouts, batches, a fused
            epilogue.
Why faster  49,152 staged bytes feed 256×256×64 multiply-adds a CTA, 1.33 times as many a byte as in Step 8.
            While one accumulator is written back the other consumer's MMAs go on, on a tensor core that
            never idles.
Costs       all of tensor memory (2 × 256 columns) and shared memory: no second accumulator a consumer, so a
            drained one is released as early as registers allow, and D leaves in pieces of 8,192 bytes.
Shapes      512×256: two consumers, ring of 4. 256×256: one consumer, ring of 6, two accumulators in turn, for
            problems that leave clusters of the large tile empty (or as good, by measurement).

Roles       warpgroups 0 … consumers - 1 write back, one each. In the last warpgroup, one elected thread a
            warp: warps 0 and 1 issue MMAs for their consumer (leader only), warp 2 asks cluster launch
            control for the next tile (leader, dynamic tilings only), warp 3 loads. Warp 0 of the CTA
            allocates and frees TMEM.
Timeline    load         | k0 k1 k2 ·· | next tile's k0 k1 ··
            multiply 0   |    k0 k1 ·· | (drained?) k0 k1 ··
            multiply 1   |    k0 k1 ··  | (drained?) k0 k1 ··
            write back 0 |             | drain, st st st st ··
            write back 1 |              | drain, st st st st ··
Barriers    all but c2ld and the named ones have cluster scope.
            tma2mma[s]: leader's; 1 arrival (expect_tx) + CTA_GROUP × stage bytes (98,304; 65,536), less of a
            tile that reaches past an edge: stage s landed.
            mma2tma[s]: 1 arrival a consumer (commit to both CTAs, mask 0b11): all consumers have read stage
            s.
            mma2ld[c]: 1 arrival (commit to both CTAs): accumulator c is complete.
            ld2mma[c]: leader's; 256 arrivals, 128 a CTA: accumulator c is drained.
            c2ld[c, p]: 1 arrival (expect_tx) + 8,192 B: a piece of C is in staging buffer p.
            clc2read[i]: 1 arrival (expect_tx) + 16 B: an answer is here. read2clc[i]: leader's; `readers`
            arrivals.
            named 10 + c, 128 threads: a piece of D is staged; the piece before the last has been read by TMA.
            cluster-wide: set up; all done in both CTAs, TMEM may be freed.
Commits     tcgen05 operations are ordered, and committed, within the thread that issued them: each MMA thread
            commits its own reads, which is why mma2tma takes one arrival a consumer.
Registers   512×256: 384 threads × 168. The last warpgroup gives up all but 56, writeback takes 224 (ptxas
            honours setmaxnreg with min_blocks_per_mp=1 only). 256×256: 256 threads × 256, nothing to move.
Epilogue    16-bit output without C: the accumulator is drained, fused and packed into 128 registers,
            released, and only then stored. Else it is released after its last read. EPI_N = 64 columns a
            read from TMEM; pieces of 32 (16-bit) or 16 (fp32) columns leave by double-buffered evict-first
            TMA stores. C of D's type comes in through the same buffers, one piece ahead; another C is read
            by plain loads.
Shared      512×256: 4 × 49,152 B + 4 × 8,192 B + 196 B = 229,572 B. 256×256: 6 × 32,768 B + 2 × 8,192 B +
            212 B = 213,204 B.
TMEM        512 columns.
Limits      A and B at 16 bytes with leading dimensions and batch strides in multiples of 8; so D in
            multiples of 16 bytes, unless the function is `plain`. M, N, K and batch at least 1. alpha = 0
            reads neither A nor B: one block beyond K is loaded, which TMA fills with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.blackwell.epilogue import (
    TYPES,
    Fused,
)
from kernels.blackwell.parts import (
    ARCHITECTURES,
    DTYPES,
    K_STEP,
    MN_STEP,
    S128,
    WARPGROUP,
    instruction,
    k_major,
    load_pair,
    mn_major,
    multiply,
)
from kernels.blackwell.pipeline import (
    PipelineState,
    arrive_at,
    consumer,
    producer,
    wait,
    wait_all,
)
from kernels.blackwell.raster import place
from kernels.blackwell.tilings import (
    A_TILE,
    B_TILE,
    BLK_K,
    BLK_M,
    BLK_N,
    CLC_DEPTH,
    CTA_GROUP,
    MMA_M,
    MMA_N,
    TMEM_COLUMNS,
    Choice,
    choices,
)
from kernels.blackwell.writeback import LEADER, PIECE_PITCH, Shared, Writeback
from kernels.targets import Function

ANSWER_BYTES = 16
HELPER_REGISTERS = 56
WRITEBACK_REGISTERS = 224


def box_rows(extent: Int32, tile: int) -> Int32:
    """Rows of the box that brings a tile, in steps of 8: TMA takes time to fill those past an edge with zeros."""
    return cutlass.min((extent + 7) // 8 * 8, tile)


def bytes_within(row: Int32, extent: Int32, mn_contiguous: bool, tile: int) -> Int32:
    """What is loaded of a tile that begins at `row`, of an operand with so many: boxes that begin within."""
    if mn_contiguous:
        boxes = cutlass.max(0, cutlass.min(extent - row + 63, tile)) // 64
        return boxes * (64 * BLK_K * 2)
    return cutlass.select_(row < extent, box_rows(extent, tile) * (BLK_K * 2), Int32(0))


class MultiConsumer(Writeback):
    """One function of the family. Attributes that `kernel` sets hold traced values and live for one trace."""

    def __init__(self, choice: Choice) -> None:
        self.tiling = choice.tiling
        self.dtype = DTYPES[choice.dtype]
        self.a_mn, self.b_mn = choice.a_mn, choice.b_mn
        self.plain = choice.out == "plain"
        self.out = self.dtype if choice.out == "half" else Float32
        self.piece_n = PIECE_PITCH * 8 // self.out.width  # columns of a piece

    # Host

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
        """Launch, as kernels/call.py says."""
        m, k, n = a.shape[1], a.shape[2], b.shape[2]
        f = Fused(alpha, beta, code, bias, c, c_batch, c_row, c_column, d, d_batch, d_row, d_column, m, n)
        tiles_m, tiles_n = cute.ceil_div(m, self.tiling.tile_m), cute.ceil_div(n, MMA_N)
        tiles = tiles_m * tiles_n * batch
        clusters = tiles
        if cutlass.const_expr(not self.tiling.dynamic):
            clusters = cutlass.max(cutlass.min(tiles, ctas // CTA_GROUP), 1)
        k_start, k_blocks = Int32(0), cute.ceil_div(k, BLK_K)
        if alpha == 0.0:
            k_start, k_blocks = k, Int32(1)
        if raster == 0:
            raster = Int32(8)
        a_map = self.operand_map(a, 1, 2, self.a_mn, box_rows(m, BLK_M))
        b_map = self.operand_map(b, 2, 1, self.b_mn, box_rows(n, BLK_N))
        d_map, c_map, c_by_tma = a_map, a_map, Int32(0)
        if cutlass.const_expr(not self.plain):
            d_map = self.piece_map(d, d_batch, d_row, m, n, batch)
            c_by_tma = self.suits_tma(f)
            c_layers = batch
            if c_by_tma == 0:  # nothing reads through the map then, but it must be a valid one
                c, c_batch, c_row = d, d_batch, d_row
            if c_batch == 0:
                c_batch, c_layers = c_row, Int32(1)
            c_map = self.piece_map(c, c_batch, c_row, m, n, c_layers)
        self.kernel(
            a_map,
            b_map,
            d_map,
            c_map,
            c_by_tma,
            a.shape[0],
            b.shape[0],
            f,
            tiles_m,
            tiles_n,
            tiles,
            raster,
            k_start,
            k_blocks,
        ).launch(
            grid=(clusters * CTA_GROUP, 1, 1),
            block=(self.tiling.threads, 1, 1),
            cluster=(CTA_GROUP, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def operand_map(
        self, x: cute.Tensor, mn: int, k: int, mn_contiguous: bool, rows: Int32
    ) -> cuda.TensorMap:
        """Tensor map of an operand [layer, …] whose modes `mn` and `k` are M or N, and K.

        Its box is what there is of a staged tile, or half of an MN-major one: 64 of M or N are a span of the swizzle.
        """
        inner, outer = (mn, k) if mn_contiguous else (k, mn)
        made = cuda.create_tensor_map_tiled(
            global_address=x.iterator.toint(),
            dtype=self.dtype,
            global_dims=[x.shape[inner], x.shape[outer], x.shape[0]],
            global_strides=[x.stride[outer] // 8, x.stride[0] // 8],
            box_dims=[64, BLK_K if mn_contiguous else rows, 1],
            swizzle=S128,
            l2_promotion=cuda.TensorMapL2Promotion.l2_256b,
        )
        # A map's type holds its box, and must be known where it is compiled; nothing reads it there.
        return replace(made, box_dims=(64, BLK_K, 1))

    def piece_map(
        self, address: Int64, batch_stride: Int64, row_stride: Int64, m: Int32, n: Int32, layers: Int32
    ) -> cuda.TensorMap:
        """Tensor map of D or C whose box is a piece."""
        lanes = 128 // self.out.width
        return cuda.create_tensor_map_tiled(
            global_address=address,
            dtype=self.out,
            global_dims=[n, m, layers],
            global_strides=[row_stride // lanes, batch_stride // lanes],
            box_dims=[self.piece_n, BLK_M, 1],
            swizzle=cuda.TensorMapSwizzle.s64b,
        )

    @cute.jit
    def suits_tma(self, f: Fused) -> Int32:
        """1 where C can come in by TMA: of D's type, rows contiguous, all in multiples of 16 bytes."""
        lanes = 128 // self.out.width
        odd = f.c % 16 + f.c_row % lanes + f.c_batch % lanes
        suits = Int32(0)
        if (f.code >> 2) & 3 == TYPES[self.out] and odd == 0 and f.c_column == 1 and f.c_row > 0:
            suits = Int32(1)
        return suits

    # Device

    @cute.kernel
    def kernel(
        self,
        a_map: cutlass.GridConstant[cuda.TensorMap],
        b_map: cutlass.GridConstant[cuda.TensorMap],
        d_map: cutlass.GridConstant[cuda.TensorMap],
        c_map: cutlass.GridConstant[cuda.TensorMap],
        c_by_tma: Int32,
        a_layers: Int32,
        b_layers: Int32,
        f: Fused,
        tiles_m: Int32,
        tiles_n: Int32,
        tiles: Int32,
        raster: Int32,
        k_start: Int32,
        k_blocks: Int32,
    ) -> None:
        """Two CTAs compute tiles of D."""
        tiling = self.tiling
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.rank = prims.cluster_ctarank()
        self.cluster, self.clusters = cta // CTA_GROUP, ctas // CTA_GROUP
        self.tiles_m, self.tiles_n, self.tiles, self.raster = tiles_m, tiles_n, tiles, raster
        self.k_start, self.k_blocks = k_start, k_blocks
        self.consumer, self.quarter, self.thread = warp // 4, warp % 4, tid % WARPGROUP  # of writeback
        self.f, self.d_map, self.c_map, self.c_by_tma = f, d_map, c_map, c_by_tma
        self.shared = Shared(tiling, self.dtype, self.out)

        if warp == 0:
            if prims.elect_sync():
                self.shared.init(tiling)
            prims.tcgen05_alloc(self.shared.slot, TMEM_COLUMNS, group="cta_2")
            prims.tcgen05_relinquish_alloc_permit(group="cta_2")
            if prims.elect_sync():
                for each in (a_map, b_map, d_map):
                    prims.prefetch_tensormap(each.get_ptr())
        prims.fence_mbarrier_init()
        prims.tcgen05_fence("before_thread_sync")
        prims.barrier_cluster_arrive()
        prims.barrier_cluster_wait()
        prims.tcgen05_fence("after_thread_sync")
        tmem = self.shared.slot.load()
        prims.griddepcontrol("wait")  # what ran before on this stream is complete

        helper = warp - 4 * tiling.consumers  # index in the last warpgroup
        if helper >= 0:
            if cutlass.const_expr(tiling.consumers > 1):
                prims.setmaxregister(HELPER_REGISTERS, "decrease")
            if helper == 3:
                if prims.elect_sync():
                    self.load(a_map, b_map, a_layers, b_layers)
                    prims.griddepcontrol("launch_dependents")
            if cutlass.const_expr(tiling.dynamic):
                if helper == 2 and self.rank == LEADER:
                    if prims.elect_sync():
                        self.schedule()
            if helper < tiling.consumers and self.rank == LEADER:
                if prims.elect_sync():
                    self.multiply(helper, tmem)
        else:
            if cutlass.const_expr(tiling.consumers > 1):
                prims.setmaxregister(WRITEBACK_REGISTERS, "increase")
            self.write_back(tmem)

        prims.tcgen05_fence("before_thread_sync")
        prims.barrier_cluster_arrive()
        prims.barrier_cluster_wait()
        prims.tcgen05_fence("after_thread_sync")
        if warp == 0:
            prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Float32), TMEM_COLUMNS, group="cta_2")

    # Roles of one thread

    @cute.jit
    def load(self, a_map: cuda.TensorMap, b_map: cuda.TensorMap, a_layers: Int32, b_layers: Int32) -> None:
        """Load this CTA's rows of A, for each consumer, and its half of B."""
        tiling = self.tiling
        filling, answer = producer(tiling.depth), consumer(CLC_DEPTH)
        tile = self.cluster
        while tile < self.tiles:
            m, n, layer = place(tile, self.tiles_m, self.tiles_n, self.raster)
            a_layer, b_layer = cutlass.min(layer, a_layers - 1), cutlass.min(layer, b_layers - 1)
            column = n * MMA_N + self.rank * BLK_N
            arriving = self.arriving(m, n)
            for block in range(self.k_blocks):
                wait(self.shared.mma2tma, filling, "cluster")
                full = self.shared.tma2mma.subview(filling.stage)
                if self.rank == LEADER:
                    prims.mbarrier_arrive_expect_tx(full, arriving)
                k = self.k_start + block * BLK_K
                for c in cutlass.range_constexpr(tiling.consumers):
                    row = m * tiling.tile_m + c * MMA_M + self.rank * BLK_M
                    tile_a = self.shared.a.subview((filling.stage * tiling.consumers + c) * A_TILE)
                    self.load_tile(tile_a, a_map, self.a_mn, row, self.f.rows, k, a_layer, full)
                tile_b = self.shared.b.subview(filling.stage * B_TILE)
                self.load_tile(tile_b, b_map, self.b_mn, column, self.f.columns, k, b_layer, full)
                filling.advance()
            tile = self.next_tile(tile, answer)
            answer.advance()
        wait_all(self.shared.mma2tma, filling, "cluster")

    @cute.jit
    def arriving(self, m: Int32, n: Int32) -> Int32:
        """Bytes of a stage of tile (m, n), in both CTAs."""
        total = Int32(0)
        for half in cutlass.range_constexpr(CTA_GROUP):
            for c in cutlass.range_constexpr(self.tiling.consumers):
                row = m * self.tiling.tile_m + c * MMA_M + half * BLK_M
                total = total + bytes_within(row, self.f.rows, self.a_mn, BLK_M)
            total = total + bytes_within(n * MMA_N + half * BLK_N, self.f.columns, self.b_mn, BLK_N)
        return total

    @cute.jit
    def load_tile(
        self,
        tile: cutlass.Array,
        source: cuda.TensorMap,
        mn_contiguous: cutlass.Constexpr,
        row: Int32,
        extent: Int32,
        k: Int32,
        layer: Int32,
        full: cutlass.Array,
    ) -> None:
        """Start the loads of 128 rows of op(A), or columns of op(B), and BLK_K of K; not of what lies past the edge.

        What was there before is multiplied then, for rows or columns of D that nobody stores.
        """
        if cutlass.const_expr(mn_contiguous):
            if row < extent:
                load_pair(tile, source, [row, k, layer], full)
            if row + 64 < extent:
                load_pair(tile.subview(64 * BLK_K), source, [row + 64, k, layer], full)
        elif row < extent:
            load_pair(tile, source, [k, row, layer], full)

    @cute.jit
    def multiply(self, c: Int32, tmem: Int32) -> None:
        """Issue the MMAs of consumer c for both CTAs."""
        tiling = self.tiling
        descriptor = instruction(self.dtype, MMA_M, MMA_N, self.a_mn, self.b_mn)
        a_step, b_step = MN_STEP if self.a_mn else K_STEP, MN_STEP if self.b_mn else K_STEP
        base = c * tiling.accumulators
        mma2ld, ld2mma = self.shared.mma2ld.subview(base), self.shared.ld2mma.subview(base)
        reading, drained, answer = consumer(tiling.depth), producer(tiling.accumulators), consumer(CLC_DEPTH)
        tile = self.cluster
        while tile < self.tiles:
            wait(ld2mma, drained, "cluster")
            prims.tcgen05_fence("after_thread_sync")
            accumulator = prims.make_tmem_ptr(tmem + (base + drained.stage) * MMA_N, Float32)
            for block in range(self.k_blocks):
                wait(self.shared.tma2mma, reading, "cluster")
                tile_a = self.shared.a.subview((reading.stage * tiling.consumers + c) * A_TILE)
                tile_b = self.shared.b.subview(reading.stage * B_TILE)
                multiply(
                    "cta_2",
                    accumulator,
                    mn_major(tile_a) if self.a_mn else k_major(tile_a),
                    mn_major(tile_b) if self.b_mn else k_major(tile_b),
                    descriptor,
                    block > 0,
                    a_step,
                    b_step,
                )
                read = self.shared.mma2tma.subview(reading.stage)
                prims.tcgen05_commit(read, multicast_mask=0b11, group="cta_2")
                reading.advance()
            prims.tcgen05_commit(mma2ld.subview(drained.stage), multicast_mask=0b11, group="cta_2")
            drained.advance()
            tile = self.next_tile(tile, answer)
            answer.advance()

    # Order of tiles

    @cute.jit
    def schedule(self) -> None:
        """Ask the hardware for a cluster that hasn't started yet, to compute its tile in its stead."""
        asking, answer = producer(CLC_DEPTH), consumer(CLC_DEPTH)
        tile = self.cluster
        while tile < self.tiles:
            wait(self.shared.read2clc, asking, "cluster")
            told = self.shared.clc2read.subview(asking.stage)
            for rank in cutlass.range_constexpr(CTA_GROUP):
                prims.mbarrier_arrive_expect_tx(prims.mapa(told, rank), ANSWER_BYTES, scope="cluster")
            prims.clusterlaunchcontrol_try_cancel(
                self.shared.answers.subview(asking.stage), told, multicast=True
            )
            asking.advance()
            tile = self.next_tile(tile, answer)
            answer.advance()

    @cute.jit
    def next_tile(self, tile: Int32, answer: PipelineState, warps: cutlass.Constexpr = False) -> Int32:
        """The tile after `tile`, or one past the last. warps: a whole warp calls this, and arrives once.

        The caller advances `answer`: what a callee changes isn't carried through the caller's loop.
        """
        following = tile + self.clusters
        if cutlass.const_expr(self.tiling.dynamic):
            wait(self.shared.clc2read, answer, "cluster")
            response = self.shared.answers[answer.stage]
            first = prims.clusterlaunchcontrol_query_cancel("get_first_cta_id_x", response)
            following = self.tiles
            if prims.clusterlaunchcontrol_query_cancel("is_canceled", response):
                following = first // CTA_GROUP
            # The next answer is written through the async proxy, which must not overtake this read.
            prims.fence_proxy("async_shared", space=prims.SharedSpace.shared_cta)
            read = self.shared.read2clc.subview(answer.stage)
            if cutlass.const_expr(warps):
                prims.bar_warp_sync(0xFFFFFFFF)
                if prims.elect_sync():
                    arrive_at(read, LEADER)
            else:
                arrive_at(read, LEADER)
        return following


def compile_choice(choice: Choice) -> Any:
    """Compile one function of the family."""

    def operand(contiguous: int) -> Any:
        strides: list[Any] = [cute.sym_int64(divisibility=8) for _ in range(3)]
        strides[contiguous] = 1
        shape = tuple(cute.sym_int32() for _ in range(3))
        return make_fake_tensor(DTYPES[choice.dtype], shape, tuple(strides), assumed_align=16)

    MultiConsumer.kernel.set_name_prefix(
        f"blackwell_{choice.name}", remove_cutlass_symbol=True, keep_mangled_name=False
    )
    address, word = Int64(0), Int32(0)
    return cute.compile(
        MultiConsumer(choice),
        operand(1 if choice.a_mn else 2),
        operand(2 if choice.b_mn else 1),
        *[address] * 9,
        Float32(1.0),
        Float32(0.0),
        *[word] * 4,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def functions() -> Sequence[Function]:
    """The family: see tilings.choices."""
    return [
        Function(choice.name, arch, partial(compile_choice, choice), config=choice.config)
        for arch in ARCHITECTURES
        for choice in choices()
    ]
