"""The probe: whatever happens to its child, each variant gets its outcome and the others theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import cublas, probe
from kernels.device_file import DeviceFile
from kernels.probe import WAITING, Ended, Kept, Outcome
from kernels.problem import Problem
from tests.kernels.subjects import troubled

SUBJECT = f"{troubled.__module__}:troubled"


def test_each_ends_as_it_does_and_the_rest_goes_on() -> None:
    names = ["fine", "wrong", "aborts", "raises", "hangs", "slow", "fine too"]
    seen: list[str] = []
    outcomes = probe.probe(
        names, subject=SUBJECT, index=3, limit=2.5, on_outcome=lambda outcome: seen.append(outcome.variant)
    )
    assert {name: outcome.ended for name, outcome in outcomes.items()} == {
        "fine": Ended.RIGHT,
        "wrong": Ended.WRONG,
        "aborts": Ended.FAULT,
        "raises": Ended.FAULT,
        "hangs": Ended.HANG,
        "slow": Ended.RIGHT,
        "fine too": Ended.RIGHT,
    }
    assert seen == names
    assert outcomes["fine"].detail == "gpu 3"
    assert "-6" in outcomes["aborts"].detail
    assert "illegal memory" in outcomes["raises"].detail


def test_a_device_that_cannot_be_opened_is_a_fault_of_each() -> None:
    outcomes = probe.probe(["a", "b"], subject=f"{troubled.__module__}:unstartable", index=7)
    assert [outcome.ended for outcome in outcomes.values()] == [Ended.FAULT, Ended.FAULT]
    assert "no GPU 7" in outcomes["a"].detail


def test_outcomes_hold_for_one_device_and_build(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "cache", "H200|uuid|driver|sm_90a", "build")
    assert kept.read() == {}
    told = {"a": Outcome("a", Ended.RIGHT), "b": Outcome("b", Ended.HANG, "no answer")}
    for outcome in told.values():
        kept.add(outcome)
    assert Kept(tmp_path / "cache", "H200|uuid|driver|sm_90a", "build").read() == told
    assert Kept(tmp_path / "cache", "H200|uuid|newer driver|sm_90a", "build").read() == {}
    assert Kept(tmp_path / "cache", "H200|uuid|driver|sm_90a", "other").read() == {}


def test_outcomes_that_others_could_have_written_are_not_believed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "device", "build")
    kept.add(Outcome("a", Ended.RIGHT))
    kept.path.chmod(0o666)
    assert kept.read() == {}


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    kept = Kept(blocked / "cache", "device", "build")
    assert kept.add(Outcome("a", Ended.RIGHT)) == Outcome("a", Ended.RIGHT)
    assert kept.read() == {}


def test_what_hung_in_service_stays_condemned_by_whoever_tests_it_at_that_moment(tmp_path: Path) -> None:
    here, there = (Kept(tmp_path, "device", "build") for _ in range(2))
    hung = Outcome("a", Ended.HANG, "no answer")
    here.add(Outcome("b", Ended.RIGHT))
    there.add(hung)
    assert here.add(Outcome("a", Ended.RIGHT)) == hung
    assert here.add(Outcome("c", Ended.BITS)) == Outcome("c", Ended.BITS)
    assert there.read() == {"a": hung, "b": Outcome("b", Ended.RIGHT), "c": Outcome("c", Ended.BITS)}
    assert here.add(Outcome("a", Ended.WRONG)).ended is Ended.WRONG


def test_many_processes_add_to_one_file(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kernels.device_file import DeviceFile\n"
        "file = DeviceFile(Path(sys.argv[1]), 'times', 'device', 'build')\n"
        "for i in range(20): file.update(lambda known: known | {f'{sys.argv[2]}.{i}': 1.0})"
    )
    adding = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)]) for n in range(4)]
    assert [each.wait(60) for each in adding] == [0] * 4
    assert len(DeviceFile(tmp_path, "times", "device", "build").read()) == 80


def test_admission_follows_the_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tests.kernels.test_runtime import Fake, make, stand_in

    names = ["right", "wrong", "bits", "hang"]
    gpu = make(
        *(Fake(name, 1e-9 * (4 - i)) for i, name in enumerate(names)), **dict.fromkeys(names, stand_in)
    )
    during: dict[str, str] = {}
    told = {
        name: Outcome(name, ended)
        for name, ended in zip(
            [*names, cublas.NAME],
            [Ended.RIGHT, Ended.WRONG, Ended.BITS, Ended.HANG, Ended.RIGHT],
            strict=True,
        )
    }
    calls = []

    def child(waiting: list[str], subject: str, index: int, limit: float, start: float) -> list[Outcome]:
        during.update(gpu.barred)
        calls.append(list(waiting))
        return [told[name] for name in waiting]

    monkeypatch.setattr(probe, "_one_child", child)
    outcomes = probe.admit(gpu, 0, folder=tmp_path)
    assert outcomes == told
    assert during == dict.fromkeys(names, WAITING)
    assert sorted(gpu.barred) == ["hang", "wrong"]
    problem = Problem(64, 64, 64, batch_invariant=False)
    assert gpu.choose(problem).variant == "bits"
    assert gpu.choose(Problem(64, 64, 64)).variant == "right"
    again = make(*(Fake(name) for name in names), **dict.fromkeys(names, stand_in))
    probe.admit(again, 0, folder=tmp_path)
    assert sorted(again.barred) == ["hang", "wrong"]
    assert len(calls) == 1  # what is known is not tested again
