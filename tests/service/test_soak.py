"""A short soak; `make soak` runs a hundred times as many requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak


@pytest.mark.ci
def test_two_thousand_random_requests_leave_nothing(tmp_path: Path) -> None:
    row = soak(tmp_path, 2000)
    assert row["worker_restarts"] == row["steps"]["kill"]
    assert all(
        row["steps"].get(step)
        for step in ("infer_shared", "cancel", "garbage", "register", "lend", "break_off", "kill")
    )
