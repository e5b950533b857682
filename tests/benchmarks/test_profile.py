"""What bounds a shape: goals, ncu's CSV, and the sentence made from the readings."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import profile, suite
from kernels.device import H200
from kernels.problem import DType

CSV = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Context","Section Name","Metric Name","Metric Unit","Metric Value"
"0","1","step9_128x256_2x1","1","GPU Speed Of Light Throughput","Duration","us","203.52"
"0","1","step9_128x256_2x1","1","GPU Speed Of Light Throughput","Memory Throughput","%","41.5"
"0","1","step9_128x256_2x1","1","Memory Workload Analysis","Memory Throughput","Tbyte/s","1.25"
"0","1","step9_128x256_2x1","1","GPU Speed Of Light Throughput","Elapsed Cycles","cycle","290,123"
"0","1","step9_128x256_2x1","1","GPU Speed Of Light Throughput","Compute (SM) Throughput","%","91.0"
"1","1","step9_128x256_2x1","1","GPU Speed Of Light Throughput","Duration","us","999"
"2","1","nvjet_hsh_128x256","1","GPU Speed Of Light Throughput","Duration","us","210.5"
"2","1","nvjet_hsh_128x256","1","Occupancy","Block Limit SM","block","n/a"
"""


@pytest.mark.parametrize(
    ("shape", "goal"),
    [
        ((1, 128, 8192, 8192), 1.08),
        ((1, 4095, 4097, 4100), 1.3),
        ((1, 1000, 3000, 500), 1.3),
        ((1, 512, 512, 512), 1.0),
        ((1, 4096, 14336, 4096), 1.0),
        ((1, 16, 8192, 8192), 0.97),
        ((64, 512, 512, 512), 0.97),
    ],
)
def test_each_shape_of_the_suite_has_its_goal(shape: tuple[int, int, int, int], goal: float) -> None:
    assert shape in suite.SHAPES
    problem = suite.problem_of(shape, DType.FP16, "nn")
    described = {"m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch}
    assert profile.goal(described) == goal


def test_only_sustained_rows_below_their_goal_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(ratio: float, timing: str = "sustained", invariant: bool = False) -> dict[str, Any]:
        problem = {"m": 512, "n": 512, "k": 512, "batch": 1}
        return {"timing": timing, "batch_invariant": invariant, "ratio": ratio, "problem": problem}

    rows = [row(0.9), row(1.1), row(0.9, "burst"), row(0.9, invariant=True)]
    monkeypatch.setattr(profile, "_profiled", lambda row, *_: row)
    unused: Any = None
    assert profile.profile(rows, unused, unused, 1.0) == rows[:1]


def test_the_first_launch_of_each_side_is_read_from_ncu() -> None:
    found = profile.parse(CSV)
    assert found["ours"] == {
        "kernel": "step9_128x256_2x1",
        "duration (us)": 203.52,
        "memory_throughput_percent": 41.5,
        "memory_throughput (Tbyte/s)": 1.25,
        "elapsed_cycles": 290123.0,
        "sm_throughput_percent": 91.0,
    }
    assert found["reference"]["duration (us)"] == 210.5
    assert profile.parse("==ERROR== no permission") == {}


def test_the_sentence_names_floor_power_and_units() -> None:
    row = {
        "read_floor_seconds": 3e-5, "seconds": 4e-5, "variant": "ours", "reference": "cuBLAS", "goal": 1.08,
        "ncu": profile.parse(CSV), "reading": {},
        "nvml": {"ours": {"watts": 698.4, "sm_clock_mhz": 1410, "held_down_by": ["power cap (software)"]}},
    }  # fmt: skip
    text = profile.bound(row)
    assert text.startswith("75% of the time that a reduction takes")
    assert "698 W at 1410 MHz, clock held down by power cap (software)" in text
    assert "SMs 91 % busy" in text
    assert profile.bound(row | {"nvml": {}, "ncu": {"missing": "no"}}).count(";") == 0


def test_the_sentence_tells_what_reading_leaves_of_the_energy_under_a_power_cap() -> None:
    row = {
        "read_floor_seconds": 3e-5, "seconds": 4e-5, "variant": "ours", "reference": "cuBLAS", "goal": 1.25, "ncu": {},
        "nvml": {"cuBLAS": {"watts": 700.0, "seconds": 4e-5, "held_down_by": [profile.POWER_CAP]}},
        "reading": {"watts": 500.0, "seconds": 3e-5},
    }  # fmt: skip
    # 28 mJ, 15 of them for reading; at 1.25 times the speed 22.4, which leaves 7.4 where there were 13.
    assert profile.bound(row).endswith(
        "of the 28.0 mJ that a launch of cuBLAS takes, 15.0 go into reading B, so at 1.25 all the rest would have to "
        "take 43% less"
    )
    uncapped = row | {"nvml": {"cuBLAS": row["nvml"]["cuBLAS"] | {"held_down_by": []}}}
    assert "mJ" not in profile.bound(uncapped)
    assert "mJ" not in profile.bound(row | {"reading": {}})


@pytest.mark.parametrize(
    ("m", "n", "read"), [(128, 8192, True), (1024, 8192, True), (2048, 8192, False), (16, 8192, False)]
)
def test_reading_is_told_where_b_is_most_of_what_is_moved(
    m: int, n: int, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(suite, "operand_sets", lambda problem, _: asked.append(problem.m))
    monkeypatch.setattr(profile, "_powered", lambda *_: {"watts": 1.0})

    class Ours:
        device = H200

        def launcher(self, variant: Any, problem: Any) -> None:
            assert problem.m == profile.READING_ROWS

    ours: Any = Ours()
    found = profile._reading(suite.problem_of((1, m, n, 8192), DType.FP16, "nn"), ours, 3e-5)
    assert found == ({"watts": 1.0} if read else {})
    assert asked == ([profile.READING_ROWS] if read else [])
