"""Two functions of Hopper's grouped kernel, one of each tiling and layout that the service meets most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernels.hopper import grouped
from kernels.targets import Function

NAMES = ("step9_grouped_128x128_fp16_nn", "step9_grouped_64x64_bf16_nt")


def functions() -> Sequence[Function]:
    """Those of NAMES, in one library."""
    return [replace(f, library="grouped_sample") for f in grouped.functions() if f.name in NAMES]
