"""Steps 1 to 8 as built, on the virtual GPU: ragged shapes, late, early and random schedules, the race detector."""

from __future__ import annotations

import pytest

from kernels.build import build
from kernels.ladder import BLACKWELL
from kernels.problem import DType, Problem

pytest.importorskip("cutlass")

from kernels.virtual import Options
from kernels.virtual.subject import Case, Subject

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

ARCH = "sm_100a"
# M, N, K: one tile and less; edges in every dimension; several tiles a CTA, K past the ring
SHAPES = {
    1: ((128, 128, 64), (100, 72, 40)),
    2: ((128, 128, 128), (100, 72, 150)),
    3: ((130, 140, 100), (256, 128, 64)),
    4: ((136, 200, 152), (256, 256, 64)),
    5: ((136, 200, 456), (128, 128, 64)),
    6: ((392, 264, 328), (128, 384, 64)),
    7: ((392, 264, 328), (128, 384, 64)),
    8: ((600, 520, 456), (256, 256, 64), (264, 8, 72)),
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The steps, built or from the cache."""
    build(ARCH, only="step[1-8]_*")
    return Subject(ARCH)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("number", SHAPES)
def test_step_is_right_under_every_schedule(subject: Subject, number: int, dtype: DType) -> None:
    step = BLACKWELL[number - 1]
    for m, n, k in SHAPES[number]:
        problem = Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_b=True)
        assert step.unsupported(problem) is None
        case = Case(number, step.function(dtype), problem)
        outcome = subject.verify(case, schedules=3, options=Options(sms=4))
        assert outcome.ok, f"{case}\n{outcome.text()}"
        assert not outcome.report.lints, "\n".join(map(str, outcome.report.lints))
