"""Chooses a variant: receives a `Problem`, a `Device` and a table of measured times, hands on a `Choice`.

Pure: no clock, no device, no files. Candidates that support the problem, an estimate for each, the cheapest;
a measured time overrides an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kernels.device import Device
from kernels.problem import Problem, Unsupported


class Reason(StrEnum):
    """Why a variant was chosen: a closed set, fit for a metric label."""

    ONLY = "only"  # nothing else supports the problem
    ESTIMATE = "estimate"  # the cheapest by the analytic estimate
    MEASURED = "measured"  # the cheapest by times measured on this device
    ASKED = "asked"  # the caller named it
    INVARIANT = "invariant"  # the cheapest in the class whose bits don't depend on M
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
class Candidate:
    """One variant as the selector saw it: a time, or why it can't be used."""

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
    """Key of a measured time: what decides speed, not what decides bits."""
    layout = ("t" if problem.trans_a else "n") + ("t" if problem.trans_b else "n")
    shape = f"{problem.batch}x{problem.m}x{problem.n}x{problem.k}"
    return f"{variant}|{shape}|{problem.dtype}>{problem.out_dtype}|{layout}"


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
    still running). invariant_order: the class that a batch-invariant problem must stay in on this device;
    None lets the first supporting variant that has one set it. variant: a name, or "auto".

    Raises Unsupported where no variant is left, or where the named one can't take the problem.
    """
    table = table or {}
    barred = barred or {}
    seen: list[Candidate] = []
    usable: list[Candidate] = []
    refused_better = False
    want_order = invariant_order
    for each in variants:
        if variant not in ("auto", each.name):
            continue
        because = each.unsupported(problem, device)
        if because is None and problem.batch_invariant:
            order = each.order(problem)
            if order is None:
                because = "its bits depend on M, and batch_invariant is set"
            elif want_order is None:
                want_order = order
            elif order != want_order:
                because = f"its order along K ({order}) is not this problem's class ({want_order})"
        if because is None and each.name in barred:
            because = barred[each.name]
            refused_better = True
        if because is not None:
            seen.append(Candidate(each.name, None, because=because))
            continue
        measured = table.get(table_key(each.name, problem))
        seconds = each.seconds(problem, device) if measured is None else measured
        candidate = Candidate(each.name, seconds, measured is not None)
        seen.append(candidate)
        usable.append(candidate)
    if not usable:
        if variant != "auto" and not seen:
            raise Unsupported(f"variant {variant!r} does not exist on {device.name}")
        raise Unsupported("; ".join(f"{c.variant}: {c.because}" for c in seen) or "there is no variant")
    best = min(usable, key=lambda c: c.seconds if c.seconds is not None else float("inf"))
    assert best.seconds is not None
    reason, why = _explain(best, usable, asked=variant != "auto", fallback=refused_better, problem=problem)
    return Choice(best.variant, reason, why, best.seconds, tuple(seen))


def _explain(
    best: Candidate, usable: Sequence[Candidate], *, asked: bool, fallback: bool, problem: Problem
) -> tuple[Reason, str]:
    assert best.seconds is not None
    took = f"{best.seconds * 1e6:.1f} µs {'measured' if best.measured else 'estimated'}"
    if asked:
        return Reason.ASKED, f"asked for by name, {took}"
    if fallback:
        return Reason.FALLBACK, f"{took}; others are barred on this device"
    if len(usable) == 1:
        return Reason.ONLY, f"the only variant that takes this problem, {took}"
    others = [c for c in usable if c is not best]
    runner = min(others, key=lambda c: c.seconds or 0.0)
    assert runner.seconds is not None
    text = f"{took}, next {runner.variant} at {runner.seconds * 1e6:.1f} µs"
    if best.measured:
        return Reason.MEASURED, text
    return (Reason.INVARIANT if problem.batch_invariant else Reason.ESTIMATE), text
