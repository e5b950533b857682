"""How a product went, by stage word."""

from __future__ import annotations

import pytest

from service.outcome import Outcome


def test_an_outcome_tells_its_time_by_stage_word() -> None:
    seconds = {"admit": 0.01, "batch": 0.25, "copy_in": 0.1, "kernel": 0.4}
    outcome = Outcome("reference-numpy", "only", "why", 0.25, 0.5, 1, seconds)
    told = outcome.stages(1.0)
    assert told == {"admit": 0.01, "batch": 0.25, "link": pytest.approx(0.24), "copy_in": 0.1, "kernel": 0.4}
    assert list(told) == ["admit", "batch", "link", "copy_in", "kernel"]
    assert outcome.stages(0.7)["link"] == 0  # a stack's seconds are those of the batch
