"""What marks tell: from the file that the virtual GPU left, from the virtual GPU now, and from a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kernels.hopper.marks import CONSUMER, MARKS, Mark
from kernels.hopper.timeline import BLOCK, Timeline, out_of_turn, same_order
from kernels.trace import SHAPE, TILING, main, on_gpu, on_model, problem_of, read, room

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
MODEL = RESULTS / "cpu" / "trace-h200.json"
MEASURED = RESULTS / "h200" / "trace.json"
ORDER = 0.95  # of the pairs of events in the same order: loads two laps late cost more than that
BUSY = 0.10  # points between the model and the hardware


@pytest.fixture(scope="module")
def model() -> Timeline:
    """Of Step 9, as the virtual GPU timed it."""
    return read(MODEL)


def test_lanes_are_named_as_on_the_virtual_gpu(model: Timeline) -> None:
    """Compare kernels/virtual/trace.py: the engines, and the warps that have a role."""
    events = json.loads(MODEL.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    warps = {f"CTA {rank},0,0 warp {warp}" for rank in (0, 1) for warp in (0, 4, 8)}
    assert names == {"TMA", "tensor core"} | warps
    assert {span.lane for span in model.spans()} == names
    assert "not a measurement" in json.loads(MODEL.read_text())["otherData"]["note"]


def test_spans_of_a_lane_follow_each_other(model: Timeline) -> None:
    ends: dict[tuple[int, str], float] = {}
    for span in model.spans():
        assert span.begin >= ends.get((span.sm, span.lane), 0.0)
        ends[span.sm, span.lane] = span.end


def test_every_block_of_k_is_there_once(model: Timeline) -> None:
    tiles, ranks, blocks, marks = room(problem_of(*SHAPE))
    assert model.cycles.shape == (tiles, ranks, blocks, marks)
    spans = [s for s in model.spans() if s.sm == 0]
    assert sum(s.name == "load" for s in spans) == tiles * blocks
    assert sum(s.name == "wgmma" for s in spans) == 2 * tiles * blocks
    assert sum(s.name == "writes back" for s in spans) == 2 * tiles


def test_busy_is_the_union_of_both_consumers_products(model: Timeline) -> None:
    spans = [s for s in model.spans() if s.sm == 0 and s.lane == "tensor core"]
    length = sum(s.end - s.begin for s in spans)
    first = min(s.begin for s in model.spans() if s.sm == 0 and s.name == "load")
    last = max(s.end for s in model.spans() if s.sm == 0 and s.name == "writes back")
    assert model.busy(0) == pytest.approx(length / (last - first), abs=0.01)
    assert model.busy(0) < model.steady(0) <= 1.0


def test_nothing_is_out_of_turn_until_a_mark_is_moved(model: Timeline) -> None:
    assert out_of_turn(model, TILING.stages) == []
    moved = model.cycles.copy()
    moved[0, 0, 5, Mark.LOADED] = moved[0, 0, 5, Mark.MMA_MAY] + 1000
    assert out_of_turn(replace(model, cycles=moved), TILING.stages) == [
        "consumer 0 goes on 5 before loaded 5",
        "consumer 1 goes on 5 before loaded 5",
    ]


def test_the_order_differs_where_loads_come_laps_late(model: Timeline) -> None:
    late = model.cycles.copy()
    late[..., [Mark.LOAD_ASKED, Mark.LOADED]] += 2 * TILING.stages * BLOCK
    assert same_order(model, model, TILING.stages) == 1.0
    assert same_order(model, replace(model, cycles=late), TILING.stages) < ORDER


def test_every_role_goes_on_in_order(model: Timeline) -> None:
    assert not list(backwards(model, 0))
    swapped = model.cycles.copy()
    swapped[0, 0, [3, 4]] = swapped[0, 0, [4, 3]]
    assert set(backwards(replace(model, cycles=swapped), 0)) >= {"load asked", "loaded", "product 1 done"}


def backwards(timeline: Timeline, rank: int) -> Iterator[str]:
    """Handoffs that don't happen in the order of the blocks of K."""
    at: dict[str, list[float]] = {}
    for (name, _), time in sorted(timeline.events(rank).items(), key=lambda item: item[0]):
        at.setdefault(name, []).append(time)
    yield from (name for name, times in at.items() if times != sorted(times))


