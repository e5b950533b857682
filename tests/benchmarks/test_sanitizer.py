"""Outcomes of compute-sanitizer: made from what the tool and the child print in turn; and the run on a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import sanitizer

PRINTED = """========= COMPUTE-SANITIZER
@begin step1_tile
@end step1_tile 0
@begin step2_k_loop
========= Invalid __global__ write of size 2 bytes
=========     at hopper_step2+0x150
@end step2_k_loop 0
@begin step3_tile_grid
@end step3_tile_grid 7
@begin step4_tma
========= Program hit unspecified launch failure
========= ERROR SUMMARY: 2 errors
"""


def test_each_subject_gets_what_was_printed_while_it_ran() -> None:
    names = ["step1_tile", "step2_k_loop", "step3_tile_grid", "step4_tma", "step5_pipeline"]
    rows = sanitizer.parse("memcheck", PRINTED, names)
    assert [row["outcome"] for row in rows] == ["clean", "reported", "wrong", "reported", "not run"]
    assert rows[1]["detail"] == "Invalid __global__ write of size 2 bytes | at hopper_step2+0x150"
    assert rows[2]["detail"] == "7 elements"


def test_nothing_printed_is_not_clean() -> None:
    assert sanitizer.parse("synccheck", "", ["step1_tile"])[0]["outcome"] == "not run"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memcheck_and_synccheck_are_clean_on_this_gpu(tmp_path: Path) -> None:
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not installed")
    pytest.importorskip("torch")
    assert sanitizer.main(["--tools", "memcheck,synccheck", "--out", str(tmp_path)]) == 0
