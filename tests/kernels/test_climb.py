"""The ladder on the device at hand: what runs, what is measured and what is a model's, table, picture and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels import climb
from kernels.climb import Rung, keep, kept, main, picture, show
from kernels.ladder import HOPPER, Step

SIZE = (4096, 4096, 4096)
RUNGS = [
    Rung(HOPPER[0], (128, 128, 64), True, "relative error 1.0e-04", 1e-5, 2e-6),
    Rung(HOPPER[7], SIZE, True, "relative error 2.0e-04", 2.2e-4, 2e-4),
    Rung(HOPPER[8], SIZE, False, "relative error 1.0e+00"),
]


def test_the_table_says_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    show(RUNGS, "here", True)
    told = capsys.readouterr().out
    assert "measured µs" in told
    assert "0.909" in told  # × cuBLAS
    assert "NO: relative error 1.0e+00" in " ".join(told.split())
    show(RUNGS[:1], "there", False)
    told = capsys.readouterr().out
    assert "model's µs" in told
    assert "measured" not in told


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_holds_the_steps_that_were_timed(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"ladder.{suffix}"
    picture(RUNGS, "NVIDIA H200: measured here", out, True)
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(data) > 5000


def test_what_was_measured_is_kept_for_this_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_CACHE", str(tmp_path))
    keep(RUNGS, "device one", "NVIDIA H200")
    found = kept("device one")
    assert found is not None
    assert [row["step"] for row in found["rows"]] == [1, 8]  # what was wrong has no time
    assert found["rows"][1]["ratio"] == pytest.approx(2 / 2.2)
    assert found["machine"]["device"] == "NVIDIA H200"
    assert kept("device two") is None


def test_a_virtual_device_has_a_models_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    def ran(arch: str, steps: Any, root: Any) -> list[Rung]:
        assert [step.number for step in steps] == [8, 9]
        return [Rung(step, SIZE, True, "computed", 2e-4) for step in steps]

    monkeypatch.setattr(climb, "on_virtual", ran)
    out = tmp_path / "ladder.svg"
    assert main(["--device", "virtual", "--arch", "sm_90a", "--steps", "8-9", "--out", str(out)]) == 0
    assert "H200: a model's times, not measured" in capsys.readouterr().out
    assert "not measured" in out.read_text()


def test_a_wrong_step_makes_the_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(climb, "on_virtual", lambda *_: [RUNGS[1], Rung(HOPPER[8], SIZE, False, "wrong")])
    assert main(["--device", "virtual", "--out", str(tmp_path / "ladder.svg")]) == 1


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", [HOPPER[3]], ids=lambda s: s.name)
def test_a_step_really_runs_on_the_virtual_gpu(step: Step) -> None:
    pytest.importorskip("cutlass")
    (rung,) = climb.on_virtual("sm_90a", [step])
    assert rung.right, rung.detail
    assert rung.seconds is not None
    assert 1e-4 < rung.seconds < 1e-3


@pytest.mark.gpu
def test_the_ladder_is_climbed_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_CACHE", str(tmp_path))
    assert main(["--steps", "4-9", "--out", str(tmp_path / "ladder.svg")]) == 0
    (path,) = tmp_path.glob("ladder-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["step"] for row in rows] == list(range(4, 10))
    assert all(row["ratio"] > 0.3 for row in rows)
