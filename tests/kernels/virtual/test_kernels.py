"""The project's kernels on the virtual GPU, as built and launched by their own host code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels.virtual.launch import LATE, Options, Schedule

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")

from kernels.build import build
from kernels.libraries import default_root
from kernels.virtual import edits, mutants
from kernels.virtual.cases import LADDER_STEPS, cases
from kernels.virtual.host import run
from kernels.virtual.subject import Case, Subject, family_arguments, operands


def subject(arch: str, case: Case) -> Subject:
    """The case's function, built unless it is there."""
    build(arch, only=case.function)
    return Subject(arch, default_root())


@pytest.fixture(scope="module")
def step9() -> tuple[Subject, Case]:
    case = mutants.case_of("sm_100a", 9)
    return subject("sm_100a", case), case


@pytest.mark.timeout(600)
def test_step_9_is_right_under_all_schedules(step9: tuple[Subject, Case]) -> None:
    """Late, early, random: the same bytes, no finding, the right numbers; every barrier has its name."""
    own, case = step9
    outcome = own.verify(case)
    assert outcome.ok, outcome.text()
    assert [r.schedule for r in outcome.report.runs] == ["late", "early", "random 1"]
    assert not outcome.report.lints


def test_whole_numbers_come_out_exactly(step9: tuple[Subject, Case]) -> None:
    own, case = step9
    given = operands(case.problem, whole=True)
    own.run(case, given, schedules=[LATE]).raise_if_faulty()
    exact = given.a.astype(np.float32) @ given.b.astype(np.float32).T
    np.testing.assert_array_equal(given.d, exact.astype(np.float16))


def test_mutants_of_step_9_die(step9: tuple[Subject, Case]) -> None:
    """One of each kind that no kernel survives; the whole set is `python -m kernels.virtual.mutants`."""
    own, case = step9
    fatal = {"one arrival more", "half the bytes expected", "commit left out", "proxy fence left out"}
    reached = mutants.lines_run(own, case)
    found = list(mutants.mutants(own.ptx(case.function), reached))
    first = {m.kind: m for m in reversed(found) if m.kind in fatal}
    assert set(first) == fatal
    fates = {kind: mutants.fate(own, case, mutant).killed_by for kind, mutant in first.items()}
    assert all(fates.values()), fates
    assert fates["proxy fence left out"] == "proxy fence"


def test_a_report_names_barriers_as_the_kernel_does(step9: tuple[Subject, Case]) -> None:
    """A commit that is left out: who waits for what, by name and line."""
    own, case = step9
    reached = mutants.lines_run(own, case)
    mutant = next(m for m in mutants.mutants(own.ptx(case.function), reached) if m.kind == "commit left out")
    given = operands(case.problem)
    call, arguments = own.libraries.load(case.function), family_arguments(case, given, 4)
    options = Options(sms=4)
    report = run(lambda: call(*arguments), given.buffers(), mutant.text, schedules_=[LATE], options=options)
    assert "mma2tma[" in str(report) or "mma2ld[" in str(report)
    assert ".py:" in str(report)


def test_another_seed_is_another_order(step9: tuple[Subject, Case]) -> None:
    own, case = step9
    outcome = own.verify(case, schedules=[Schedule("random", 11), Schedule("random", 12)])
    assert outcome.ok, outcome.text()


def processor_seconds(work: Callable[[], object]) -> float:
    """This thread's, the lesser of two runs, whatever else this computer does; a BLAS's threads may wait awake."""
    spent = []
    for _ in range(2):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return min(spent)


def test_step_9_takes_a_second(step9: tuple[Subject, Case]) -> None:
    """Three schedules with the detector at 512×512×1024, as this Python counts seconds; 0.8 of them when measured."""
    own, case = step9
    large = replace(case, problem=replace(case.problem, k=1024))
    own.verify(large, schedules=[LATE])  # translates
    second = 16 * processor_seconds(lambda: sum(n for n in range(2_000_000)))
    assert processor_seconds(lambda: own.verify(large)) < 3 * second


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("step", LADDER_STEPS)
def test_every_step(arch: str, step: int) -> None:
    """Several shapes with ragged edges, three schedules, the detector."""
    for case in cases(arch, [step]):
        outcome = subject(arch, case).verify(case)
        assert outcome.ok, f"{case}\n{outcome.text()}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nineteen_mutants_in_twenty_die(tmp_path: Path) -> None:
    """Each survivor with its argument."""
    out = tmp_path / "mutants.json"
    assert mutants.main(["--jobs", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) >= 200
    assert not [row for row in rows if row["detail"] == "not explained"]


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["dealloc before the cluster's barrier"])
def test_mistakes_in_the_source_die(kind: str) -> None:
    """One of them, compiled anew; the whole list is `python -m kernels.virtual.mutants`."""
    case = mutants.case_of("sm_100a", 8)
    own = subject("sm_100a", case)
    edit = next(e for e in edits.EDITS if (e.step, e.kind) == (8, kind))
    text = edits.compiled(edit, case.function, "sm_100a", own.root)
    assert mutants.fate(own, case, mutants.Mutant(kind, 0, "source", "", text)).killed_by


def test_what_mistakes_change_is_in_the_source_once() -> None:
    for edit in edits.EDITS:
        for name, was, becomes in edit.changes:
            assert (edits.PACKAGE / name).read_text().count(was) == 1, edit
            assert was != becomes
    assert {e.step for e in edits.EDITS} == {7, 8, 9}
