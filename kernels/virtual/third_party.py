"""What is known of third-party examples: receives a script's path, hands on its arguments and changes of its text.

Most scripts run as they are. A few are made smaller, because a thousand million loads of plain Python code would take
hours here. Others have a fault of their own: what the virtual GPU finds there is true, and the change that takes the
fault out shows it, as the script passes with it. Lines are those of the examples as they
were when the results were written; another version of a script is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Change:
    """On a line, `new` in the place of `old`; without `old`, a line of its own after it."""

    line: int
    new: str
    old: str = ""


@dataclass(frozen=True, slots=True)
class Flaw:
    """A fault of the script's own: the kind of finding, why it is true, and what takes it out."""

    kind: str
    why: str
    changes: tuple[Change, ...]


ARGUMENTS = {
    "fp16_gemm": ["--mnk", "512,512,256"],
    "hopper/kernel/dense_gemm/dense_gemm_persistent": [
        "--mnkl", "512,512,200,1", "--tile_shape_mn", "128,256", "--cluster_shape_mn", "2,1",
    ],
    "hopper/kernel/dense_gemm/dense_gemm": ["--mnkl", "256,256,128,1", "--cluster_shape_mn", "2,1"],
    "blackwell/kernel/dense_gemm": ["--mnkl", "512,512,200,1"],
}  # fmt: skip

SMALLER = {
    "tutorial/02_naive_gemm.py": tuple(Change(line, "128, 128", "1024, 1024") for line in (87, 88, 89)),
    "tutorial/03_gemm_tiled_smem.py": (Change(104, "128", "1024"),),
}

_CLUSTER_BARRIER = ("    prims.barrier_cluster_arrive()", "    prims.barrier_cluster_wait()")


def _after(line: int, *texts: str) -> tuple[Change, ...]:
    return (Change(line, "\n".join(texts)),)


FLAWS = {
    "reduction/cluster_tmem_reduce.py": Flaw(
        "exit",
        "Three faults. barrier.cluster.arrive.relaxed orders neither the stores before the peers' loads nor those "
        "loads before the exit; tcgen05.wait::st doesn't wait for tcgen05.cp, which only a commit reports; four "
        "warps store the same words in no order. Arrives that release, a commit with its wait, and rows of its own "
        "for each warp take them out.",
        (
            Change(275, "arrive()", "arrive_relaxed()"),
            Change(312, "arrive()", "arrive_relaxed()"),
            Change(
                184,
                "    done = cutlass.Array(cutlass.Int64, 1, space=cutlass.AddressSpace.smem, alignment=8)",
            ),
            Change(205, "row = warp_idx", "row = row_group"),
            Change(
                215,
                "    if tx == 0:\n        prims.mbarrier_init(done, 1)\n    prims.fence_mbarrier_init()",
            ),
            Change(244, "            prims.tcgen05_commit(done, group=prims.CTAGroup.CTA_1)"),
            Change(
                245,
                "while not prims.mbarrier_try_wait_parity(done, 0, time_limit=10_000_000):\n        pass",
                "prims.tcgen05_wait(prims.Tcgen05Wait.STORE)",
            ),
        ),
    ),
    "primitives/mapa.py": Flaw(
        "bounds",
        "A CTA reads the shared memory of another one, which may have exited: nothing keeps a CTA that has read "
        "its own neighbour's from leaving. A cluster barrier at the end takes it out.",
        _after(145, *_CLUSTER_BARRIER),
    ),
    "tma/tma_multicast.py": Flaw(
        "exit",
        "The second CTA learns of the multicast load only through barrier.cluster.arrive.relaxed, which orders no "
        "memory accesses. An arrive that releases takes it out.",
        (Change(208, "arrive()", "arrive_relaxed()"),),
    ),
    "tcgen05/2cta_mma_blockscale_m128.py": Flaw(
        "race",
        "tcgen05.cp of a pair copies scales of B in both CTAs from their own shared memory; its issuer waits for the "
        "load of its own CTA, and nobody for that of the other one. A wait for it before the relayed arrival takes "
        "it out.",
        _after(
            676,
            "            while not prims.mbarrier_try_wait_parity(sfb_smem_full_mbar_ptr.subview(stage), phase_local):",
            "                pass",
        ),
    ),
    "tcgen05/mcast_clusterMxN_1cta_mma.py": Flaw(
        "protocol",
        "The last multicast commit frees stages that no CTA will wait for: one that has its own product exits "
        "while commits of its peers are still on their way to it. A cluster barrier at the end takes it out.",
        _after(308, *_CLUSTER_BARRIER),
    ),
    "tcgen05/mcast_clusterMxN_2cta_mma.py": Flaw(
        "protocol",
        "As in the variant with one CTA: the last multicast commit may reach a CTA that has exited. A cluster "
        "barrier at the end takes it out.",
        _after(344, *_CLUSTER_BARRIER),
    ),
    "tma/tma_pipeline_single_warp.py": Flaw(
        "race",
        "Warp 0 issues the load into the stage that was read last as soon as it has read its own rows of it; "
        "nothing says that the other three warps have read theirs. A barrier after the reads takes it out.",
        _after(214, "        prims.barrier_cta_sync(0)"),
    ),
    "tutorial/06_softmax.py": Flaw(
        "race",
        "In kernel 4 the same word of shared memory holds the maximum and then warp 0's sum; warp 0 may write the "
        "sum before another warp has read the maximum (kernel 2 has a barrier there). A barrier takes it out.",
        _after(328, "    prims.barrier_cta_sync(0)"),
    ),
    "tutorial/gemm_M128_N128_Kany_TN_warpspec_multistage.py": Flaw(
        "race",
        "Every warp loads the address of tensor memory right after one warp has asked for the allocation that "
        "writes it; the barrier comes a few lines later. A barrier before the load takes it out.",
        _after(222, "    prims.barrier_cta_sync(0)"),
    ),
}


def arguments_of(path: Path) -> list[str]:
    """Arguments of a script: problems of a size that the virtual GPU computes in seconds."""
    return next((a for key, a in ARGUMENTS.items() if key in str(path)), [])


def smaller(path: Path) -> tuple[Change, ...]:
    """Changes that make a script's problem smaller."""
    return _of(path, SMALLER) or ()


def flaw_of(path: Path) -> Flaw | None:
    """The fault that a script is known to have."""
    return _of(path, FLAWS)


def _of(path: Path, table: Mapping[str, _T]) -> _T | None:
    return next((value for key, value in table.items() if path.as_posix().endswith(key)), None)


def changed(text: str, changes: tuple[Change, ...]) -> str:
    """The script with changes. Raises LookupError where a line doesn't hold what is to be replaced."""
    lines = text.splitlines()
    for change in sorted(changes, key=lambda c: -c.line):
        at = change.line - 1
        if at >= len(lines) or change.old not in lines[at]:
            raise LookupError(
                f"line {change.line} doesn't hold {change.old!r}: another version of the script"
            )
        if change.old:
            lines[at] = lines[at].replace(change.old, change.new)
        else:
            lines.insert(at + 1, change.new)
    return "\n".join(lines) + "\n"
