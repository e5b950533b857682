"""Order of tiles of the Step 9 family: receives a tile's number, hands on its place."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute


@cute.jit
def place(tile: Int32, tiles_m: Int32, tiles_n: Int32, raster: Int32) -> tuple[Int32, Int32, Int32]:
    """Place (m, n, product) of a tile: groups of `raster` rows of tiles, or of columns where it is negative.

    Inside a group, line by line across it, so that clusters that run together share blocks of both
    operands. A snake: every other group is walked backwards, and finds in L2 what the group before brought
    last.
    """
    layer = tile // (tiles_m * tiles_n)
    index = tile - layer * (tiles_m * tiles_n)
    outer, inner = tiles_m, tiles_n
    if raster < 0:
        outer, inner = tiles_n, tiles_m
    size = cutlass.max(raster, -raster)
    group = index // (size * inner)
    lines = cutlass.min(outer - group * size, size)
    within = index - group * size * inner
    along = within // lines
    across = group * size + within - along * lines
    if group % 2 == 1:
        along = inner - 1 - along
    m, n = across, along
    if raster < 0:
        m, n = along, across
    return m, n, layer
