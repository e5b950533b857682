"""Step 9 with delays: receives what Step 9 receives and a seed, hands on the same product by another timing.

The roles are Step 9's, with a clock that sleeps: at about every fourth handoff of a warp for up to a microsecond,
by a hash of the seed, the warp and the place. If the bits of D depend on that, a barrier is missing. The seed is
passed as the address of the bias, which `code` says isn't there. Not part of the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cutlass
from cutlass import Float16, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from kernels.hopper.epilogue import Terms
from kernels.hopper.marks import Mark, nothing
from kernels.hopper.step9_multi_consumer import Gemm, compile_gemm
from kernels.hopper.tilings import FAMILY, Member
from kernels.problem import DType
from kernels.targets import Function

PLACES = (Mark.LOAD_WAITS, Mark.LOAD_MAY, Mark.MMA_WAITS, Mark.MMA_DONE, Mark.LAST_DONE, Mark.WRITTEN)
TILINGS = ("128x256-2x1", "128x128-2x1-pingpong", "128x128-split2", "64x64-split4", "64x16-halfsm-swap")


@dsl_user_op
def _sleep(nanoseconds: Int32, *, loc: Any = None, ip: Any = None) -> None:
    llvm.inline_asm(
        None,
        [nanoseconds.ir_value(loc=loc, ip=ip)],
        "nanosleep.u32 $0;",
        "r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dataclass(frozen=True)
class Sleeper:
    """Delays each role where it meets another."""

    @cute.jit
    def mark(
        self,
        terms: Terms,
        work: Int32,
        k_tiles: Int32,
        consumer: Any,
        mark: cutlass.Constexpr,
        k: Any = 0,
    ) -> None:
        """Sleep, or not."""
        if cutlass.const_expr(mark in PLACES):
            thread, _, _ = cute.arch.thread_idx()
            block, _, _ = cute.arch.block_idx()
            place = (Int32(k) * 64 + int(mark)) * 61 + work * 12_289 + (thread // 32) * 3_079 + block * 769
            mixed = (terms.bias.to(Int32) * 40_503 + place) * 1_640_531_527
            mixed = mixed ^ (mixed >> 15)
            mixed = mixed * 1_181_783_497
            if (mixed >> 24) & 3 == 0:
                _sleep((mixed >> 12) & 1023)

    watch = staticmethod(nothing)


class Stressed(Gemm):
    """Gemm whose roles come late. Takes no bias."""

    clock: ClassVar[Any] = Sleeper()


def members() -> Iterator[tuple[Member, str]]:
    """The tilings that are put under stress, one of each way to share a tile, and how they store."""
    for member in FAMILY:
        if member.tiling.name in TILINGS:
            yield member, "fp16" if member.same else "plain"


def function_name(member: Member, store: str) -> str:
    """Such as "stress_step9_128x256_2x1_fp16_fp16_nt"."""
    return "stress_" + member.function(DType.FP16, store, False, True)


def functions() -> Sequence[Function]:
    """One function a tiling: fp16, rows of A and columns of B along K."""
    found = []
    for member, store in members():
        gemm = Stressed(member.tiling, Float16, Float16 if store == "fp16" else None, False, True)
        name = function_name(member, store)
        found.append(Function(name, "sm_90a", partial(compile_gemm, gemm, name), "stress_step9"))
    return found
