"""The comparison of virtual GPU and hardware: what it lets pass, and what not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.twin import Twin, compare, digest, twins
from kernels.elementwise import Array
from kernels.problem import DType, Problem
from kernels.virtual.subject import Case, Operands

TWIN = Twin(
    Case(4, "step4_tma_fp16", Problem(24, 16, 40, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)), True
)


def exact(case: Case, given: Operands) -> Array:
    """The product, rounded once."""
    return (given.a.astype(np.float64) @ given.b.astype(np.float64).T).astype(np.float16)


def told(twin: Twin) -> tuple[dict[str, Any], bytes]:
    """A row of the virtual GPU, as if it computed that."""
    row: dict[str, Any] = {"name": twin.name}
    for name, whole in (("whole", True), ("normal", False)):
        given = twin.inputs(whole)
        out = exact(twin.case, given)
        row[name] = {"inputs": digest(given.a, given.b), "output": digest(out)}
    return row, out.tobytes()


def test_the_same_passes() -> None:
    row = compare(TWIN, *told(TWIN), exact)
    assert row["outcome"] == "pass"
    assert row["share"] == 0.0


@pytest.mark.parametrize(
    ("whole", "ulps", "outcome"), [(True, 1, "fail"), (False, 1, "pass"), (False, 3, "fail")]
)
def test_whole_numbers_must_be_equal_and_normal_ones_near(whole: bool, ulps: int, outcome: str) -> None:
    """One unit in the last place may come of one rounding; three may not."""

    def off(case: Case, given: Operands) -> Array:
        out = exact(case, given)
        if bool((given.a == np.rint(given.a)).all()) is whole:
            out.view(np.uint16)[3, 5] += ulps
        return out

    assert compare(TWIN, *told(TWIN), off)["outcome"] == outcome


def test_other_inputs_and_missing_functions_are_told() -> None:
    row, values = told(TWIN)
    other = replace(TWIN, case=replace(TWIN.case, problem=replace(TWIN.case.problem, k=48)))
    assert "other inputs" in compare(other, row, values, exact)["detail"]
    assert compare(TWIN, row, values, lambda *_: None)["outcome"] == "not built"


def test_every_function_of_the_hopper_ladder_is_compared() -> None:
    found = list(twins())
    names = {t.case.function for t in found}
    assert {f"step{n}_" for n in range(1, 10)} == {name[:6] for name in names}
    assert len(names) > 150
    normal = {t.case.variant for t in found if t.normal and t.case.step == 9}
    assert normal == {t.case.variant for t in found if t.case.step == 9}
