"""The ladder: receives an architecture, hands on its steps in order, each with its one idea and its reach.

Imports neither torch nor the compiler. Steps 1 to 8 teach; the Step 9 family is the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernels.libraries import Libraries
from kernels.problem import DType, Problem

TILE_MN = 128  # of Steps 1 and 2, which compute one tile
TILE_K = 64


@dataclass(frozen=True, slots=True)
class Step:
    """One rung. `name` is its module and the stem of its functions; `idea` says in one line what it adds."""

    number: int
    name: str
    idea: str

    def module(self, arch: str) -> str:
        """Where it is written for an architecture."""
        return f"kernels.{FOLDER[arch]}.{self.name}"

    def function(self, dtype: DType) -> str:
        """Name of its compiled function for a dtype (Steps 1 to 8)."""
        return f"{self.name}_{dtype.value}"

    @property
    def timed(self) -> bool:
        """Whether it computes any size, so that it is timed at the ladder's 4096³."""
        return self.number >= 3

    def unsupported(self, problem: Problem) -> str | None:
        """None where Steps 1 to 8 take the problem, else why not (reads on from "because")."""
        m, n, k = problem.m, problem.n, problem.k
        a, b, _, d = problem.leading
        tail = problem.epilogue
        reasons = [
            (self.number > 8, "the Step 9 family is called through kernels.gemm"),
            (min(m, n, k) < 1, "there must be something to compute"),
            (problem.dtype not in {DType.FP16, DType.BF16}, f"its inputs are 16-bit, not {problem.dtype}"),
            (problem.out_dtype is not problem.dtype, "its output has the type of its inputs"),
            (problem.batch != 1, "it computes one product"),
            (problem.trans_a or not problem.trans_b, "A and B must be stored along K, as [M, K] and [N, K]"),
            (tail.reads_c or tail.bias is not None, "it has no epilogue"),
            (tail.alpha != 1.0 or tail.activation != "none", "it has no epilogue"),
            (self.number < 3 and max(m, n) > TILE_MN, f"it computes one tile of {TILE_MN}×{TILE_MN}"),
            (self.number < 2 and k > TILE_K, f"it takes K up to {TILE_K}"),
            (self.number == 3 and -(-n // TILE_MN) > 65_535, "a grid has at most 65,535 rows"),
            (self.number < 4 and max(m * a, n * b, m * d) >= 2**31, "its offsets are 32-bit"),
            (self.number >= 4 and any(x % 8 for x in (a, b, d)), "TMA needs rows in multiples of 16 bytes"),
            (self.number >= 4 and problem.aligned < 16, "TMA needs operands that start at 16 bytes"),
        ]
        return next((why for applies, why in reasons if applies), None)


FOLDER = {"sm_90a": "hopper", "sm_100a": "blackwell"}

HOPPER = (
    Step(1, "step1_tile", "one 128×128 tile by wgmma, operands copied to shared memory by the threads"),
    Step(2, "step2_k_loop", "a loop over K; the accumulator stays in registers"),
    Step(3, "step3_tile_grid", "a CTA for each tile of D; edges masked"),
    Step(4, "step4_tma", "TMA loads and stores: one thread asks, an mbarrier counts bytes"),
    Step(5, "step5_pipeline", "a ring of six stages: loads run ahead of the tensor core"),
    Step(
        6, "step6_persistent", "one CTA an SM walks over tiles, in bands that L2 holds; the ring never drains"
    ),
    Step(
        7, "step7_warp_specialized", "a producer warpgroup loads, a consumer warpgroup multiplies and stores"
    ),
    Step(8, "step8_cluster", "two CTAs share each block of B by multicast"),
    Step(
        9, "step9_multi_consumer", "two consumers share a staged B on 128×256; registers move between roles"
    ),
)

BLACKWELL = (
    Step(1, "step1_tile", "one 128×128 tile by tcgen05.mma into TMEM, operands copied by the threads"),
    Step(2, "step2_k_loop", "a loop over K; the accumulator stays in TMEM"),
    Step(3, "step3_tile_grid", "a CTA for each tile of D; edges masked"),
    Step(4, "step4_tma", "TMA loads and stores: one thread asks, an mbarrier counts bytes"),
    Step(5, "step5_pipeline", "a ring of stages: loads run ahead of the tensor core"),
    Step(6, "step6_persistent", "one CTA an SM walks over tiles, in bands that L2 holds"),
    Step(7, "step7_warp_specialized", "a TMA warp, an MMA warp and a writeback warpgroup; two rings"),
    Step(8, "step8_cluster", "two CTAs make one MMA of 256×256; a leader issues, commits reach both"),
    Step(9, "step9_multi_consumer", "512×256 a cluster: two MMA warps share a staged B"),
)

LADDER = {"sm_90a": HOPPER, "sm_100a": BLACKWELL}


def step(arch: str, number: int) -> Step:
    """A step by its number."""
    return LADDER[arch][number - 1]


def load(libraries: Libraries, rung: Step, dtype: DType) -> Callable[[Any, Any, Any, int], Any]:
    """The launcher of a step 1 to 8: function(a, b, d, ctas) on the caller's current stream.

    a [M, K], b [N, K] and d [M, N] are tensors of `dtype` on the device, rows contiguous; ctas: how many CTAs
    the device holds at once, which bounds the grid from Step 6 on.
    """
    return libraries.load(rung.function(dtype))
