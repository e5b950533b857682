"""The model's clock on small kernels, the timeline that comes of it, and what a prediction says of itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels.chips import B200, H200, Parameter
from kernels.virtual.model import Timing
from kernels.virtual.predict import PUBLISHED, SIZE, Prediction, measured
from kernels.virtual.trace import timeline
from tests.kernels.virtual.snippet import execute, good
from tests.kernels.virtual.test_copies import load, source
from tests.kernels.virtual.test_tensor import COPY, PARTS


def test_a_load_takes_its_latency_and_its_bytes() -> None:
    """Ten times the rate saves nine tenths of the bytes' time and nothing else."""
    fast = replace(B200, load_rate=Parameter(480, "B/cycle/SM", "test"))
    ends = []
    for chip in (B200, fast):
        timing = Timing(chip, keep=True)
        run, _ = load(source(), 0, 0, (32, 8), 0, detect=False, timing=timing)
        good(run)
        (span,) = [s for s in timing.spans if s.name == "load"]
        ends.append(span.end - span.begin)
    assert ends[0] == pytest.approx(B200.load_latency.value + 512 / 48)
    assert ends[1] == pytest.approx(B200.load_latency.value + 512 / 480)


def test_two_products_of_one_thread_follow_each_other() -> None:
    timing = Timing(B200, keep=True)
    data = np.zeros(24576, np.uint8)
    run = execute(
        COPY.format(**PARTS),
        np.zeros((128, 64), np.float32),
        data,
        block=128,
        smem=24_700,
        detect=False,
        timing=timing,
    )
    good(run)
    spans = [s for s in timing.spans if s.name == "mma"]
    one = 128 * 64 * 16 / B200.mma_rate.value
    assert len(spans) == 2
    assert spans[1].begin >= spans[0].begin + one
    assert timing.tensor_busy == {0: pytest.approx(2 * one)}
    assert timing.end > spans[1].end


def test_the_timeline_names_warps_and_engines() -> None:
    timing = Timing(B200, keep=True)
    load(source(), 0, 0, (32, 8), 0, detect=False, timing=timing)
    document = json.loads(json.dumps(timeline(timing)))
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"TMA", "CTA 0,0,0 warp 0"}
    assert all(e["dur"] > 0 for e in document["traceEvents"] if e["ph"] == "X")
    assert "model" in document["otherData"]["note"]


def test_every_parameter_has_its_source() -> None:
    for chip in (B200, H200):
        for name in chip.__dataclass_fields__:
            if name != "name":
                assert getattr(chip, name).source.startswith(("datasheet", "assumed"))


def test_a_prediction_says_where_it_is_off() -> None:
    near = Prediction(8, "f", 0.11e-3, 0.6, 4, 1, PUBLISHED[8])
    assert near.remark == "within a quarter"
    assert replace(near, seconds=0.2e-3).remark == "off by 92%"
    assert replace(near, reference=None).remark == "nothing to hold it against"


def test_measured_times_come_from_result_files(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    row = {"problem": {"m": SIZE, "n": SIZE, "k": SIZE}, "variant": "step4_tma", "seconds": {"median": 2e-4}}
    small = row | {"problem": {"m": 128, "n": 128, "k": 64}, "variant": "step1_tile"}
    (folder / "ladder.json").write_text(
        json.dumps({"rows": [row, row | {"seconds": {"median": 9.0}}, small]})
    )
    assert measured(tmp_path) == {4: 2e-4}
    assert measured(tmp_path / "none") == {}
