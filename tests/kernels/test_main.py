"""The command line: what it lists exists, what it explains is what the selector says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import reference, tune
from kernels.__main__ import commands, main
from kernels.device import describe_cpu
from kernels.libraries import NotBuilt, UntrustedFolder
from kernels.problem import DType, Problem
from kernels.selector import table_key
from kernels.tune import Times, cpu_build, parse_shape


def test_help_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert {"explain", "tune", "build", "variants"} <= set(commands())
    assert all(name in text for name in commands())


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m kernels {name}" in capsys.readouterr().out


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compute"]) == 2
    assert "no command 'compute'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NotBuilt("step4 is not built: python -m kernels build"), "python -m kernels build"),
        (UntrustedFolder("/x is writable by others"), "/x is writable by others"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "gemm-service[torch]"),
        (ModuleNotFoundError("No module named 'cutlass'", name="cutlass"), "gemm-service[compiler]"),
    ],
)
def test_what_is_lacking_is_told_in_a_line(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(_: object) -> int:
        raise error

    monkeypatch.setattr(tune, "main", lacking)
    assert main(["tune"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m kernels tune: ")
    assert told in line


def test_explain_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GEMM_CACHE", str(tmp_path))
    assert main(["explain", "64", "64", "64", "--device", "cpu", "--dtype", "fp32"]) == 0
    text = capsys.readouterr().out
    assert "reference-numpy" in text
    assert "estimate" in text


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_explain_for_a_chip_that_is_not_here(chip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "4095", "4097", "4100", "--device", chip]) == 0
    assert "reference-cublas" in capsys.readouterr().out
    assert main(["variants", "--device", chip]) == 0
    assert "reference-cublas" in capsys.readouterr().out


def test_explain_says_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "1", "1", "1", "--device", "cpu", "--variant", "step9-none"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_verify_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--only", "numpy"]) == 0
    assert "WRONG" not in capsys.readouterr().out


def test_ladder_names_nine_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--list"]) == 0
    assert "step9_multi_consumer" in capsys.readouterr().out


def test_tune_measures_and_keeps_what_the_selector_then_uses(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "ROUND_SECONDS", 0.001)
    monkeypatch.setenv("GEMM_CACHE", str(tmp_path))
    assert main(["tune", "--device", "cpu", "--shape", "32x32x32", "--shape", "2*8x8x8", "--fast"]) == 0
    assert "in the geometric mean" in capsys.readouterr().out
    table = Times(describe_cpu(), cpu_build()).read()
    problem = Problem(32, 32, 32, dtype=DType.FP32, out_dtype=DType.FP32, batch_invariant=False)
    assert 0 < table[table_key("reference-numpy", problem)] < 1
    assert Times(describe_cpu(), "numpy 0").read() == {}
    assert main(["explain", "32", "32", "32", "--device", "cpu", "--dtype", "fp32", "--fast"]) == 0
    assert "measured" in capsys.readouterr().out
    assert main(["tune", "--device", "cpu", "--shape", "32x32x32", "--fast"]) == 0
    assert "the times of an earlier run takes" in capsys.readouterr().out


def test_the_choice_by_an_earlier_runs_times_is_held_against_this_one() -> None:
    problem = Problem(32, 32, 32, dtype=DType.FP32, out_dtype=DType.FP32, batch_invariant=False)
    device, variants = describe_cpu(), reference.variants()
    fast, slow = variants[0].name, variants[-1].name
    now = tune.Timed(problem, {fast: 1.0, slow: 3.0}, fast)
    then = {table_key(each.name, problem): 9.0 for each in variants} | {table_key(slow, problem): 8.0}
    assert tune.loss_by_table([now], then, device, variants) == pytest.approx(3.0)
    assert tune.loss_by_table([now], {}, device, variants) is None


def test_shapes() -> None:
    assert parse_shape("1x2x3") == (1, 2, 3, 1)
    assert parse_shape("4*1x2x3") == (1, 2, 3, 4)
    with pytest.raises(tune.argparse.ArgumentTypeError):
        parse_shape("1x2")


def test_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels", "--help"], capture_output=True, text=True, check=True
    )
    assert "explain" in done.stdout
