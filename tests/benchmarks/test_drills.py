"""The frame of the drills: what ends well, ends badly or doesn't end; and rows that stay."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.drills.frame import Drill, check, perform


def test_outcomes() -> None:
    assert perform(Drill("good", lambda: "all well", 5.0))["outcome"] == "passed"

    def bad() -> str:
        check(not "true", "one isn't above two")
        return "never"

    row = perform(Drill("bad", bad, 5.0))
    assert (row["outcome"], row["detail"]) == ("failed", "one isn't above two")
    row = perform(Drill("without", lambda: Path("/nonexistent/socket").read_text(), 5.0))
    assert row["outcome"] == "failed"
    assert row["detail"].startswith("FileNotFoundError: ")


def test_a_drill_that_does_not_end_fails() -> None:
    row = perform(Drill("endless", lambda: time.sleep(30) or "", 0.1))
    assert row["outcome"] == "failed"
    assert row["seconds"] < 25


def test_a_drill_that_lasts_is_told_how_long_and_bounded_beyond_that() -> None:
    told: list[float] = []
    row = perform(Drill("lasting", lambda lasts: str(told.append(lasts)), 5, lasts=0.3))
    assert (row["outcome"], told) == ("passed", [0.3])

    def late(lasts: float) -> str:
        time.sleep(30)
        return ""

    assert perform(Drill("late", late, 0.1, lasts=0.1))["outcome"] == "failed"
