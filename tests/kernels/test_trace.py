"""The command that writes a timeline: on the virtual GPU, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels.libraries import default_root
from kernels.trace import CLUSTER, arguments, main, problem_of, room


def test_marks_have_room_for_ragged_edges() -> None:
    assert room(problem_of(512, 256, 1024))[:3] == (2, CLUSTER, 16)
    assert room(problem_of(257, 257, 65))[:3] == (4, CLUSTER, 2)


def test_the_marks_stand_where_c_would() -> None:
    """And the code says that there is no C, so that nobody reads them as one."""
    given = arguments(problem_of(256, 256, 64), "a", "b", 100, 200, 2)
    assert (given[2], given[6], given[7:10]) == (100, 200, (0, 0, 0))
    assert given[13] & 0b1100 == 0


@pytest.mark.parametrize("wrong", [["--marks", "--step", "8"], ["--device", "cuda", "--arch", "sm_100a"]])
def test_marks_are_those_of_step_9_on_hopper(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
    assert "Step 9 for sm_90a" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_every_warp_of_a_step_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cutlass")
    out = tmp_path / "trace.json"
    command = ["--arch", "sm_90a", "--step", "7", "--mnk", "128,128,128"]
    assert main([*command, "--root", str(default_root()), "--out", str(out)]) == 0
    assert "not a measurement" in capsys.readouterr().out
    events = json.loads(out.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"TMA", "tensor core"} <= names
    assert len([name for name in names if name.startswith("CTA 0,0,0 warp")]) == 8
