"""What each warp and engine of the virtual GPU does: receives a step and a problem, hands on a Perfetto document.

Times are the model's (kernels/engines.py), not measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels import perfetto
from kernels.chips import CHIPS
from kernels.problem import DType, Problem
from kernels.virtual.launch import LATE, Options
from kernels.virtual.timing import Timing


def timeline(timing: Timing) -> dict[str, Any]:
    """The spans of a run as a Chrome trace: a process an SM, a thread a warp or engine."""
    note = f"model of {timing.chip.name}, not a measurement"
    return perfetto.document(timing.spans, timing.chip.clock_hz.value, note)


def trace(arch: str, step: int, shape: tuple[int, int, int], root: Path | None = None) -> dict[str, Any]:
    """Run a step on the model's clock and keep what each warp and engine did."""
    return timeline(play(arch, step, shape, root, keep=True))


def play(
    arch: str,
    step: int,
    shape: tuple[int, int, int],
    root: Path | None = None,
    *,
    sms: int = 8,
    keep: bool = False,
) -> Timing:
    """Run a step on the model's clock; `keep`: what each warp and engine did."""
    from kernels.virtual.mutants import case_of
    from kernels.virtual.subject import Case, Subject, have, operands

    case = case_of(arch, step)
    m, n, k = shape
    problem = Problem(m, n, k, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
    case = Case(case.step, case.function, problem, case.variant)
    have(arch, [case.function], root)
    timing = Timing(CHIPS[arch], keep=keep)
    options = Options(schedule=LATE, detect=False, timing=timing, sms=sms)
    subject = Subject(arch, root)
    subject.run(case, operands(problem), schedules=1, options=options).raise_if_faulty()
    return timing
