"""The README shows what the results files hold."""

from __future__ import annotations

from benchmarks import figures


def test_the_readmes_figures_are_those_of_the_results_files() -> None:
    text = figures.README.read_text()
    assert figures.written(text) == text, "run python -m benchmarks.figures --write"


def test_a_run_that_found_something_is_not_told_as_a_good_one() -> None:
    rows = [{"outcome": "ok", "detail": ""}, {"outcome": "wrong", "detail": "3 answers"}]
    assert figures._outcome(rows, "no wrong answer") == "wrong: 3 answers"
    assert figures._outcome(rows[:1], "no wrong answer") == "no wrong answer"
