"""Step 9 for a group: receives a table of unlike products, hands on all of them from one launch.

    function(table, count, total, ctas)

Adds        a schedule over the tiles of all products: a block takes every so-many-th tile of the whole list and
            looks up whose it is. Tensor maps come from the table, not from the launch.
Why faster  small products fill the chip together, and one launch is paid for all.
Costs       two tensor maps and a record a product, written by the host (kernels/group.py); no multicast, D by
            the plain way out.
Roles       as in Step 9: a producer warp, consumers that split a tile's rows, no clusters.
Barriers    full[s]: 1 arrival and the bytes of A and B. empty[s]: one arrival a consumer warp. Named, of one
            consumer: 10 + consumer, 128 threads. Of all: 0, once the ring is initialized.
Shared      128×128: 6 × 32,768 B + 2 consumers × 16,384 B = 229,376 B, and barriers 96 B.
Limits      16-bit inputs that TMA can address, one type and layout a launch; anything else is the launcher's.

table: int64 tensor at a multiple of 128 bytes, as kernels/group.py lays it out. total: tiles of all products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from kernels.group import BOX_UNIT, FIELDS, MAP_BYTES, RECORD_BYTES, ends_bytes
from kernels.hopper.consumer import drain_any, mma_of, multiply
from kernels.hopper.epilogue import Terms, element
from kernels.hopper.pipeline import PipelineState, Tiles, init_ring, release, wait_empty
from kernels.hopper.producer import SPAN, load_box, staged_layout
from kernels.hopper.tilings import GROUPED, INPUTS, STAGING_BYTES, TILE_K, Tiling, grouped_function
from kernels.problem import DType
from kernels.targets import Function

PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@dsl_user_op
def _acquire(tensor_map: Int64, *, loc: Any = None, ip: Any = None) -> None:
    """What was written to a tensor map by ordinary means is what TMA reads from here on."""
    llvm.inline_asm(
        None,
        [tensor_map.ir_value(loc=loc, ip=ip)],
        "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
        "l,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _field(record: Int64, name: str) -> Any:
    """One value of a record."""
    offset, letter = FIELDS[name]
    kind = {"q": Int64, "i": Int32, "f": Float32}[letter]
    return element(kind, record + offset, Int64(0))[0]


@cute.jit
def _whose(ends: Int64, work: Int32, index: Int32) -> Int32:
    """The product, from number `index` on, that tile `work` belongs to."""
    end = element(Int32, ends, Int64(index))[0]
    while work >= end:
        index = index + 1
        end = element(Int32, ends, Int64(index))[0]
    return index


def _tiles(record: Int64) -> Tiles:
    return Tiles(*(_field(record, name) for name in ("tiles_p", "tiles_q", "batch", "raster")))


def _terms(record: Int64) -> Terms:
    return Terms(*(_field(record, name) for name in Terms.__dataclass_fields__))


@dataclass(frozen=True)
class Grouped:
    """One kernel: a tiling, the inputs' type and contiguous dimensions."""

    tiling: Tiling
    dtype: Any
    trans_a: bool
    trans_b: bool

    @cute.jit
    def __call__(self, table: cute.Tensor, count: Int32, total: Int32, ctas: Int32, stream: Any) -> None:
        t = self.tiling
        x_k_major, y_k_major = not self.trans_a, self.trans_b
        self.kernel(
            staged_layout(x_k_major, t.p, self.dtype, t.stages),
            staged_layout(y_k_major, t.q, self.dtype, t.stages),
            table.iterator.toint(),
            count,
            total,
        ).launch(
            grid=(cutlass.min(total, ctas), 1, 1),
            block=(t.threads, 1, 1),
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x_smem: cute.ComposedLayout,
        y_smem: cute.ComposedLayout,
        ends: Int64,
        count: Int32,
        total: Int32,
    ) -> None:
        t = self.tiling
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)

        smem = cutlass.utils.SmemAllocator()
        full = smem.allocate_array(Int64, t.stages)
        empty = smem.allocate_array(Int64, t.stages)
        sx = smem.allocate_tensor(self.dtype, x_smem.outer, 1024, x_smem.inner)
        sy = smem.allocate_tensor(self.dtype, y_smem.outer, 1024, y_smem.inner)
        staging = smem.allocate(t.staging_bytes, 1024).toint().to(Int32)
        if warp == 0:
            init_ring(full, empty, t.stages, 4 * t.consumers)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        records = ends + ends_bytes(count)
        if group == 0:
            if cutlass.const_expr(t.consumers > 1):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self._produce(sx, sy, full, empty, ends, records, block, blocks, total)
        else:
            if cutlass.const_expr(t.consumers > 1):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(
                sx, sy, staging, full, empty, ends, records, block, blocks, total,
                group - 1, thread % 128,
            )  # fmt: skip

    @cute.jit
    def _produce(
        self,
        sx: cute.Tensor,
        sy: cute.Tensor,
        full: cute.Pointer,
        empty: cute.Pointer,
        ends: Int64,
        records: Int64,
        first: Int32,
        step: Int32,
        total: Int32,
    ) -> None:
        """Fill the ring: A and B of every k of every tile of this block, whosever they are."""
        t = self.tiling
        x_ring, y_ring = sx.iterator.toint().to(Int32), sy.iterator.toint().to(Int32)
        barriers = full.toint().to(Int32)
        state = PipelineState.producer(t.stages)
        index, known = Int32(0), Int32(-1)
        work = first
        while work < total:
            index = _whose(ends, work, index)
            record = records + Int64(index) * RECORD_BYTES
            x_map, y_map = record, record + MAP_BYTES
            if index != known:
                _acquire(x_map)
                _acquire(y_map)
                known = index
            tile_p, tile_q, layer = _tiles(record).at(work - _field(record, "first"))
            x_layer = cutlass.min(layer, _field(record, "x_layers") - 1)
            y_layer = cutlass.min(layer, _field(record, "y_layers") - 1)
            x_rows = _loaded(not self.trans_a, t.p, _field(record, "p"), tile_p * t.p)
            y_rows = _loaded(self.trans_b, t.q, _field(record, "q"), tile_q * t.q)
            for k in cutlass.range(_field(record, "k_tiles"), unroll=1):
                wait_empty(empty + state.stage, state.phase, False)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        full + state.stage, (x_rows + y_rows) * (TILE_K * 2)
                    )
                    barrier = barriers + state.stage * 8
                    _boxes(
                        not self.trans_a, t.p, x_rows, x_ring + state.stage * (t.p * TILE_K * 2), x_map,
                        tile_p * t.p, k * TILE_K, x_layer, barrier,
                    )  # fmt: skip
                    _boxes(
                        self.trans_b, t.q, y_rows, y_ring + state.stage * (t.q * TILE_K * 2), y_map,
                        tile_q * t.q, k * TILE_K, y_layer, barrier,
                    )  # fmt: skip
                state.advance()
            work = work + step
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _consume(
        self,
        sx: cute.Tensor,
        sy: cute.Tensor,
        staging: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
        ends: Int64,
        records: Int64,
        first: Int32,
        step: Int32,
        total: Int32,
        consumer: Int32,
        thread: Int32,
    ) -> None:
        """Multiply what the ring holds and write each tile into the D that it belongs to."""
        t = self.tiling
        make_mma = partial(mma_of, t, self.dtype, not self.trans_a, self.trans_b)
        tiled_mma = make_mma()
        slice_ = tiled_mma.get_slice(consumer * 128)
        rx = tiled_mma.make_fragment_A(slice_.partition_A(sx))  # (atom, p / 64, k / 16, stages)
        ry = tiled_mma.make_fragment_B(slice_.partition_B(sy))  # (atom, 1, k / 16, stages)
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((t.p, t.q)), Float32)
        releases = thread % 32 == 0
        tile = staging + consumer * STAGING_BYTES
        state = PipelineState.consumer(t.stages)
        index = Int32(0)
        work = first
        while work < total:
            index = _whose(ends, work, index)
            record = records + Int64(index) * RECORD_BYTES
            k_tiles = _field(record, "k_tiles")
            if k_tiles == 0:
                acc.fill(0.0)
            state, last = multiply(
                make_mma, acc, rx, ry, full, empty, k_tiles, state, releases, Int32(0), False
            )
            tile_p, tile_q, layer = _tiles(record).at(work - _field(record, "first"))
            warpgroup.wait_group(0)
            if releases & (k_tiles > 0):
                release(empty + last, Int32(0), False)
            drain_any(
                t, acc, tile, tile_p * t.p + consumer * 64, tile_q * t.q, layer, consumer, thread,
                _terms(record),
            )  # fmt: skip
            work = work + step


