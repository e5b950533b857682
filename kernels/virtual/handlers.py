"""Every translation in one table: receives nothing, hands on `HANDLERS` by opcode."""

from __future__ import annotations

from kernels.virtual import copy_effects, effects, moves, tensor_effects  # noqa: F401 (they add theirs to the table)
from kernels.virtual.alu import HANDLERS

__all__ = ["HANDLERS"]
