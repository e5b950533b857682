"""The command prints what the worker answers; what the model can't say is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels import predict


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert predict.main(argv) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_workers_answer(capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(printed(capsys, "--chip", "b200", "--json"))
    assert told == json.loads(json.dumps(predict.answer("predict", {})["chips"]["b200"]))
    asked = {"arch": "sm_100a", "step": 8, "depth": 3, "k_tiles": 5, "tiles": 1, "same_phase": False}
    line = json.loads(
        printed(
            capsys, "--timeline", "--step", "8", "--depth", "3", "--k-tiles", "5", "--tiles", "1", "--json"
        )
    )
    assert line == json.loads(json.dumps(predict.answer("trace", asked)))


def test_the_table_says_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = printed(capsys)
    assert "Predicted by a model" in text
    assert "not modelled" in text
    assert "%" in text


def test_where_the_model_is_off_the_table_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(predict, "RESULTS", tmp_path)
    assert "measured" not in printed(capsys, "--chip", "h200")
    (tmp_path / "h200").mkdir()
    took = predict.table("h200")[8]["seconds"]
    rows = [
        {"step": 9, "timing": "burst", "seconds": {"median": took / 1.5}},
        {"step": 9, "timing": "sustained", "seconds": {"median": 1.0}},
    ]
    (tmp_path / "h200" / "ladder.json").write_text(json.dumps({"rows": rows}))
    assert "+50 %" in printed(capsys, "--chip", "h200")


def test_steps_that_are_not_modelled_have_no_time() -> None:
    for chip in ("h200", "b200"):
        rows = predict.table(chip)
        assert [row["step"] for row in rows] == list(range(1, 10))
        assert [row["seconds"] is None for row in rows] == [True] * 2 + [False] * 7
        assert all(0 < row["busy"] < 1 for row in rows[2:])


def test_the_results_file_says_how_far_off_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside published times for B200, beside measured ones for H200; none where nothing is known."""
    monkeypatch.setattr(predict, "RESULTS", tmp_path)
    b200 = json.loads(predict.write("b200").read_text())
    rows = {row["step"]: row for row in b200["rows"]}
    assert sorted(rows) == list(range(3, 10))
    assert all(rows[step]["outcome"] == "within a quarter" for step in range(4, 10))
    assert rows[3]["outcome"] == f"off by {rows[3]['off']:+.0%}"
    assert b200["step_9_tensor_busy_in_steady_state"]["chosen"] > 0.95
    h200 = json.loads(predict.write("h200").read_text())
    assert {row["outcome"] for row in h200["rows"]} == {"no reference"}


def test_larger_tiles_fetch_less() -> None:
    rows = {row["step"]: row["fetched_bytes"] for row in predict.table("b200")}
    assert rows[7] == 2 * rows[8] == 2 * 4096**3 * 2 * (1 / 256 + 1 / 256)
    assert rows[9] < rows[8]


def test_a_schedule_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule of Step 2"):
        predict.timeline("sm_100a", 2, 4, 8, 2)
    with pytest.raises(ValueError, match="1 to 6"):
        predict.timeline("sm_100a", 9, 7, 8, 2)
