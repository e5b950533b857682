"""Producer of Step 9: receives tensors and a ring of stages, hands on A and B of every k of every tile.

One thread runs `produce`. How operands lie in a stage stands here as well: the consumers multiply what this side
has laid out. Operands carry the kernel's names: x runs along p and y along q of D (with `swap`, x is B).

At the edge of an operand a tile is loaded in a box with as many rows as there are, for TMA takes longer to fill a row
with zeros than to fetch one. The rows of the stage that are left as they were belong to rows or columns of D that
nobody stores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import cuda
from cutlass.tensor_utils import LayoutEnum

from kernels.hopper.boxes import EVICT_FIRST
from kernels.hopper.epilogue import Terms
from kernels.hopper.marks import Mark, mark
from kernels.hopper.pipeline import FastTiles, PipelineState, wait_empty
from kernels.hopper.tilings import TILE_K

__all__ = ["EVICT_NORMAL", "SPAN", "Loads", "Operand", "load_box", "major_of", "produce", "staged_layout"]

EVICT_NORMAL = 0x1000_0000_0000_0000  # L2 policy: what applies where none is named
UNIT = 8  # rows of the widest swizzle, and from one height of box to the next
SPAN = 64  # elements of a row of the widest swizzle, 128 bytes
SWIZZLES = {
    64: cuda.TensorMapSwizzle.s128b,
    32: cuda.TensorMapSwizzle.s64b,
    16: cuda.TensorMapSwizzle.s32b,
}  # by elements of a row


def major_of(k_major: bool) -> LayoutEnum:
    """CuTe's name of the contiguous dimension of an operand (rows, k)."""
    return LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR


def staged_layout(k_major: bool, rows: int, dtype: Any, stages: int) -> cute.ComposedLayout:
    """Staged (rows, k, stages) layout in the widest swizzle that fits the contiguous dimension."""
    order = (0, 1, 2) if k_major else (1, 0, 2)
    return cute.tile_to_shape(_swizzled(k_major, rows, dtype), (rows, TILE_K, stages), order=order)


def _swizzled(k_major: bool, rows: int, dtype: Any) -> cute.ComposedLayout:
    kind = sm90.get_smem_layout_atom(major_of(k_major), dtype, TILE_K if k_major else rows)
    return warpgroup.make_smem_layout_atom(kind, dtype)


@dsl_user_op
def load_box(
    target: Int32, tensor_map: Int64, place: tuple[Int32, Int32, Int32], barrier: Int32, mask: Any = None,
    policy: Any = None, *, loc: Any = None, ip: Any = None,
) -> None:  # fmt: skip
    """Start one TMA load of a box; its bytes count at the barrier. `mask`: of every block that it names.

    `policy`: what L2 makes of the lines that are read.
    """
    operands = [target, tensor_map, *place, barrier]
    to, last, letters = "", "", "r,l,r,r,r,r"
    if mask is not None:
        last, letters = f", ${len(operands)}", f"{letters},h"
        to = ".multicast::cluster"
        operands.append(mask)
    if policy is not None:
        last, letters = f"{last}, ${len(operands)}", f"{letters},l"
        to = f"{to}.L2::cache_hint"
        operands.append(policy)
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in operands],
        f"cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes{to} "
        f"[$0], [$1, {{$2, $3, $4}}], [$5]{last};",
        f"{letters},~{{memory}}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dataclass(frozen=True)
