"""Results files: what a run writes needs no mending by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record


def written(folder: Path, rows: list[dict[str, Any]], *, key: str = "name") -> list[dict[str, Any]]:
    path = record.write("here", "it", rows, details={}, packages=(), folder=folder, key=key)
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def test_rows_that_were_not_measured_again_stay_and_say_of_which_commit_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_COMMIT", "first")
    both = [{"name": "a", "x": 1}, {"name": "b", "x": 1}]
    assert written(tmp_path, both) == both
    monkeypatch.setenv("GEMM_COMMIT", "second")
    assert written(tmp_path, [{"name": "b", "x": 2}]) == [
        {"commit": "first", "name": "a", "x": 1},
        {"name": "b", "x": 2},
    ]
    monkeypatch.setenv("GEMM_COMMIT", "third")
    assert written(tmp_path, [{"name": "c", "x": 3}])[:2] == [
        {"commit": "first", "name": "a", "x": 1},
        {"commit": "second", "name": "b", "x": 2},
    ]
    assert json.loads((tmp_path / "it.json").read_text())["commit"] == "third"
    assert written(tmp_path, [{"name": "d"}], key="") == [{"name": "d"}]


def test_a_run_that_writes_elsewhere_goes_on_from_the_file_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    record.write("here", "it", [{"name": "a"}], details={}, packages=())
    assert written(tmp_path / "out", [{"name": "b"}]) == [{"name": "a"}, {"name": "b"}]
    assert written(tmp_path / "out", [{"name": "c"}]) == [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert json.loads((tmp_path / "results/here/it.json").read_text())["rows"] == [{"name": "a"}]


@pytest.mark.parametrize("place", [["--out", "/tmp/x"], ["--out=/tmp/x"], ["--json", "/tmp/x.json"], []])
def test_where_a_file_was_written_first_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--machine", "h200", *place, "--part", "ipc"])
    path = record.write("h200", "it", [], details={}, packages=(), folder=tmp_path)
    assert json.loads(path.read_text())["command"].endswith(" --machine h200 --part ipc")


def test_a_section_is_replaced_and_a_text_without_one_is_refused() -> None:
    text = "a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\nstays\n<!-- end -->\n"
    begin = "<!-- x -->\n"
    assert record.section(text, begin, "new\n") == text.replace("old", "new")
    with pytest.raises(ValueError, match="z"):
        record.section(text, "<!-- z -->\n", "new\n")


@pytest.mark.parametrize(("name", "short"), [("NVIDIA H200", "h200"), ("NVIDIA B200 SXM", "b200")])
def test_short_names(name: str, short: str) -> None:
    assert record.short_name(name) == short
