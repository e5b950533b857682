"""The selector: the cheapest usable variant, with the reason; a class of equal bits that M doesn't enter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.device import Device
from kernels.problem import DType, Epilogue, Precision, Problem, Unsupported
from kernels.selector import CANONICAL_ROWS, Reason, choose, invariant_class, table_key

GPU = Device("test", "sm_90a", sms=4)


@dataclass(frozen=True)
class Fake:
    name: str
    fixed: float = 1.0
    per_row: float = 0.0
    bits: str | None = "serial"
    rows: int = 1 << 30
    step: int = 9

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        return f"it takes at most {self.rows} rows" if problem.m > self.rows else None

    def seconds(self, problem: Problem, device: Device) -> float:
        return self.fixed + self.per_row * problem.m * problem.batch

    def order(self, problem: Problem) -> str | None:
        return self.bits


SMALL = Fake("small", 0.1, 0.1)
LARGE = Fake("large", 1.0, 0.01)
SPLIT = Fake("split", 0.05, 0.2, "split4")
ANY = Fake("any", 0.02, 0.005, None)
FREE = Problem(100, 64, 64, batch_invariant=False)


def test_the_cheapest_by_estimate() -> None:
    choice = choose(FREE, GPU, variants=[SMALL, LARGE])
    assert choice.variant == "large"
    assert choice.reason is Reason.ESTIMATE
    assert "next small" in choice.why
    assert choose(replace(FREE, m=1), GPU, variants=[SMALL, LARGE]).variant == "small"


def test_a_measured_time_overrides() -> None:
    table = {table_key("small", FREE): 1e-6}
    choice = choose(FREE, GPU, table, variants=[SMALL, LARGE])
    assert choice.variant == "small"
    assert choice.reason is Reason.MEASURED
    assert choice.seconds == 1e-6


def test_the_only_one_says_why_not_the_others() -> None:
    choice = choose(FREE, GPU, variants=[LARGE, Fake("tiny", rows=16)])
    assert choice.reason is Reason.ONLY
    assert [c.because for c in choice.candidates] == [None, "it takes at most 16 rows"]


def test_barred_falls_back_and_says_what_it_costs() -> None:
    choice = choose(FREE, GPU, variants=[SMALL, LARGE], barred={"large": "its self-test gave wrong results"})
    assert choice.variant == "small"
    assert choice.reason is Reason.FALLBACK
    assert "wrong results" in choice.why
    slower = choose(replace(FREE, m=1), GPU, variants=[SMALL, LARGE], barred={"large": "x"})
    assert slower.reason is Reason.ESTIMATE


def test_by_name() -> None:
    choice = choose(FREE, GPU, variants=[SMALL, LARGE], variant="small")
    assert choice.reason is Reason.ASKED
    with pytest.raises(Unsupported, match="does not exist"):
        choose(FREE, GPU, variants=[SMALL], variant="nothing")
    with pytest.raises(Unsupported, match="at most 16 rows"):
        choose(FREE, GPU, variants=[Fake("tiny", rows=16)], variant="tiny")
    with pytest.raises(Unsupported, match="bits depend on M"):
        choose(replace(FREE, batch_invariant=True), GPU, variants=[ANY], variant="any")


def test_nothing_left() -> None:
    with pytest.raises(Unsupported, match="small: broken"):
        choose(FREE, GPU, variants=[SMALL], barred={"small": "broken"})
    with pytest.raises(Unsupported, match="no variant"):
        choose(FREE, GPU, variants=[])


def test_invariant_gives_up_speed_and_says_so() -> None:
    problem = replace(FREE, batch_invariant=True)
    choice = choose(problem, GPU, variants=[SMALL, LARGE, ANY])
    assert choice.variant == "large"
    assert choice.reason is Reason.INVARIANT
    assert "any would take" in choice.why


@given(m=st.integers(1, 20_000), batch=st.integers(1, 9), beta=st.sampled_from([0.0, 2.0]))
def test_the_class_does_not_depend_on_rows(m: int, batch: int, beta: float) -> None:
    variants = [SMALL, LARGE, SPLIT, ANY]
    problem = Problem(m, 512, 512, batch=batch, epilogue=Epilogue(beta=beta, c=True))
    bits = {each.name: each.bits for each in variants}
    chosen = choose(problem, GPU, variants=variants).variant
    assert bits[chosen] == invariant_class(replace(problem, m=7, batch=1), GPU, variants=variants)


def test_the_class_can_compute_any_number_of_rows() -> None:
    fast_for_few = Fake("few", 1e-6, 0, "other", rows=CANONICAL_ROWS[-2])
    assert invariant_class(FREE, GPU, variants=[fast_for_few, LARGE]) == "serial"
    assert invariant_class(FREE, GPU, variants=[ANY]) is None
    assert invariant_class(FREE, GPU, variants=[LARGE, SPLIT], barred={"large": "x"}) == "split4"


def test_another_class_serves_where_nothing_in_it_can() -> None:
    problem = Problem(100, 64, 64)
    one = Fake("one", 0.5)
    choice = choose(problem, GPU, variants=[one, SPLIT], barred={"one": "it hung"}, invariant_order="serial")
    assert choice.variant == "split"
    assert choice.reason in (Reason.FALLBACK, Reason.ESTIMATE)


@pytest.mark.parametrize(
    "other",
    [
        {"ldd": 65},
        {"aligned": 8},
        {"trans_b": True},
        {"out_dtype": DType.FP32},
        {"batch_invariant": False},
    ],
    ids=str,
)
def test_a_time_is_kept_for_what_it_was_measured_of(other: dict[str, Any]) -> None:
    plain = Problem(64, 64, 64)
    assert table_key("reference-cublas", plain) != table_key("reference-cublas", replace(plain, **other))
    assert table_key("step9-64x64", plain) == table_key("step9-64x64", replace(plain, batch_invariant=False))
    exact = replace(plain, dtype=DType.FP32, out_dtype=DType.FP32)
    tf32 = replace(exact, precision=Precision.TF32)
    assert table_key("reference-cublas", exact) != table_key("reference-cublas", tf32)
