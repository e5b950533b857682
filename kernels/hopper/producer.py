"""Producer of Step 9: receives tensors and a ring of stages, hands on A and B of every k of every tile.

One warp runs `produce`. How operands lie in a stage stands here as well: the consumers multiply what this side
has laid out. Operands carry the kernel's names: x runs along p and y along q of D (with `swap`, x is B).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from kernels.hopper.epilogue import Terms
from kernels.hopper.marks import Mark, mark
from kernels.hopper.pipeline import FastTiles, PipelineState, wait_empty
from kernels.hopper.tilings import TILE_K

__all__ = ["load_atom", "major_of", "produce", "staged_layout"]


def major_of(k_major: bool) -> LayoutEnum:
    """CuTe's name of the contiguous dimension of an operand (rows, k)."""
    return LayoutEnum.ROW_MAJOR if k_major else LayoutEnum.COL_MAJOR


def staged_layout(k_major: bool, rows: int, dtype: Any, stages: int) -> cute.ComposedLayout:
    """Staged (rows, k, stages) layout in the widest swizzle that fits the contiguous dimension."""
    kind = sm90.get_smem_layout_atom(major_of(k_major), dtype, TILE_K if k_major else rows)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, TILE_K, stages), order=(0, 1, 2) if k_major else (1, 0, 2))


def load_atom(tensor: cute.Tensor, k_major: bool, rows: int, multicast: bool) -> Any:
    """TMA load of rows × TILE_K of an operand, to one block or several."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
    stage = cute.slice_(staged_layout(k_major, rows, tensor.element_type, 1), (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, stage, (rows, TILE_K))


@cute.jit
def produce(
    t: cutlass.Constexpr,
    x_k_major: cutlass.Constexpr,
    y_k_major: cutlass.Constexpr,
    tma_x: cute.CopyAtom,
    gx: cute.Tensor,
    tma_y: cute.CopyAtom,
    gy: cute.Tensor,
    sx: cute.Tensor,
    sy: cute.Tensor,
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
    xs, xg = _slices(tma_x, gx, sx, x_k_major, t.p, t.cluster_q, t.stages)
    ys, yg = _slices(tma_y, gy, sy, y_k_major, t.q, t.cluster_p, t.stages)
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
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_WAITS, k)
            wait_empty(empty + state.stage, state.phase, t.sharing > 1)
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_MAY, k)
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
            mark(clock, terms, work, k_tiles, 0, Mark.LOAD_ASKED, k)
            state.advance()
        work = work + step
    cute.arch.griddepcontrol_launch_dependents()


def _slices(
    atom: Any,
    tensor: cute.Tensor,
    stages_of: cute.Tensor,
    k_major: bool,
    rows: int,
    sharing: int,
    stages: int,
) -> Any:
    """Slices of rows/sharing rows: staged (element, stage · sharing), in memory (element, row, k, layer)."""
    part = rows // sharing
    layout = staged_layout(k_major, part, stages_of.element_type, stages * sharing)
    sliced = cute.make_tensor(stages_of.iterator, layout.outer)
    tiles = cute.local_tile(tensor, (part, TILE_K), (None, None, None))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sliced, 0, 2), cute.group_modes(tiles, 0, 2)
    )