def _loaded(k_major: bool, rows: int, extent: Int32, row: Int32) -> Int32:
    """Of a tile's rows those that are loaded: along K one box, for the host knows the product; else spans within."""
    if k_major:
        return cutlass.min(rows, (extent + BOX_UNIT - 1) // BOX_UNIT * BOX_UNIT)
    return cutlass.min(rows, (extent - row + SPAN - 1) // SPAN * SPAN)


@cute.jit
def _boxes(
    k_major: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    loaded: Int32,
    target: Int32,
    tensor_map: Int64,
    row: Int32,
    k: Int32,
    layer: Int32,
    barrier: Int32,
) -> None:
    """Start the loads of rows × TILE_K of one operand: one box along K, or one for each 64 rows."""
    if cutlass.const_expr(k_major):
        load_box(target, tensor_map, (k, row, layer), barrier)
    else:
        for first in cutlass.range_constexpr(0, rows, SPAN):
            if first < loaded:
                load_box(target + first * (TILE_K * 2), tensor_map, (row + first, k, layer), barrier)


def compile_grouped(grouped: Grouped, prefix: str) -> Any:
    """Compile one function, for the architecture in CUTE_DSL_ARCH."""
    from cutlass.cute.runtime import make_fake_tensor
    from cutlass.runtime import make_fake_stream

    table = make_fake_tensor(Int64, (cute.sym_int32(),), (1,), assumed_align=128)
    grouped.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    scalars = [Int32(0)] * 3
    return cute.compile(grouped, table, *scalars, stream, options="--enable-tvm-ffi")


TYPES = {DType.FP16: Float16, DType.BF16: BFloat16}


def functions() -> Sequence[Function]:
    """A function for each tiling, input type and layout; a library for each tiling and type."""
    found = []
    for tiling in GROUPED:
        for dtype in INPUTS:
            for trans_a in (False, True):
                for trans_b in (False, True):
                    name = grouped_function(tiling, dtype, trans_a, trans_b)
                    grouped = Grouped(tiling, TYPES[dtype], trans_a, trans_b)
                    library = f"step9_grouped_{tiling.name}_{dtype.value}"
                    found.append(Function(name, "sm_90a", partial(compile_grouped, grouped, name), library))
    return found
