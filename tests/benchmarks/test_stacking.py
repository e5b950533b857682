"""Bare torch is measured apart from the services, and a row's ratios follow from what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.stacking import Contender, _row

ROOT = Path(__file__).resolve().parents[2]


def test_ratios_are_those_of_the_rounds() -> None:
    with httpx.Client() as http:
        contenders = {name: Contender(0, http) for name in ("stacked", "unstacked")}
    for name, rates in (("stacked", [300.0, 200.0]), ("unstacked", [100.0, 80.0])):
        contenders[name].rates, contenders[name].batches = rates, [1.0, 1.0]
    bare = [
        {"16": {"seconds": 0.01, "core_seconds": 0.02}, "1024": {"seconds": 0.2, "core_seconds": 0.4}}
    ] * 2
    row = _row(contenders, bare, True)
    assert row["gain"] == {"min": 2.5, "median": 2.75, "max": 3.0}
    assert row["bare_torch_gain"]["median"] == pytest.approx(64 * 0.01 / 0.2)
    assert row["kept"]["max"] == pytest.approx(3.0 / 3.2)
    assert row["share_of_bare_rate"]["max"] == pytest.approx(300 * 0.2 / 64)


def test_bare_torch_runs_alone_and_tells_what_it_used() -> None:
    command = [sys.executable, "-m", "benchmarks.peers.bare", "64", "16", "32"]
    found = json.loads(subprocess.check_output(command, cwd=ROOT))
    assert set(found) == {"16", "32"}
    assert all(one["seconds"] > 0 and one["core_seconds"] > 0 for one in found.values())
