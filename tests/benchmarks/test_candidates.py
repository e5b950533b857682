"""What is raced beside the selector's choice, and how it is told."""

from __future__ import annotations

from typing import Any

from benchmarks import candidates, suite
from kernels.device import H200
from kernels.hopper import variants
from kernels.problem import DType, Problem
from kernels.selector import choose


def problem(m: int, n: int, k: int, layout: str = "nn") -> Problem:
    return suite.problem_of((1, m, n, k), DType.FP16, layout)


def test_the_choice_comes_first_and_every_candidate_has_a_shape_to_win() -> None:
    raced = set()
    for shape in candidates.SHAPES:
        given = problem(*shape)
        found = list(candidates.entries(given, H200))
        names = [entry.name for entry in found]
        assert names[0] == choose(given, H200, variants=variants.variants()).variant
        assert len(names) == len(set(names))
        raced |= {entry.variant.tiling for entry in found}
    assert {each.tiling for each in variants.candidates()} <= raced


def test_large_products_are_tried_on_every_sm() -> None:
    found = {entry.name: entry for entry in candidates.entries(problem(4096, 4096, 4096), H200)}
    chosen = next(iter(found))
    assert found[f"{chosen} on every SM"].blocks == 132
    assert not any("every SM" in entry.name for entry in candidates.entries(problem(64, 8192, 8192), H200))


def row(entry: str, timing: str, seconds: float, ratio: float) -> dict[str, Any]:
    return {
        "problem": {"m": 4, "n": 8, "k": 16, "dtype": "fp16"},
        "entry": entry,
        "timing": timing,
        "seconds": {"median": seconds},
        "reference": "cuBLASLt",
        "ratio": ratio,
        "sm_clock_mhz": [1400, 1500],
    }


def test_table_has_the_fastest_first_and_marks_the_choice() -> None:
    rows = [row("step9-64x64", t, 2e-6, 0.8) for t in ("burst", "sustained")]
    rows += [row("step9-64x64-halfsm", t, 1e-6, 1.0) for t in ("burst", "sustained")]
    lines = candidates.table(rows).splitlines()
    assert lines[1] == "4×8×16 fp16, cuBLASLt is the faster reference"
    assert lines[2].split() == ["64x64-halfsm", "1.0", "1500", "1.000", "1.000", "1.250"]
    assert lines[3].split() == ["*", "64x64", "2.0", "1500", "0.800", "0.800", "1.000"]


def test_what_runs_alone_is_told_as_a_share_of_the_tensor_cores() -> None:
    rows = [{"variant": "step9-128x256", "cycles_a_block": 1280.0, "tensor_cycles": 1024.0}]
    assert candidates.alone_table(rows).splitlines()[1].split() == ["128x256", "1280", "1024", "80.0%"]
