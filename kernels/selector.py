"""Chooses a variant: receives a `Problem`, a `Device` and a table of measured times, hands on a `Choice`.

Pure: no clock, no device, no files. Candidates that support the problem, an estimate for each, the cheapest;
a measured time overrides an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from kernels.device import Device
from kernels.problem import DType, Epilogue, Problem, Unsupported


class Reason(StrEnum):
    """Why a variant was chosen: a closed set, fit for a metric label."""

    ONLY = "only"  # nothing else supports the problem
    ESTIMATE = "estimate"  # the cheapest by the analytic estimate
    MEASURED = "measured"  # the cheapest by times measured on this device
    ASKED = "asked"  # the caller named it
    INVARIANT = "invariant"  # a faster one has another order along K, and batch_invariant is set
    FALLBACK = "fallback"  # the better ones are quarantined or not admitted yet


class Variant(Protocol):
    """A way to compute a problem. Implementations are frozen dataclasses, hashable, and import no torch."""

    @property
    def name(self) -> str:
        """Stable name in the API, such as "reference-numpy" or "step9-128x256-2x1"."""
        ...

    @property
    def step(self) -> int:
        """Rung of the ladder, 1 to 9; 0 for a reference library."""
        ...

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """None where the variant takes the problem, else why not (reads on from "because")."""
        ...

    def seconds(self, problem: Problem, device: Device) -> float:
        """Estimated time in seconds."""
        ...

    def order(self, problem: Problem) -> str | None:
        """Class of equal bits (order of accumulation along K); None where a row's bits depend on M."""
        ...


@dataclass(frozen=True, slots=True)
class Unequal:
    """A variant whose rows were seen with other bits than its class promises on this device."""

    variant: Variant

    @property
    def name(self) -> str:
        """The variant's."""
        return self.variant.name

    @property
    def step(self) -> int:
        """The variant's."""
        return self.variant.step

    def unsupported(self, problem: Problem, device: Device) -> str | None:
        """The variant's."""
        return self.variant.unsupported(problem, device)

    def seconds(self, problem: Problem, device: Device) -> float:
        """The variant's."""
        return self.variant.seconds(problem, device)

    def order(self, problem: Problem) -> str | None:
        """None: not for batch-invariant problems."""
        return None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One variant as the selector saw it: its time, and why it can't be used, if so."""

    variant: str
    seconds: float | None
    measured: bool = False
    because: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The variant to run. `why` is a sentence for people; `reason` its kind for metrics."""

    variant: str
    reason: Reason
    why: str
    seconds: float
    candidates: tuple[Candidate, ...] = ()


def table_key(variant: str, problem: Problem) -> str:
    """Key of a measured time: what decides speed. For equal bits a reference computes otherwise, own kernels don't."""
    layout = ("t" if problem.trans_a else "n") + ("t" if problem.trans_b else "n")
    shape = f"{problem.batch}x{problem.m}x{problem.n}x{problem.k}"
    types = f"{problem.dtype}>{problem.out_dtype}"
    whole = problem.aligned >= 16 and not problem.leading[3] * problem.out_dtype.itemsize % 16
    marks = (
        "" if whole else "|by element",
        "|equal bits" if problem.batch_invariant and variant.startswith("reference-") else "",
        f"|{problem.precision}" if problem.dtype is DType.FP32 else "",
    )
    return f"{variant}|{shape}|{types}|{layout}{''.join(marks)}"


# Rows at which classes of equal bits are compared: a token, stacked requests, a prompt, a large product.
CANONICAL_ROWS = (1, 16, 128, 1024, 8192)


def invariant_class(
    problem: Problem,
    device: Device,
    *,
    variants: Sequence[Variant],
    barred: Mapping[str, str] | None = None,
) -> str | None:
    """The class of equal bits for the problem's N, K and types on this device; None where no variant has one.

    M, batch and the epilogue's values don't enter, nor does a table of measured times, which another run may
    have changed. Of the classes that can compute any M, the one that loses the least against the fastest
    variant over the canonical M, in the geometric mean.
    """
    barred = barred or {}
    losses: dict[str, float] = {}
    covered: dict[str, int] = {}
    for m in CANONICAL_ROWS:
        canonical = _canonical(problem, m)
        best: dict[str, float] = {}
        for each in variants:
            order = each.order(canonical)
            if order is None or each.name in barred or each.unsupported(canonical, device) is not None:
                continue
            best[order] = min(best.get(order, math.inf), each.seconds(canonical, device))
        fastest = min(best.values(), default=1.0)
        for order, seconds in best.items():
            losses[order] = losses.get(order, 0.0) + math.log(seconds / fastest)
            covered[order] = covered.get(order, 0) + 1
    widest = max(covered.values(), default=0)
    return min((order for order in losses if covered[order] == widest), key=losses.__getitem__, default=None)


