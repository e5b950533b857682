"""Launches on a GPU: receives items whose operands are there, hands on what each launch computes and its events.

Unlike products that gain by it share a launch; the rest have one each, or several where one is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernels import cublas
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.runtime import Repeated, Runtime
from kernels.selector import Choice
from kernels.together import Group, Host
from service.drivers.base import late, problem_of
from service.drivers.events import Events
from service.drivers.flight import Flight, Moved, Run, Stay
from service.drivers.lent import Lent
from service.drivers.tiles import LARGEST, tiles
from service.messages import Item

#: What launching takes in Python: choosing, checking, two events, the call; and a record of a group's table.
HOST = Host(launch=50e-6, member=25e-6)

#: Takes a flight, items, a step and what is the step's besides; the step's outcome, or None where it can't be done.
Guard = Callable[..., Any]


class Launches:
    """Of one GPU. `stream` is the caller's current one; `guard` refuses items for which a step fails."""

    def __init__(self, runtime: Runtime, lent: Lent, events: Events, stream: Any, guard: Guard) -> None:
        self._runtime = runtime
        self._lent = lent
        self._events = events
        self._stream = stream
        self._guard = guard

    def run(self, flight: Flight, moved: Sequence[Moved]) -> list[tuple[Sequence[Item], Any]]:
        """Launch all; what was launched, each with its D."""
        joined: set[int] = set()
        ran: list[tuple[Sequence[Item], Any]] = []
        for numbers, group, parts in self._groups(flight, moved):
            joined.update(numbers)
            members = [moved[number].items[0] for number in numbers]
            if self._guard(flight, members, self._together, group, parts):
                ran += [([item], part.d) for item, (_, part) in zip(members, parts, strict=True)]
        for number, one in enumerate(moved):
            if number not in joined and self._guard(flight, one.items, self._alone, one):
                ran.append((one.items, one.operands.d))
        return ran

    def _groups(
        self, flight: Flight, moved: Sequence[Moved]
    ) -> list[tuple[list[int], Group, list[tuple[Problem, Operands]]]]:
        """Numbers of those that gain by sharing a launch, how, and what the launch takes of each."""
        if len(moved) < 2:
            return []
        able = [number for number, one in enumerate(moved) if self._may_join(flight, one.items, one.operands)]
        if len(able) < 2:
            return []
        asked = [_asked(moved[number].items, moved[number].operands) for number in able]
        return [
            ([able[n] for n in group.numbers], group, [asked[n] for n in group.numbers])
            for group in self._runtime.groups([problem for problem, _ in asked], HOST)
        ]

    def _may_join(self, flight: Flight, items: Sequence[Item], operands: Operands) -> bool:
        """Whether an item may share a launch: nothing of its own was asked for, and its D is nobody's operand."""
        first = items[0]
        return (
            len(items) == 1
            and not flight.batch.reference_only
            and first.params.variant == "auto"
            and not self._lent.on_device(first.out.region)
            and operands.d.numel() > 0
            and max(*operands.d.shape, operands.a.shape[-1]) <= LARGEST
            and late(first) is None
        )

    def _together(
        self, flight: Flight, items: Sequence[Item], group: Group, parts: Sequence[tuple[Problem, Operands]]
    ) -> bool:
        begun, ended = self._events.take(flight), self._events.take(flight)
        self._runtime.launch_group(group.variant, parts, before=partial(begun.record, self._stream))
        ended.record(self._stream)
        flops = sum(problem.flops for problem, _ in parts)
        flight.runs.append(Run(items, group.choice, flops, begun, ended))
        return True

    def _alone(self, flight: Flight, items: Sequence[Item], one: Moved) -> bool:
        if one.stay is not None and not flight.batch.reference_only:
            product = one.stay.product or self._kept(items, one.stay)
            if product is not None:
                self._run(flight, items, product.problem.flops, partial(self._runtime.repeat, product))
                return True
        refusal = late(items[0]) if len(items) == 1 else None
        if refusal is not None:
            flight.ended[items[0].id] = refusal
            return False
        problem, operands = _asked(items, one.operands)
        wanted = cublas.NAME if flight.batch.reference_only else items[0].params.variant
        self._run(flight, items, problem.flops, partial(self._in_tiles, problem, operands, wanted))
        return True

    def _run(self, flight: Flight, items: Sequence[Item], flops: int, run: Callable[..., Choice]) -> None:
        """`run` between two events."""
        begun, ended = self._events.take(flight), self._events.take(flight)
        # Recorded right before the launch, so that busy seconds don't count what Python takes to choose.
        choice = run(before=partial(begun.record, self._stream))
        ended.record(self._stream)
        flight.runs.append(Run(items, choice, flops, begun, ended))

    def _in_tiles(
        self, problem: Problem, operands: Operands, wanted: str, *, before: Callable[[], object]
    ) -> Choice:
        if not operands.d.numel():
            before()
            return self._runtime.choose(replace(problem, m=1, n=1), cublas.NAME)
        for part, views in tiles(problem, operands):
            choice = self._runtime.run(part, views, wanted, before=before)
            before = _nothing
        return choice

    def _kept(self, items: Sequence[Item], stay: Stay) -> Repeated | None:
        """The product of operands that stay, if one launch computes it."""
        problem, operands = _asked(items, stay.operands)
        if not operands.d.numel() or max(problem.m, problem.n, problem.k) > LARGEST:
            return None
        stay.product = Repeated(problem, operands, items[0].params.variant)
        return stay.product


def _nothing() -> None:
    """Before all launches but the first."""


def _asked(items: Sequence[Item], operands: Operands) -> tuple[Problem, Operands]:
    """What is to be computed: rows of a stack as one problem, C of the shape of D where it is read."""
    problem = problem_of(items[0])
    if len(items) > 1:
        problem = replace(problem, m=operands.a.shape[1])
    if problem.epilogue.reads_c and operands.c is not None:
        operands = replace(operands, c=operands.c.expand(operands.d.shape))
    return problem, operands
