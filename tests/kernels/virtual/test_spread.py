"""Work over processes: every task once, in processes or here, and no second time after a cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.virtual.spread import Result, spread


def square(n: int) -> Result:
    """A task; says which process did it."""
    if n < 0:
        raise ValueError("negative")
    return {"square": n * n, "process": os.getpid()}


TASKS = {str(n): n for n in range(5)}


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_has_its_result(jobs: int) -> None:
    found = dict(spread(square, TASKS, jobs=jobs))
    assert {key: result["square"] for key, result in found.items()} == {str(n): n * n for n in range(5)}
    assert ({result["process"] for result in found.values()} == {os.getpid()}) == (jobs == 1)


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    kept = tmp_path / "folder" / "kept.jsonl"
    with pytest.raises(ValueError, match="negative"):
        dict(spread(square, {"a": 2, "b": 3, "c": -1}, kept=kept))
    text = kept.read_text()
    assert text.count("\n") == 2
    kept.write_text(text + '["cut o')
    asked: list[int] = []

    def noting(n: int) -> Result:
        asked.append(n)
        return {"square": n * n}

    found = dict(spread(noting, {"a": 2, "b": 3, "d": 4}, kept=kept))
    assert asked == [4]
    assert {key: result["square"] for key, result in found.items()} == {"a": 4, "b": 9, "d": 16}
