"""Parts of a measurement: what one finds is written at once, what fails doesn't take the others along."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import parts, record


def options(folder: Path, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    record.add_places(parser, "here")
    parts.add_choice(parser, ["one", "two", "three"])
    return parser.parse_args(["--out", str(folder), *flags])


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "it.json").read_text())["rows"]
    return found


def test_each_row_is_written_at_once_and_a_failure_is_one(tmp_path: Path) -> None:
    def one() -> Iterator[parts.Row]:
        yield {"name": "a", "x": 1}
        assert rows(tmp_path) == [{"part": "one", "name": "a", "x": 1}]
        yield {"name": "b", "x": 2}

    def two() -> Iterator[parts.Row]:
        yield {"name": "c"}
        raise SystemExit("the GPU is gone")

    made: parts.Parts = {"one": one, "two": two, "three": lambda: [{"name": "d"}]}
    assert parts.run("it", made, options(tmp_path), details={}, packages=()) == 1
    assert [row["name"] for row in rows(tmp_path)] == ["a", "b", "c", "two", "d"]
    assert rows(tmp_path)[3]["detail"] == "SystemExit: the GPU is gone"
    again: parts.Parts = {**made, "two": lambda: [{"name": "e"}]}
    assert parts.run("it", again, options(tmp_path, "--part", "two"), details={}, packages=()) == 0
    assert [row["name"] for row in rows(tmp_path)] == ["a", "b", "d", "e"]


def test_no_part_is_begun_when_the_time_is_used_up(tmp_path: Path) -> None:
    made: parts.Parts = {"one": lambda: [{"name": "a"}]}
    assert parts.run("it", made, options(tmp_path, "--budget", "-1"), details={}, packages=()) == 1
    assert not (tmp_path / "it.json").exists()
