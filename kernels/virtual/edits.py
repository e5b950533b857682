"""Mistakes made in the source: receives a step, hands on the PTX of the step with one mistake in it.

Each is one that people make when they write such a kernel. A copy of the package is edited and compiled; the PTX is
kept beside the built kernels, so that a computer without the compiler can run it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.libraries import Libraries, default_root

PACKAGE = Path(__file__).resolve().parents[1]
_STEP7, _STEP8 = "blackwell/step7_warp_specialized.py", "blackwell/step8_cluster.py"
_STEP9, _WRITEBACK = "blackwell/step9_multi_consumer.py", "blackwell/writeback.py"
_MEET = (
    '    prims.tcgen05_fence("before_thread_sync")\n    prims.barrier_cluster_arrive()\n'
    '    prims.barrier_cluster_wait()\n    prims.tcgen05_fence("after_thread_sync")\n'
)
_MEET9 = _MEET.replace("    prims", "        prims")
_FREE = '    if warp == 0:\n        prims.tcgen05_dealloc(accumulator, MMA_N, group="cta_2")\n'
_FREE9 = (
    "        if warp == 0:\n"
    '            prims.tcgen05_dealloc(prims.make_tmem_ptr(tmem, Float32), TMEM_COLUMNS, group="cta_2")\n'
)
_SYNC = "                prims.barrier_cta_sync(EPI_BARRIER, thread_count=WARPGROUP)\n\n"
_SYNC_ALL = "                prims.barrier_cta_sync(0)\n\n"
_SYNC9 = (
    "        prims.barrier_cta_sync(EPI_BARRIER + self.consumer, thread_count=WARPGROUP)\n"
    "        if self.quarter"
)
_SYNC9_ALL = "        prims.barrier_cta_sync(0)\n        if self.quarter"
_COMMIT = '                prims.tcgen05_commit(read, multicast_mask=0b11, group="cta_2")\n'
_ONE = "                if c == 0:\n"
_READY = (
    '            prims.tcgen05_commit(mma2ld.subview(drained.stage), multicast_mask=0b11, group="cta_2")\n'
)


@dataclass(frozen=True, slots=True)
class Edit:
    """A mistake: what it is called, and what becomes of which text of which file (each occurs once there)."""

    step: int
    kind: str
    changes: tuple[tuple[str, str, str], ...]  # file, text as it is, text as it becomes


EDITS = (
    Edit(7, "a CTA-wide barrier in a role", ((_STEP7, _SYNC, _SYNC_ALL),)),
    Edit(
        8, "MMAs issued by both CTAs", ((_STEP8, "warp == MMA_WARP and rank == LEADER", "warp == MMA_WARP"),)
    ),
    Edit(
        8,
        "ld2mma for 128 threads",
        ((_STEP8, "init(ld2mma, 1, CTA_GROUP * WARPGROUP)", "init(ld2mma, 1, WARPGROUP)"),),
    ),
    Edit(8, "expect_tx without × CTA_GROUP", ((_STEP8, "STAGE_BYTES * CTA_GROUP", "STAGE_BYTES"),)),
    Edit(8, "dealloc before the cluster's barrier", ((_STEP8, _MEET + _FREE, _FREE + _MEET),)),
    Edit(8, "a CTA-wide barrier in a role", ((_STEP8, _SYNC, _SYNC_ALL),)),
    Edit(
        9,
        "MMAs issued by both CTAs",
        ((_STEP9, "helper < tiling.consumers and self.rank == LEADER", "helper < tiling.consumers"),),
    ),
    Edit(
        9,
        "one MMA warp commits mma2tma for both",
        (
            (
                _WRITEBACK,
                "init(self.mma2tma, tiling.depth, tiling.consumers)",
                "init(self.mma2tma, tiling.depth, 1)",
            ),
            (_STEP9, _COMMIT, _ONE + "    " + _COMMIT),
        ),
    ),
    Edit(
        9,
        "one MMA warp commits mma2ld for both",
        (
            (
                _STEP9,
                _READY,
                "            if c == 0:\n                for i in cutlass.range_constexpr(tiling.consumers):\n        "
                + _READY.replace("drained.stage", "i"),
            ),
        ),
    ),
    Edit(
        9,
        "ld2mma for 128 threads",
        (
            (
                _WRITEBACK,
                "init(self.ld2mma, both, CTA_GROUP * WARPGROUP)",
                "init(self.ld2mma, both, WARPGROUP)",
            ),
        ),
    ),
    Edit(
        9,
        "expect_tx without × CTA_GROUP",
        (
            (
                _STEP9,
                "for half in cutlass.range_constexpr(CTA_GROUP)",
                "for half in cutlass.range_constexpr(1)",
            ),
        ),
    ),
    Edit(9, "dealloc before the cluster's barrier", ((_STEP9, _MEET9 + _FREE9, _FREE9 + _MEET9),)),
    Edit(9, "a CTA-wide barrier in a role", ((_WRITEBACK, _SYNC9, _SYNC9_ALL),)),
)


def edited(step: int, function: str, arch: str, root: Path | None = None) -> Iterator[tuple[Edit, str]]:
    """Each mistake in a step, with the PTX of its function."""
    for edit in EDITS:
        if edit.step == step:
            yield edit, compiled(edit, function, arch, root)


def compiled(edit: Edit, function: str, arch: str, root: Path | None = None) -> str:
    """PTX of a function with a mistake; compiled unless it is there."""
    root = root or default_root()
    libraries = Libraries(arch, root)
    built = libraries.path(function, "ptx").parent.name  # names the sources that it came from
    key = hashlib.sha256(f"{built} {function} {edit}".encode()).hexdigest()[:16]
    path = root / "mutants" / f"{function}-{key}.ptx"
    if not path.is_file():
        text = _compile(edit, function, arch, libraries.info(function).module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path.read_text()


def _compile(edit: Edit, function: str, arch: str, module: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        for name, was, becomes in edit.changes:
            path = copy / PACKAGE.name / name
            text = path.read_text()
            if text.count(was) != 1:
                raise LookupError(f"{name} holds {text.count(was)} times what '{edit.kind}' changes")
            path.write_text(text.replace(was, becomes))
        root = str(copy / "built")
        program = f"build({arch!r}, only={function!r}, modules=[{module!r}], root=Path({root!r}))"
        program = f"from pathlib import Path; from kernels.build import build; {program}"
        subprocess.run(
            [sys.executable, "-c", program], cwd=copy, check=True, capture_output=True,
            env=os.environ | {"PYTHONPATH": folder},
        )  # fmt: skip
        return Libraries(arch, copy / "built").path(function, "ptx").read_text()
