"""The model's clock on small kernels, the timeline that comes of it, and what a prediction says of itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kernels.chips import B200, H200, Parameter
from kernels.virtual.timing import Timing
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
        assert span.begin >= B200.load_latency.value
        ends.append(span.end - span.begin)
    assert ends == [pytest.approx(512 / 48), pytest.approx(512 / 480)]


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
                assert getattr(chip, name).source.startswith(("datasheet", "assumed", "measured by others"))


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("arch", "step"), [("sm_100a", 4), ("sm_100a", 7), ("sm_100a", 8), ("sm_100a", 9), ("sm_90a", 7)]
)
def test_schedules_and_instructions_agree(arch: str, step: int) -> None:
    """Two tiles of one CTA or cluster on the same engines, by either driver.

    The instructions add what schedules leave out: fusing, packing, addresses.
    """
    pytest.importorskip("cutlass")
    from kernels.engines import Engines
    from kernels.model import Cta, Machine
    from kernels.schedules import BLK_K, CHIP_OF, CHIPS, SCHEDULES
    from kernels.virtual.trace import play

    schedule, k = SCHEDULES[arch][step], 2048
    chip = CHIPS[CHIP_OF[arch]]
    tiles = 2 if schedule.persistent else 1
    machine, engines = Machine(keep=False), Engines(chip.chip)
    Cta(machine, engines, chip, schedule).run(tiles, k // BLK_K)
    assert not machine.run()
    told = max(machine.now, engines.store.free)
    timing = play(arch, step, (schedule.tile[0] * tiles, schedule.tile[1], k), sms=schedule.ctas)
    assert timing.end == pytest.approx(told, rel=0.15)
    busy = max(timing.tensor_busy.values())
    assert busy == pytest.approx(engines.tensor.busy, rel=1e-6)
