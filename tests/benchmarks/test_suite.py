"""The shape suite's tables: made from results alone, as the README shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import suite
from kernels.device import H200
from kernels.hopper.variants import variants
from kernels.operands import as_packed
from kernels.problem import DType
from kernels.selector import choose


def row(m: int, timing: str, ratio: float, invariant: bool = False, batch: int = 1) -> dict[str, Any]:
    return {
        "problem": {"m": m, "n": 8, "k": 16, "batch": batch, "dtype": "fp16"},
        "batch_invariant": invariant,
        "variant": "step9-64x64",
        "timing": timing,
        "ratio": ratio,
        "seconds": {"min": 1e-6, "median": 2e-6, "max": 3e-6},
        "tflops": 1.0,
        "bytes_per_second": 1e12,
        "sm_clock_mhz": [1980],
    }


def test_every_shape_has_a_choice_on_an_h200_in_every_layout() -> None:
    for dtype in (DType.FP16, DType.BF16):
        for layout in ("nn", "nt", "tn", "tt"):
            for shape in suite.SHAPES:
                problem = suite.problem_of(shape, dtype, layout)
                assert problem.trans_a == (layout[0] == "t")
                choose(as_packed(problem), H200, variants=variants())


def test_markdown_leaves_out_the_invariant_rows_and_ends_with_means() -> None:
    rows = [row(4, t, r, i) for t, r in (("burst", 2.0), ("sustained", 0.5)) for i in (False, True)]
    rows += [row(5, "burst", 0.5, batch=3), row(5, "sustained", 2.0, batch=3)]
    lines = suite.markdown([{"rows": rows}]).splitlines()
    assert lines[2:] == [
        "| 4×8×16 | 64x64 | 2.0 | 0.500 | 2.000 |",
        "| 3 × 5×8×16 | 64x64 | 2.0 | 2.000 | 0.500 |",
        "| geometric mean |  |  | 1.000 | 1.000 |",
    ]


def test_table_states_means_for_both_timings() -> None:
    rows = [row(4, t, r, i) for t, r in (("burst", 2.0), ("sustained", 0.5)) for i in (False, True)]
    text = suite.table(rows)
    assert "geometric mean, burst, batch_invariant=False: 2.0000, least 2.000" in text
    assert "geometric mean, sustained, batch_invariant=True: 0.5000, least 0.500" in text


def test_selector_table_tells_how_far_the_choice_was_from_the_best() -> None:
    fast, slow = row(4, "short", 1.0), row(4, "short", 1.0) | {"variant": "step9-128x64"}
    slow["seconds"] = {"min": 4e-6, "median": 4e-6, "max": 4e-6}
    text = suite.selector_table([fast, slow], [slow])
    assert "step9-128x64 (2.000 × the best); 64x64 2.0, 128x64 4.0" in text
    assert text.endswith("geometric mean: 2.0000")


def test_readme_holds_what_the_results_say() -> None:
    text = suite.README.read_text()
    assert suite.BEGIN in text
    assert suite.readme(text, suite.RESULTS) == text, "run python -m benchmarks.suite --readme"


def test_readme_without_results_has_no_figures(tmp_path: Path) -> None:
    full, empty = (
        f"a\n{suite.BEGIN}{row}<!-- end -->\nb\n{suite.BEGIN_ROWS}{row}<!-- end -->\nc\n"
        for row in ("| 1 |\n", "")
    )
    assert suite.readme(full, tmp_path) == empty
