"""The model: barriers as the hardware has them, schedules that keep their invariants, times near published ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from kernels.engines import Engines
from kernels.model import Barrier, Cta, Machine
from kernels.predict import PUBLISHED, seconds, timeline
from kernels.schedules import CHIP_OF, CHIPS, SCHEDULES, Rates, Schedule, lockstep

ALL = [(arch, step) for arch, steps in SCHEDULES.items() for step in steps if not steps[step].copied]


def played(schedule: Schedule, tiles: int = 2, k_tiles: int = 8) -> tuple[Machine, list[dict[str, Any]]]:
    machine = Machine()
    chip: Rates = CHIPS[CHIP_OF[schedule.arch]]
    Cta(machine, Engines(chip.chip), chip, schedule).run(tiles, k_tiles)
    return machine, machine.run()


def test_a_barrier_flips_when_arrivals_and_bytes_are_in() -> None:
    machine, barrier = Machine(), Barrier("tma2mma", 0, 1)
    assert barrier.passes(1)
    assert not barrier.passes(0)
    barrier.nbytes += 64
    machine.arrive(barrier, "TMA")
    assert barrier.bit == 0
    machine.arrive(barrier, "TMA", nbytes=64, arrivals=0)
    assert barrier.bit == 1
    assert barrier.pending == 1
    assert barrier.passes(0)


@pytest.mark.parametrize(("arch", "step"), ALL)
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_no_product_reads_what_is_not_there_and_no_load_overwrites_what_is_not_read(
    arch: str, step: int, depth: int
) -> None:
    schedule = replace(SCHEDULES[arch][step], depth=depth, ahead=depth)
    machine, stuck = played(schedule)
    assert not stuck
    loads = [span for span in machine.spans if span["what"] == "load"]
    products = [span for span in machine.spans if span["what"] == "mma"]
    assert len(loads) == 16
    assert len(products) == 16 * schedule.consumers
    landed = {(span["tile"], span["k"]): span for span in loads}
    for product in products:
        assert product["begin"] >= landed[product["tile"], product["k"]]["end"]
    for stage in range(depth):
        mine = [span for span in loads if span["stage"] == stage]
        for earlier, later in itertools.pairwise(mine):
            read = [p for p in products if (p["tile"], p["k"]) == (earlier["tile"], earlier["k"])]
            assert later["asked"] >= max(p["end"] for p in read)
    for lane in ("TMA", "tensor core", "TMA store"):
        mine = sorted((s["begin"], s["end"]) for s in machine.spans if s["lane"] == lane)
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(mine)), lane


@pytest.mark.parametrize("step", [7, 8, 9])
def test_an_accumulator_is_not_overwritten_before_it_is_drained(step: int) -> None:
    machine, _ = played(SCHEDULES["sm_100a"][step], tiles=3)
    for consumer in range(SCHEDULES["sm_100a"][step].consumers):
        spans = [span for span in machine.spans if span.get("consumer") == consumer]
        for tile in (0, 1):
            read = max(s["end"] for s in spans if s["what"] == "read" and s["tile"] == tile)
            again = min(s["begin"] for s in spans if s["what"] == "mma" and s["tile"] == tile + 1)
            assert again >= read


@pytest.mark.parametrize(("arch", "step"), ALL)
def test_equal_phases_deadlock_at_once(arch: str, step: int) -> None:
    machine, stuck = played(replace(SCHEDULES[arch][step], same_phase=True))
    assert not [span for span in machine.spans if span["what"] == "mma"]
    assert {"barrier": "mma2tma", "index": 0, "phase": 0, "bit": 0}.items() <= stuck[0].items()


def test_the_lesson_a_third_in_lockstep_nearly_all_when_specialised() -> None:
    shown = timeline("sm_100a", 9, 4, 8, 2)
    assert 0.25 < shown["lockstep"]["kpis"]["steady"]["tensor core"] < 0.40
    assert shown["chosen"]["kpis"]["steady"]["tensor core"] > 0.95
    assert shown["chosen"]["nanoseconds"] < 0.5 * shown["lockstep"]["nanoseconds"]


def test_the_first_moment_is_as_told() -> None:
    chosen = timeline("sm_100a", 9, 4, 8, 2)["chosen"]
    producer = next(w for w in chosen["waits"] if w["barrier"] == "mma2tma")
    consumer = next(w for w in chosen["waits"] if w["barrier"] == "tma2mma")
    assert (producer["phase"], producer["bit"], producer["end"]) == (1, 0, 0.0)
    assert (consumer["phase"], consumer["bit"]) == (0, 0)
    assert consumer["end"] > 0


def test_a_deeper_ring_is_never_slower() -> None:
    for arch, step in [("sm_100a", 7), ("sm_100a", 9), ("sm_90a", 7)]:
        ends = [timeline(arch, step, depth, 16, 2)["chosen"]["nanoseconds"] for depth in range(1, 7)]
        assert all(b <= a * 1.001 for a, b in itertools.pairwise(ends)), ends


def test_lockstep_computes_the_same_tiles() -> None:
    for schedule in SCHEDULES["sm_100a"].values():
        both = [played(schedule)[0], played(lockstep(schedule))[0]]
        clocks = [sum(s["end"] - s["begin"] for s in m.spans if s["what"] == "mma") for m in both]
        assert clocks[0] == pytest.approx(clocks[1])


def test_predictions_lie_within_a_quarter_of_the_published_ladder() -> None:
    """One CTA an SM, as the published kernels ran; no parameter is fitted to a step."""
    for row in PUBLISHED["b200"]:
        if row["step"] >= 4:
            took = seconds("b200", SCHEDULES["sm_100a"][row["step"]], 4096, 4096, 4096, 1)
            assert took == pytest.approx(row["seconds"], rel=0.25), row


def test_schedules_have_the_shapes_of_the_kernels() -> None:
    from kernels.blackwell.tilings import BIG
    from kernels.hopper.tilings import FAMILY

    ours, theirs = SCHEDULES["sm_100a"][9], BIG
    assert (ours.depth, ours.consumers, ours.load_bytes) == (
        theirs.depth,
        theirs.consumers,
        theirs.stage_bytes,
    )
    hopper = SCHEDULES["sm_90a"][9]
    big = next(m.tiling for m in FAMILY if m.tiling.name == "128x256-2x1")
    assert (hopper.load_bytes, hopper.cta) == (big.stage_bytes, (big.p, big.q))
