"""Candidates for the Step 9 family: receives tilings that no GPU has timed yet, hands on functions to compile."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.hopper.step9_multi_consumer import functions_of
from kernels.hopper.tilings import CANDIDATES
from kernels.targets import Function


def functions() -> Sequence[Function]:
    """Theirs, a library for each tiling and input type."""
    return functions_of(CANDIDATES)
