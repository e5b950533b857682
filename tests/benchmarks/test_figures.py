"""The README shows what the results files hold."""

from __future__ import annotations

from benchmarks import figures


def test_the_readmes_figures_are_those_of_the_results_files() -> None:
    found = figures.BLOCK.search(figures.README.read_text())
    assert found is not None
    assert found[0] == figures.block(), "run python -m benchmarks.figures --write"
