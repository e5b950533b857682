"""The ladder's harness without a GPU: what counts as wrong, how a hang ends, what a row holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ladder
from kernels import timing
from kernels.ladder import HOPPER, Step
from kernels.problem import DType, Problem

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_right_results_pass_and_wrong_ones_raise(kind: str) -> None:
    dtype = getattr(torch, kind)
    a, b = torch.randn((40, 96)).to(dtype), torch.randn((24, 96)).to(dtype)
    right = (a.float() @ b.float().T).to(dtype)
    assert ladder._error(right, a, b, False, "here") < 1e-2
    wrong = right.clone()
    wrong[3, 5] += wrong[3, 5].abs() * 4 * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match="here: 1 of 960 elements are wrong"):
        ladder._error(wrong, a, b, False, "here")


def test_whole_numbers_must_be_exact() -> None:
    a, b = torch.randint(-2, 3, (16, 64)).half(), torch.randint(-2, 3, (16, 64)).half()
    right = (a.double() @ b.double().T).half()
    assert ladder._error(right, a, b, True, "here") == 0
    right[0, 0] += 1
    with pytest.raises(AssertionError, match="whole"):
        ladder._error(right, a, b, True, "here")


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    child = (
        "import sys, time\n"
        "for n in sys.argv[1].split(','):\n"
        "    if n == '5': sys.exit(1)\n"
        "    if n == '6': time.sleep(60)\n"
        "    print(0.5, flush=True)\n"
    )
    real = subprocess.Popen

    def fake(command: list[str], **more: Any) -> subprocess.Popen[str]:
        return real([sys.executable, "-c", child, command[command.index("--verify") + 1]], **more)

    monkeypatch.setattr(ladder.subprocess, "Popen", fake)
    monkeypatch.setattr(ladder, "VERIFY_SECONDS", 4.0)
    outcome = {step.number: error for step, error in ladder.verified("sm_90a", DType.FP16, 1, HOPPER[3:8])}
    assert outcome == {4: 0.5, 5: None, 6: None, 7: 0.5, 8: 0.5}


def test_row_and_table() -> None:
    problem = ladder.problem_of(4096, 4096, 4096, DType.FP16)
    made = ladder.row(HOPPER[7], problem, [2e-4, 2.2e-4, 2.1e-4], [2e-4], timing="burst", error=1e-4)
    assert made["seconds"] == {"min": 2e-4, "median": 2.1e-4, "max": 2.2e-4}
    assert made["ratio"] == pytest.approx(2e-4 / 2.1e-4)
    assert made["variant"] == "step8_cluster"
    assert "654.5" in ladder.table([made])


class StoppedEvent:
    """A CUDA event by the clock of the computer."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: StoppedEvent) -> float:
        return (other.at - self.at) * 1e3


def test_square_measures_each_step_beside_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    def launcher(arch: str, step: Step, problem: Problem, ctas: int) -> Any:
        assert (arch, ctas) == ("sm_90a", 3)
        return lambda a, b, d: launched.append(step.name) or d.copy_(a @ b.T)

    def sets(m: int, n: int, k: int, kind: Any, l2_bytes: int) -> list[Any]:
        return [(torch.ones(m, k), torch.ones(n, k), torch.empty(m, n)) for _ in range(3)]

    monkeypatch.setattr(ladder, "LADDER_SIZE", (16, 16, 16))
    monkeypatch.setattr(timing, "BLOCK_SECONDS", 1e-3)
    monkeypatch.setattr(ladder, "launcher", launcher)
    monkeypatch.setattr(ladder, "operand_sets", sets)
    monkeypatch.setattr(torch.cuda, "Event", StoppedEvent)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1))
    errors = dict.fromkeys((HOPPER[0], HOPPER[6], HOPPER[7]), 0.0001)
    measured = ladder.Ladder("sm_90a", DType.FP16, errors, ctas=3, rounds=4).square(sustained=True)
    names = [(r["variant"], r["timing"]) for r in measured]
    pair = ["step7_warp_specialized", "step8_cluster"]
    assert names == [(name, timing) for timing in ("burst", "sustained") for name in pair]
    assert set(launched) == set(pair)
    assert all(r["seconds"]["min"] > 0 and r["reference_seconds"]["min"] > 0 for r in measured)


def test_readme_holds_what_the_results_say() -> None:
    text = ladder.README.read_text()
    assert ladder.readme(text, ladder.RESULTS) == text, "run python -m benchmarks.ladder --readme"


def test_readme_shows_measured_figures(tmp_path: Path) -> None:
    problem = ladder.problem_of(4096, 4096, 4096, DType.FP16)
    rows = [
        ladder.row(HOPPER[7], problem, [2.1e-4], [2e-4], timing="burst", error=1e-4),
        ladder.row(HOPPER[7], problem, [2.1e-4], [2.3e-4], timing="sustained", error=1e-4),
    ]
    document = {
        "what": "ladder",
        "machine": {"name": "h200", "device": "NVIDIA H200"},
        "date": "2030-01-02T03:04:05",
        "versions": {"torch": "2"},
        "command": "python -m benchmarks.ladder",
        "rows": rows,
    }
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "ladder.json").write_text(json.dumps(document))
    text = ladder.readme(ladder.README.read_text(), tmp_path)
    assert "| 210.0 | 654.5 | 0.952 | 1.095 |" in text
    assert "one NVIDIA H200 on 2030-01-02" in text
    assert text.count("[hopper/step8_cluster.py](hopper/step8_cluster.py)") == 1
