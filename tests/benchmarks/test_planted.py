"""Planted faults: what a child tells, how launches reach a driver, the table of both halves."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import planted


def ended(script: str) -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        found = planted._outcome(run)
        run.kill()
    return found


def test_a_child_that_answers_hangs_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "LIMIT_SECONDS", 3)
    ready = "import json, sys, time; print('ready', flush=True); "
    answer = ready + "print(json.dumps({'outcome': 'wrong', 'detail': '3 of 9'}))"
    assert ended(answer) == {"outcome": "wrong", "detail": "3 of 9"}
    assert ended(ready + "time.sleep(60)")["outcome"] == "hang"
    died = ready + "sys.exit('CUDA error: unspecified launch failure\\nCompile with a flag to know more')"
    assert ended(died) == {"outcome": "fault", "detail": "CUDA error: unspecified launch failure"}


def test_a_child_that_never_gets_ready_is_no_hang_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "START_SECONDS", 0.5)
    assert ended("import time; time.sleep(60)")["outcome"] == "not run"


class Cuda:
    """A driver that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def cuModuleLoadData(self, module: Any, text: bytes) -> int:
        self.asked.append(("load", text))
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        self.asked.append(("find", name))
        return 0

    def cuFuncSetAttribute(self, function: Any, which: int, value: int) -> int:
        self.asked.append(("attribute", which, value))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: Any) -> int:
        given = config._obj
        self.asked.append(("launch", list(given.grid), list(given.block), given.shared, given.count))
        return 0


def test_launches_go_on_to_the_driver_with_the_changed_text() -> None:
    from kernels.virtual.host import _Configuration

    driver = planted.Driver.__new__(planted.Driver)
    driver.cuda, driver.text, driver._modules, driver.names = Cuda(), "changed", {}, ["kernel"]
    how = _Configuration((4, 1, 1), (384, 1, 1), 230_400, None, None, 2)
    for _ in range(2):
        assert driver._launch(ctypes.pointer(how), 1, None) == 0
    asked = driver.cuda.asked
    assert asked[:4] == [
        ("load", b"changed\0"),
        ("find", b"kernel"),
        ("attribute", 8, 230_400),
        ("launch", [4, 1, 1], [384, 1, 1], 230_400, 2),
    ]
    assert [each[0] for each in asked].count("load") == 1  # compiled once


def test_both_halves_stand_side_by_side() -> None:
    virtual = [
        {"name": "x", "function": "step7_a", "outcome": "race", "detail": "late schedule"},
        {"name": "y", "function": "step9_b", "outcome": "deadlock", "detail": "late schedule"},
    ]
    device = [{"name": "x", "outcome": "wrong", "detail": "3 of 400 runs wrong", "racecheck": "nothing"}]
    lines = planted.table(virtual, device).splitlines()
    assert lines[2:] == [
        "| Step 7 | x | race (late schedule) | wrong: 3 of 400 runs wrong | nothing |",
        "| Step 9 | y | deadlock (late schedule) | not run yet |  |",
    ]


def test_the_virtual_gpu_found_every_planted_fault() -> None:
    document = json.loads((planted.RESULTS / "cpu" / "planted.json").read_text())
    assert [row["name"] for row in document["rows"]] == [fault.name for fault in planted.FAULTS]
    assert all(row["outcome"] in ("race", "deadlock", "barrier", "proxy fence") for row in document["rows"])


def test_the_readme_shows_the_results() -> None:
    text = planted.README.read_text()
    assert planted.BEGIN in text
    assert planted.readme(text, planted.RESULTS) == text, "run python -m benchmarks.planted --readme"