class Loads:
    """TMA loads of an operand of which a tile has `tile_rows`, `sharing` blocks loading a slice each for all of them.

    Where rows lie along K a slice is one box, at the edge of an operand one of fewer rows. Where they lie across, it is
    as many boxes of `SPAN` rows as lie within the operand.
    """

    k_major: bool
    tile_rows: int
    sharing: int

    @property
    def rows(self) -> int:
        """Of a slice."""
        return self.tile_rows // self.sharing

    @property
    def unit(self) -> int:
        """Rows that are loaded together, at the least."""
        return UNIT if self.k_major else min(self.rows, SPAN)

    def within(self, extent: Int32, row: Int32) -> Int32:
        """Rows that are loaded of the slice at `row` of an operand of `extent` rows."""
        there = (extent - row + self.unit - 1) // self.unit * self.unit
        return cutlass.max(0, cutlass.min(there, self.rows))

    def within_tile(self, extent: Int32, tile: Int32) -> Int32:
        """The same of a tile, by all blocks that share it."""
        row = tile * self.tile_rows
        return sum((self.within(extent, row + i * self.rows) for i in range(self.sharing)), Int32(0))

    def maps(self, tensor: cute.Tensor) -> tuple[cuda.TensorMap, cuda.TensorMap]:
        """Tensor maps of an operand (rows, k, layer): of whole slices, and of what is left of one at the edge."""
        if not self.k_major:
            whole = self._map(tensor, self.unit)
            return whole, whole
        left = self.within(tensor.shape[0] % self.rows, Int32(0))
        return self._map(tensor, self.rows), self._map(tensor, cutlass.max(left, UNIT))

    def _map(self, tensor: cute.Tensor, rows: Any) -> cuda.TensorMap:
        inner, outer = (1, 0) if self.k_major else (0, 1)
        span = TILE_K if self.k_major else self.unit
        made = cuda.create_tensor_map_tiled(
            global_address=tensor.iterator.toint(),
            dtype=tensor.element_type,
            global_dims=[tensor.shape[inner], tensor.shape[outer], tensor.shape[2]],
            global_strides=[tensor.stride[outer] // 8, tensor.stride[2] // 8],
            box_dims=[span, rows if self.k_major else TILE_K, 1],
            swizzle=SWIZZLES[span],
            l2_promotion=cuda.TensorMapL2Promotion.l2_128b,
        )
        # To the kernel's compiler the box is a constant, which it uses for nothing.
        return replace(made, box_dims=(span, TILE_K, 1))


@dataclass(frozen=True)
class Operand:
    """What a block reads tiles of: its maps, whole and edge, its place in stage 0, its rows and layers."""

    loads: Loads
    maps: tuple[Any, Any]
    ring: Int32
    extent: Int32
    layers: Int32

    def policy(self, tiles: FastTiles, rows: int) -> Any:
        """Of L2: what one tile alone reads may leave first. `rows`: of a tile of the whole cluster.

        None is named where blocks share the operand: on an H200 it gained nothing there.
        """
        if self.loads.sharing > 1:
            return None
        once = tiles.total == cute.ceil_div(self.extent, rows) * self.layers
        return cutlass.select_(once, Int64(EVICT_FIRST), Int64(EVICT_NORMAL))

    def slice(self, tile: Int32, rank: Int32, layer: Int32, mask: Any, policy: Any) -> _Slice:
        """What block `rank` of those that share `tile` loads of it; an operand of one layer has it in all."""
        loads = self.loads
        row = (tile * loads.sharing + rank) * loads.rows
        loaded = loads.within(self.extent, row)
        whole, edge = (each.get_ptr().toint() for each in self.maps)
        chosen = cutlass.select_(loaded == loads.rows, whole, edge)
        place = self.ring + rank * (loads.rows * TILE_K * 2)
        return _Slice(loads, chosen, place, row, loaded, cutlass.min(layer, self.layers - 1), mask, policy)


@dataclass(frozen=True)
class _Slice:
    """What a block loads of an operand: `loaded` rows from `row` on, of a layer.

    `map`: address of its tensor map; `ring`: where it lies in stage 0; `mask`: the blocks that share it.
    """

    loads: Loads
    map: Int64
    ring: Int32
    row: Int32
    loaded: Int32
    layer: Int32
    mask: Any
    policy: Any


@cute.jit
def produce(
    t: cutlass.Constexpr,
    x: cutlass.Constexpr,
    y: cutlass.Constexpr,
    full: cute.Pointer,
    empty: cute.Pointer,
    tiles: FastTiles,
    first: Int32,
    step: Int32,
    k_first: Int32,
    k_tiles: Int32,
    rank_p: Int32,
    rank_q: Int32,
    part: Int32,
    clock: cutlass.Constexpr,
    terms: Terms,
) -> None:
    """Fill the ring: A and B of every k of every tile of this block. `clock` notes the handoffs (marks.py)."""
    # Of each tile that blocks share, every block loads its own slice, to the same place in all of them.
    x_mask, y_mask = None, None
    if cutlass.const_expr(t.cluster_q > 1):  # blocks of the same p: ranks rank_p + i·cluster_p
        x_mask = Int16(sum(1 << i * t.cluster_p for i in range(t.cluster_q)) << (part * t.sharing + rank_p))
    if cutlass.const_expr(t.cluster_p > 1):  # blocks of the same q: cluster_p consecutive ranks
        y_mask = Int16(((1 << t.cluster_p) - 1) << (part * t.sharing + rank_q * t.cluster_p))
    x_policy, y_policy = x.policy(tiles, t.p * t.cluster_p), y.policy(tiles, t.q * t.cluster_q)
    state = PipelineState.producer(t.stages)
    work = first
    while work < tiles.total:
        tile_p, tile_q, layer = tiles.at(work)
        x_tile, y_tile = tile_p * t.cluster_p + rank_p, tile_q * t.cluster_q + rank_q
        x_slice = x.slice(x_tile, rank_q, layer, x_mask, x_policy)
        y_slice = y.slice(y_tile, rank_p, layer, y_mask, y_policy)
        rows = x.loads.within_tile(terms.p, x_tile) + y.loads.within_tile(terms.q, y_tile)
        for k in cutlass.range(k_tiles, unroll=1):
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_WAITS, k)
            wait_empty(empty + state.stage, state.phase, t.sharing > 1)
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_MAY, k)
            cute.arch.mbarrier_arrive_and_expect_tx(full + state.stage, rows * (TILE_K * 2))
            barrier = full.toint().to(Int32) + state.stage * 8
            _load(x_slice, (k_first + k) * TILE_K, state.stage, barrier)
            _load(y_slice, (k_first + k) * TILE_K, state.stage, barrier)
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_ASKED, k)
            state.advance()
        work = work + step
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def _load(of: cutlass.Constexpr, k: Int32, stage: Int32, barrier: Int32) -> None:
    """Ask for what a block loads of an operand, where there is any of it."""
    loads = of.loads
    target = of.ring + stage * (loads.tile_rows * TILE_K * 2)
    if cutlass.const_expr(loads.k_major):
        if of.loaded > 0:
            load_box(target, of.map, (k, of.row, of.layer), barrier, of.mask, of.policy)
    else:
        for first in cutlass.range_constexpr(0, loads.rows, loads.unit):
            if first < of.loaded:
                place = (of.row + first, k, of.layer)
                load_box(target + first * (TILE_K * 2), of.map, place, barrier, of.mask, of.policy)
