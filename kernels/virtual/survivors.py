"""Why a mutant lives: receives a mutant, hands on the argument that nothing depends on what it changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.virtual.mutants import Mutant

#: Step, kind of change, the instruction as it was → why the kernel stays right.
_REASONS = (
    (
        7,
        "named barrier left out",
        "barrier.sync 0;",
        "The CTA-wide barrier before dealloc. Warp 0, which frees, is one of the four that write back: their last "
        "named barrier orders the reads of all four before it, and mma2ld the MMAs. Step 8 needs the barrier of "
        "the cluster in this place, so Step 7 keeps its own.",
    ),
)


def why(step: int, mutant: Mutant) -> str:
    """The argument, or that there is none."""
    for number, kind, place, reason in _REASONS:
        if number == step and kind == mutant.kind and " ".join(mutant.was.split()) == place:
            return reason
    return "not explained"
