"""Step 9 with seeded delays in each role: the bits of D don't depend on who comes late."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from kernels.build import build
from kernels.hopper import stressed
from kernels.hopper.variants import Step9
from kernels.problem import Problem
from kernels.verify import check

MEMBERS = list(stressed.members())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stressed functions, compiled."""
    folder = tmp_path_factory.mktemp("kernels")
    build("sm_90a", modules=["kernels.hopper.stressed"], root=folder)
    return folder


def test_each_way_to_share_a_tile_is_put_under_stress() -> None:
    assert {member.tiling.name for member, _ in MEMBERS} == set(stressed.TILINGS)
    tilings = [member.tiling for member, _ in MEMBERS]
    assert any(t.sharing > 1 for t in tilings)
    for way in ("pingpong", "exchanges", "parks", "swap"):
        assert any(getattr(t, way) for t in tilings)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("member", "store"), MEMBERS, ids=lambda x: str(getattr(x, "tiling", x)))
def test_delays_change_nothing_on_the_virtual_gpu(root: Path, member: Any, store: str) -> None:
    from kernels.virtual.host import run
    from kernels.virtual.launch import Options, Schedule
    from kernels.virtual.subject import Case, Subject, family_arguments, operands

    t = member.tiling
    rows = t.q if t.swap else 264
    problem = Problem(rows, 264, 136, trans_b=True)
    name = stressed.function_name(member, store)
    case = Case(9, name, problem, Step9(member))
    subject = Subject("sm_90a", root)
    call, ptx = subject.libraries.load(name), subject.ptx(name)
    found = set()
    for seed in range(3):
        given = operands(problem)
        arguments = family_arguments(case, given, 2)
        arguments[10] = 7919 * seed + 1  # in the place of the bias
        report = run(
            partial(call, *arguments), given.buffers(), ptx,
            schedules_=[Schedule("random", seed)], options=Options(sms=2),
        )  # fmt: skip
        assert report.ok, str(report)
        found.add(given.d.tobytes())
    assert len(found) == 1
    verdict = check(problem, given.d, given.a, given.b)
    assert verdict.ok, verdict.detail
