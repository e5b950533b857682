"""Step 9 as built, on the virtual GPU: one product in `make test`, the arithmetic of the family in CI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kernels.blackwell.tilings import BIG, BIG_DYNAMIC, SMALL
from kernels.blackwell.variants import Variant, variants
from kernels.build import build
from kernels.device import Device
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem

pytest.importorskip("cutlass")

from kernels.virtual import Options
from kernels.virtual.subject import Case, Subject, operands

ARCH = "sm_100a"
MODULE = "kernels.blackwell.step9_multi_consumer"
F16, BF16, F32 = DType.FP16, DType.BF16, DType.FP32
RAGGED = Problem(536, 280, 200, trans_b=True)  # two tiles of 512×256 and more, K past two stages


def verify(variant: Variant, problem: Problem, *, schedules: int = 3, sms: int = 4) -> None:
    """Build the function, run it, compare with the reference."""
    name = variant.function(problem)
    build(ARCH, only=name, modules=[MODULE])
    subject, case = Subject(ARCH), Case(9, name, problem, variant)
    assert subject.libraries.info(name).smem_bytes == variant.tiling.smem_bytes
    outcome = subject.verify(case, schedules=schedules, options=Options(sms=sms))
    assert outcome.ok, f"{case}\n{outcome.text()}"
    assert not outcome.report.lints, "\n".join(map(str, outcome.report.lints))


@pytest.mark.timeout(300)  # it may have to be built first
def test_the_product_is_right_under_every_schedule() -> None:
    verify(Variant(BIG), replace(RAGGED, m=264, n=136, k=320))


def family() -> Iterator[tuple[Variant, Problem]]:
    """Each kind of choice at least once: tilings, layouts, types, outputs, epilogues, batches."""
    everything = Epilogue(alpha=-0.5, beta=2.0, c=True, bias=BiasDim.N, activation=Activation.RELU)
    yield Variant(BIG), replace(RAGGED, epilogue=everything)
    yield Variant(BIG), replace(RAGGED, out_dtype=F32, dtype=BF16, epilogue=everything)  # C by plain loads
    yield Variant(BIG), replace(RAGGED, m=200, epilogue=Epilogue(alpha=0.0, bias=BiasDim.M))
    yield Variant(BIG), replace(RAGGED, m=40, n=72, epilogue=Epilogue(activation=Activation.GELU))
    yield Variant(BIG), replace(RAGGED, trans_a=True, trans_b=False)
    yield Variant(SMALL), replace(RAGGED, m=17, n=200)  # boxes of 24 rows; the other CTA's are past the edge
    yield Variant(BIG_DYNAMIC), replace(RAGGED, m=1032, n=264, k=72)
    yield (
        Variant(BIG_DYNAMIC),
        replace(RAGGED, m=264, k=72, batch=3, out_dtype=F32, epilogue=Epilogue(beta=1.0, c=True)),
    )
    yield Variant(SMALL), replace(RAGGED, m=528, k=456, trans_a=True)
    yield Variant(SMALL), replace(RAGGED, m=264, batch=2, dtype=BF16, out_dtype=BF16, trans_b=False)
    yield Variant(SMALL, plain=True), replace(RAGGED, m=300, n=281, k=72, epilogue=everything)
    yield Variant(SMALL, plain=True), replace(RAGGED, m=41, n=37, out_dtype=BF16, batch=2)


@dataclass(frozen=True, slots=True)
class Ordered(Variant):
    """A variant that visits tiles in a given order."""

    order_of_tiles: int = 1

    def raster(self, problem: Problem, device: Device) -> int:
        """The given order."""
        return self.order_of_tiles


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("raster", [0, 1, 2, -1, -2, -5])
def test_every_order_visits_every_tile_once(raster: int) -> None:
    """D starts as NaN; 3×3 tiles of two products on two clusters, the last group of rows or columns not full."""
    variant = Ordered(SMALL, order_of_tiles=raster)
    verify(variant, replace(RAGGED, m=520, n=520, k=64, batch=2), schedules=1)


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_all_tilings_leave_the_same_bits() -> None:
    """They are one class of equal bits (`Variant.order`): no tile, scheduler or way of storing changes a sum."""
    tail = Epilogue(alpha=0.3, beta=1.7, c=True, bias=BiasDim.N, activation=Activation.SILU)
    problem = replace(RAGGED, m=120, n=72, k=328, out_dtype=F16, epilogue=tail)
    given = operands(problem)
    left: dict[str, bytes] = {}
    for variant in variants():
        name = variant.function(problem)
        build(ARCH, only=name, modules=[MODULE])
        report = Subject(ARCH).run(Case(9, name, problem, variant), given, schedules=1)
        assert report.ok, str(report)
        left[name] = given.d.tobytes()
    assert len(left) == 4
    assert len(set(left.values())) == 1, left.keys()


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("variant", "problem"), list(family()), ids=lambda x: getattr(x, "name", None))
def test_the_family_is_right_under_every_schedule(variant: Variant, problem: Problem) -> None:
    verify(variant, problem)
