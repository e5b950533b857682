"""Delays put into compiled PTX: where they go, and that Steps 7 and 8 compute the same with them."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from kernels.build import build
from kernels.virtual import mutants
from kernels.virtual.host import on_device, run
from kernels.virtual.jitter import SEED, delayed
from kernels.virtual.launch import Options, Schedule
from kernels.virtual.subject import Subject, operands

TEXT = """.version 8.8
.visible .entry kernel(
.param .u64 p
)
{
.reg .b32 %r<4>;
$start:
mov.u32 %r1, 1;
@%p3 mbarrier.try_wait.parity.b64 %p1, [%r1], %r2;
barrier.sync 10, 128;
ret;
}
"""


def test_every_place_gets_a_delay_of_its_own_before_it() -> None:
    lines = delayed(TEXT).splitlines()
    assert [lines[n - 1] for n, line in enumerate(lines) if "try_wait" in line or "barrier.sync" in line] == [
        "nanosleep.u32 %jit4;",
        "nanosleep.u32 %jit4;",
    ]
    assert sum(line.startswith("nanosleep") for line in lines) == 2
    assert f".visible .global .align 4 .u32 {SEED};" in lines
    assert lines.index("mov.u32 %jit1, 0;") < lines.index("mov.u32 %r1, 1;")
    assert SEED not in delayed(TEXT, 7)
    with pytest.raises(ValueError, match="nothing synchronizes"):
        delayed(TEXT.replace("mbarrier", "x").replace("barrier.sync", "x"))


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [7, 8])
def test_delays_change_nothing(step: int) -> None:
    case = mutants.case_of("sm_90a", step)
    build("sm_90a", only=case.function)
    subject = Subject("sm_90a")
    call, text = subject.libraries.load(case.function), subject.ptx(case.function)
    found = set()
    for seed in (1, 2):
        given = operands(case.problem)
        arguments = [*(on_device(x) for x in (given.a, given.b, given.d)), 2]
        report = run(
            lambda a=arguments: call(*a), given.buffers(), delayed(text, seed),
            schedules_=[Schedule("random", seed)], options=Options(sms=2),
        )  # fmt: skip
        assert report.ok, str(report)
        found.add(given.d.tobytes())
    assert len(found) == 1
