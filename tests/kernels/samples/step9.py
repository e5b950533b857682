"""Some functions of Hopper's Step 9: one of each way to share a tile, others of other types and layouts.

A whole family takes minutes to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernels.hopper import candidates, step9_multi_consumer
from kernels.targets import Function

NAMES = (
    "step9_128x256_2x1_fp16_fp16_nn",
    "step9_128x128_2x1_pingpong_fp16_fp16_nn",
    "step9_64x64_split4_fp16_plain_nn",
    "step9_64x16_halfsm_swap_fp16_plain_nn",
    "step9_128x128_split2_fp16_fp16_nn",
    "step9_128x80_1x2_swap_fp16_plain_nn",
    "step9_128x256_2x1_lag1_fp16_fp16_nn",
)
OTHERS = (
    "step9_128x256_2x1_fp16_fp32_tn",
    "step9_128x256_2x1_bf16_bf16_nt",
    "step9_128x256_fp16_fp16_nt",
    "step9_64x64_fp16_plain_nn",
    "step9_64x64_fp16_plain_nt",
    "step9_64x64_fp16_plain_tn",
)


def functions() -> Sequence[Function]:
    """Those of NAMES and OTHERS, in one library."""
    found = (*step9_multi_consumer.functions(), *candidates.functions())
    return [replace(f, library="step9_sample") for f in found if f.name in NAMES + OTHERS]