def test_a_role_that_left_no_mark_is_told(model: Timeline) -> None:
    with pytest.raises(ValueError, match="no mark"):
        Timeline.of(np.zeros((1, 2, 4, MARKS), np.int64), 1)
    with pytest.raises(ValueError, match="3 marks"):
        Timeline.of(np.zeros((1, 2, 4, 3), np.int64), 1)


def test_the_clock_is_counted_against_nanoseconds(model: Timeline) -> None:
    marks = model.cycles + 5000
    marks[..., Mark.NANOSECONDS_AT_START] = 10**15
    passed = marks[-1, 0, 0, Mark.ENDED] - marks[0, 0, 0, Mark.STARTED]
    marks[..., Mark.NANOSECONDS_AT_END] = 10**15 + passed // 2
    marks[..., Mark.SM] = np.array([7, 9])[None, :, None]
    found = Timeline.of(marks, 1)
    assert found.clock_hz == pytest.approx(2e9, rel=1e-3)
    assert found.sms == (7, 9)
    assert found.busy(1) == model.busy(1)
    assert Mark.WRITTEN + CONSUMER < Mark.STARTED < MARKS


def test_the_hardware_agrees_with_the_model(model: Timeline) -> None:
    agree(model, read(MEASURED))


def agree(model: Timeline, measured: Timeline) -> None:
    """Events in the same order, tensor cores as busy."""
    for rank in range(measured.ranks):
        assert out_of_turn(measured, TILING.stages, rank) == []
        assert not list(backwards(measured, rank))
        assert same_order(model, measured, TILING.stages, rank) >= ORDER
        assert measured.busy(rank) == pytest.approx(model.busy(rank), abs=BUSY)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_file_is_what_the_virtual_gpu_says(
    model: Timeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cutlass")
    from kernels.build import build

    build("sm_90a", only="trace*")
    out = tmp_path / "trace.json"
    assert main(["--marks", "--out", str(out)]) == 0
    assert "tensor cores busy" in capsys.readouterr().out
    now = read(out)
    assert out_of_turn(now, TILING.stages) == []
    assert same_order(model, now, TILING.stages) > 0.98
    stale = "python -m kernels trace --marks --out benchmarks/results/cpu/trace-h200.json writes it again"
    assert now.busy() == pytest.approx(model.busy(), abs=0.05), stale


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_model_s_own_account_agrees_with_the_marks() -> None:
    """Marks tell what roles see; the model knows what its tensor cores did."""
    pytest.importorskip("cutlass")
    from kernels.build import build
    from kernels.chips import H200
    from kernels.problem import Problem

    build("sm_90a", only="trace*")
    found = on_model(Problem(*SHAPE, trans_b=True), 2)
    blocks = found.cycles.shape[0] * found.cycles.shape[2]
    products = blocks * TILING.p * TILING.q * 64 / H200.mma_rate.value
    begin = found.blocks(0)[0, Mark.LOAD_ASKED]
    end = found.cycles[-1, 0, 0, [Mark.WRITTEN, Mark.WRITTEN + CONSUMER]].max()
    assert found.busy(0) == pytest.approx(products / (end - begin), abs=0.02)


@pytest.mark.gpu
def test_step_9_on_the_gpu_agrees_with_the_model(model: Timeline) -> None:
    measured, facts = on_gpu(problem_of(*SHAPE), TILING.cluster)
    assert facts["relative_error"] < 1e-3
    assert 0.5e9 < measured.clock_hz < 2.5e9
    agree(model, measured)
