"""Step 9, several consumers: the product family of sm_90a. Receives a `Tiling` and types, hands on functions.

Adds        a second consumer warpgroup: both share each staged B, or take turns at tiles (ping-pong).
            Registers move from the producer to them. The whole arithmetic of the service, by kernels/call.py.
Why faster  a tile of 128×256 brings 85 FLOPs a byte from L2 with its B multicast (64 with 128×128); two
            consumers keep the tensor cores busy while one of them waits.
Costs       one block an SM; a tile's epilogue is not hidden by another tile's product, except in ping-pong.
Roles       warpgroup 0: producer, 40 registers: one thread loads by TMA, the others idle. Warpgroups 1, 2:
            consumers, 232 registers: wgmma m64·q·k16, one group in flight, then the epilogue, while the
            producer already fills the ring with the next tile. With one consumer nothing is moved.
Barriers    full[s], empty[s]: see pipeline.py. Named, of one consumer: 10 + consumer, 128 threads, twice a
            tile that is staged for the rest of the epilogue (it is free; it is written); by TMA each warp
            stores what it staged. Of all: 9, when rows past an edge are cleared, and before split-K reuses the
            ring; 12 + consumer, 256 threads: its turn, in ping-pong and where consumer 1 lags. Cluster: barriers
            are initialized; split-K's parts are there; nobody signals or reads a peer any more.
            inbox[consumer], of two blocks that divide K: 1 arrival and the bytes of half a tile, which the
            peer sends (consumer.py).
Shared      128×256, 2×1: 4 × 49,152 B + 2 consumers × 2 tiles × 8,192 B = 229,376 B, and barriers 64 B.
Files       this one: what is launched; producer.py and consumer.py: the roles; pipeline.py; boxes.py and
            epilogue.py: how D leaves, by TMA and by element.
Limits      16-bit inputs that TMA can address; what it can't is packed by the launcher.

min_blocks_per_mp keeps setmaxnreg in the machine code: without it ptxas drops it silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.experimental import cuda
from cutlass.experimental import primitives as prims

from kernels.hopper.boxes import BOX_ROWS, TILE_BYTES, across_map
from kernels.hopper.consumer import consume, mma_of, reduce
from kernels.hopper.epilogue import Terms
from kernels.hopper.marks import SILENT
from kernels.hopper.pipeline import FastTiles, init_inbox, init_ring
from kernels.hopper.producer import Loads, Operand, produce, staged_layout
from kernels.hopper.tilings import FAMILY, STAGING_BYTES, TILE_K, Member, Tiling
from kernels.problem import DType
from kernels.targets import Function

PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
BAND = 8  # rows of tiles, where the caller leaves it to the kernel


@dataclass(frozen=True)
class Gemm:
    """One kernel: a tiling, types and contiguous dimensions. `out` None: stores any type at any stride.

    One that computes D transposed finds at run time whether TMA may store it, so it needs no other function for that.
    """

    tiling: Tiling
    dtype: Any
    out: Any
    trans_a: bool
    trans_b: bool
    clock: ClassVar[Any] = SILENT  # traced.py has another

    @property
    def _across(self) -> Any:
        """D's type where it may leave by TMA, transposed."""
        return self.dtype if self.out is None and self.tiling.swap else None

    def _k_major(self) -> tuple[bool, bool]:
        """Whether x, y lie along K in memory."""
        a, b = not self.trans_a, self.trans_b
        return (b, a) if self.tiling.swap else (a, b)

    def _loads(self) -> tuple[Loads, Loads]:
        """Of x, which blocks of the same p share, and of y."""
        t = self.tiling
        x_k_major, y_k_major = self._k_major()
        return Loads(x_k_major, t.p, t.cluster_q), Loads(y_k_major, t.q, t.cluster_p)

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
        x_k_major, y_k_major = self._k_major()
        d_p, d_q, c_p, c_q = d_row, d_column, c_row, c_column
        if cutlass.const_expr(t.swap):
            x, y = y, x
            d_p, d_q, c_p, c_q = d_column, d_row, c_column, c_row
        p, q = x.shape[0], y.shape[0]
        terms = Terms(d, d_batch, d_p, d_q, c, c_batch, c_p, c_q, bias, alpha, beta, code, p, q)

        x_smem = staged_layout(x_k_major, t.p, self.dtype, t.stages)
        y_smem = staged_layout(y_k_major, t.q, self.dtype, t.stages)
        x_loads, y_loads = self._loads()
        (x_map, x_edge), (y_map, y_edge) = x_loads.maps(x), y_loads.maps(y)

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
            staged = 2 * t.consumers * (64 // BOX_ROWS)
            d_smem = cute.tile_to_shape(atom, (BOX_ROWS, width, staged), order=(0, 1, 2))
            tma_d, gd = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                d_tensor,
                cute.select(d_smem, mode=[0, 1]),
                (BOX_ROWS, width),
            )

        d_map = None
        if cutlass.const_expr(self._across is not None):
            d_map = across_map(t, self._across, terms, batch, x.iterator.toint())

        tiles_p = cute.ceil_div(p, t.p * t.cluster_p)
        tiles_q = cute.ceil_div(q, t.q * t.cluster_q)
        group = raster if raster > 0 else Int32(BAND)
        tiles = FastTiles.of(tiles_p, tiles_q, batch, group)
        clusters = tiles.total
        if cutlass.const_expr(t.split == 1):
            clusters = cutlass.min(clusters, cutlass.max(ctas // t.cluster, 1))
        self.kernel(
            x_map,
            x_edge,
            y_map,
            y_edge,
            x.shape[1],
            x.shape[2],
            y.shape[2],
            tma_d,
            gd,
            d_map,
            x_smem,
            y_smem,
            d_smem,
            *terms.values(),
            tiles,
        ).launch(
            grid=(clusters * t.cluster, 1, 1),
            block=(t.threads, 1, 1),
            cluster=(t.cluster, 1, 1),
            min_blocks_per_mp=t.per_sm,
            preferred_smem_carveout=100
            if t.half_sm
            else None,  # percent; else one block's worth is set apart
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_map: cutlass.GridConstant[cuda.TensorMap],
        x_edge: cutlass.GridConstant[cuda.TensorMap],
        y_map: cutlass.GridConstant[cuda.TensorMap],
        y_edge: cutlass.GridConstant[cuda.TensorMap],
        k: Int32,
        x_layers: Int32,
        y_layers: Int32,
        tma_d: Any,
        gd: Any,
        d_map: cutlass.GridConstant[cuda.TensorMap],
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
        tiles: FastTiles,
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

        x_loads, y_loads = self._loads()

        if warp == 0:
            for each in (x_map, y_map):
                prims.prefetch_tensormap(each.get_ptr())
            if cutlass.const_expr(self.out is not None):
                cpasync.prefetch_descriptor(tma_d)
            if cutlass.const_expr(self._across is not None):
                prims.prefetch_tensormap(d_map.get_ptr())

        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(Int64, t.stages)
        empty = smem.allocate_array(Int64, t.stages)
        inbox = None
        if cutlass.const_expr(t.exchanges):
            inbox = smem.allocate_array(Int64, t.consumers)
        sx = smem.allocate_tensor(self.dtype, x_smem.outer, 1024, x_smem.inner)
        sy = smem.allocate_tensor(self.dtype, y_smem.outer, 1024, y_smem.inner)
        ring = sx.iterator.toint().to(Int32)
        staging, sd = ring, None
        if cutlass.const_expr(self.out is not None):
            sd = smem.allocate_tensor(self.out, d_smem.outer, 1024, d_smem.inner)
            staging = sd.iterator.toint().to(Int32)
            if cutlass.const_expr(
                t.staging_bytes > t.consumers * STAGING_BYTES
            ):  # halves of tiles come in here
                smem.allocate(t.staging_bytes - t.consumers * STAGING_BYTES, 16)
        elif cutlass.const_expr(not t.parks):
            staging = smem.allocate(t.staging_bytes, 1024).toint().to(Int32)

        # A consumer warp releases a stage to each block that writes into it: of the same p (shares X), or q (Y).
        consumers = 1 if t.pingpong else t.consumers
        releases = 4 * consumers * (t.cluster_p + t.cluster_q - 1)
        if warp == 0:
            init_ring(full, empty, t.stages, releases)
            if cutlass.const_expr(t.exchanges):
                init_inbox(inbox, t.consumers)
        _sync_all(t.cluster)
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(t.half_sm):
            cute.arch.griddepcontrol_launch_dependents()  # there is room for them beside this block

        k_tiles = cute.ceil_div(k, TILE_K)
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
                with cute.arch.elect_one():
                    produce(
                        t,
                        Operand(x_loads, (x_map, x_edge), ring, terms.p, x_layers),
                        Operand(y_loads, (y_map, y_edge), sy.iterator.toint().to(Int32), terms.q, y_layers),
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
                        self.clock,
                        terms,
                    )
            self.clock.watch(full, tiles, first, step, k_tiles, rank, warp, terms)
            if cutlass.const_expr(t.parks):
                _meet()
        else:
            if cutlass.const_expr(t.consumers > 1):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consume(
                t,
                self.out,
                self._across,
                partial(mma_of, t, self.dtype, *self._k_major()),
                sx,
                sy,
                sd,
                tma_d,
                gd,
                d_map,
                ring,
                staging,
                full,
                empty,
                inbox,
                tiles,
                first,
                step,
                k_tiles,
                group - 1,
                thread % 128,
                rank_p,
                rank_q,
                part,
                x_loads,
                y_loads,
                self.clock,
                terms,
            )
            if cutlass.const_expr(t.parks):
                _meet()
                reduce(t, ring, tiles, first, rank_p, rank_q, part, group - 1, thread % 128, terms)
        if cutlass.const_expr(t.cluster > 1 and not t.exchanges):
            _meet()  # no block leaves while a peer may signal it or read from it


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
    return functions_of(FAMILY)


def functions_of(members: Sequence[Member]) -> Sequence[Function]:
    """All functions of some members, a library for each tiling and input type."""
    found = []
    for member in members:
        tiling = member.tiling
        for name, dtype, out, trans_a, trans_b in member.functions():
            gemm = Gemm(tiling, TYPES[dtype], None if out is None else TYPES[out], trans_a, trans_b)
            library = f"step9_{tiling.name}_{dtype.value}".replace("-", "_")
            config = {"tiling": tiling.name, "cluster": tiling.cluster, "stages": tiling.stages}
            found.append(Function(name, "sm_90a", partial(compile_gemm, gemm, name), library, config))
    return found