def _canonical(problem: Problem, m: int) -> Problem:
    """The problem with M rows, one product, no epilogue, rows that start at multiples of 128 elements.

    In one layout: a tensor of one row lies both ways at once, so a class that followed the layout would follow M.
    """
    return replace(
        problem,
        m=m,
        trans_a=False,
        trans_b=True,
        batch=1,
        epilogue=Epilogue(),
        a_broadcast=False,
        b_broadcast=False,
        lda=-(-max(m, problem.k) // 128) * 128,
        ldb=-(-max(problem.n, problem.k) // 128) * 128,
        ldc=0,
        ldd=0,
        aligned=128,
    )


def choose(
    problem: Problem,
    device: Device,
    table: Mapping[str, float] | None = None,
    *,
    variants: Sequence[Variant],
    barred: Mapping[str, str] | None = None,
    invariant_order: str | None = None,
    variant: str = "auto",
) -> Choice:
    """Choose among `variants`.

    table: measured seconds by `table_key`. barred: variants that may not run and why (quarantine, self-test
    still running). invariant_order: the class that a batch-invariant problem must stay in, where the caller
    keeps what `invariant_class` said; where nothing in it takes the problem, another class serves. variant: a
    name, or "auto".

    Raises Unsupported where no variant is left, or where the named one can't take the problem.
    """
    barred = barred or {}
    asked = variant != "auto"
    considered = [each for each in variants if not asked or each.name == variant]
    if not considered:
        raise Unsupported(
            f"variant {variant!r} does not exist on {device.name}" if asked else "there is no variant"
        )
    wanted = None
    if problem.batch_invariant and not asked:
        wanted = invariant_order or invariant_class(problem, device, variants=variants, barred=barred)
    seen = [_candidate(each, problem, device, table or {}, barred, wanted) for each in considered]
    usable = [candidate for candidate in seen if candidate.because is None]
    if not usable and wanted is not None:
        seen = [_candidate(each, problem, device, table or {}, barred, None) for each in considered]
        usable = [candidate for candidate in seen if candidate.because is None]
    if not usable:
        raise Unsupported("; ".join(f"{c.variant}: {c.because}" for c in seen))
    best = min(usable, key=_time)
    reason, why = _explain(best, seen, asked, barred)
    return Choice(best.variant, reason, why, _time(best), tuple(seen))


def _candidate(
    each: Variant,
    problem: Problem,
    device: Device,
    table: Mapping[str, float],
    barred: Mapping[str, str],
    wanted: str | None,
) -> Candidate:
    because = each.unsupported(problem, device)
    if because is not None:
        return Candidate(each.name, None, because=because)
    if problem.batch_invariant:
        order = each.order(problem)
        if order is None:
            because = "its bits depend on M, and batch_invariant is set"
        elif wanted not in (None, order):
            because = f"its order along K ({order}) is not the class ({wanted}) of this N and K"
    measured = table.get(table_key(each.name, problem))
    seconds = each.seconds(problem, device) if measured is None else measured
    return Candidate(each.name, seconds, measured is not None, barred.get(each.name, because))


def _time(candidate: Candidate) -> float:
    return math.inf if candidate.seconds is None else candidate.seconds


def _explain(
    best: Candidate, seen: Sequence[Candidate], asked: bool, barred: Mapping[str, str]
) -> tuple[Reason, str]:
    took = f"{_told(_time(best))} {'measured' if best.measured else 'estimated'}"
    if asked:
        return Reason.ASKED, f"asked for by name, {took}"
    others = [c for c in seen if c is not best and c.seconds is not None]
    if not others:
        return Reason.ONLY, f"the only variant that takes this problem, {took}"
    faster = min(others, key=_time)
    if faster.because is not None and _time(faster) < _time(best):
        held = f"{took}; {faster.variant} would take {_told(_time(faster))}, but {faster.because}"
        return (Reason.FALLBACK if faster.variant in barred else Reason.INVARIANT), held
    text = f"{took}, next {faster.variant} at {_told(_time(faster))}"
    return (Reason.MEASURED if best.measured else Reason.ESTIMATE), text


def _told(seconds: float) -> str:
    """A duration for people."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.1f} µs"
