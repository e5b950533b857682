"""Jobs as the caller sees them: receives steps that name each other, hands on the JSON that submits them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.client.device import on_host
from service.client.tensors import Array, Handle, matrix, tensor

ENDED = frozenset({"done", "failed", "cancelled"})
STEP_ENDED = ENDED | {"skipped"}


@dataclass(frozen=True, eq=False)
class Step:
    """One product of a job. Its operands are arrays, handles, or earlier steps, standing for their results.

    `options` are those of `Client.gemm`: alpha, beta, trans_a, activation …; `out` a Handle to keep D.
    """

    id: str
    a: Array | Handle | Step
    b: Array | Handle | Step
    c: Array | Handle | Step | None = None
    bias: Array | Handle | Step | None = None
    out: Handle | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepState:
    """How a step stands: queued, running, done, failed, cancelled or skipped, and why where it failed."""

    id: str
    state: str
    detail: str = ""
    variant: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """How a job stands: queued, running, done, failed or cancelled. `document` is all the service said."""

    id: str
    state: str
    steps: tuple[StepState, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ENDED

    @property
    def steps_ended(self) -> int:
        """Number of steps that are over, for progress."""
        return sum(step.state in STEP_ENDED for step in self.steps)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Job:
        """From the service's JSON."""
        steps = tuple(_step(row) for row in document.get("steps", ()) if isinstance(row, Mapping))
        return cls(str(document["id"]), str(document["state"]), steps, document)


def _step(row: Mapping[str, Any]) -> StepState:
    error = row.get("error")
    detail = row.get("detail") or (error.get("detail", "") if isinstance(error, Mapping) else error) or ""
    return StepState(str(row["id"]), str(row["state"]), str(detail), str(row.get("variant") or ""), row)


def document(steps: Iterable[Step]) -> dict[str, Any]:
    """The body of POST /jobs."""
    return {"steps": [_one(step) for step in steps]}


def _one(step: Step) -> dict[str, Any]:
    made: dict[str, Any] = {"id": step.id, **step.options}
    for name in ("a", "b"):
        made[name], turned = _matrix(getattr(step, name), name)
        if turned:
            made[f"trans_{name}"] = not made.get(f"trans_{name}", False)
    for name in ("c", "bias"):
        value = getattr(step, name)
        if value is not None:
            made[name] = _reference(value) or _inline(value, name)
    if step.out is not None:
        made["out"] = {"handle": step.out.name}
    return made


def _matrix(value: Any, name: str) -> tuple[dict[str, Any], bool]:
    reference = _reference(value)
    if reference is not None:
        return reference, False
    wired, turned = matrix(value, name)
    return {
        "b64": base64.b64encode(on_host(wired.data)).decode(),
        "dtype": wired.dtype,
        "shape": wired.shape,
    }, turned


def _reference(value: Any) -> dict[str, Any] | None:
    if isinstance(value, Step):
        return {"step": value.id}
    if isinstance(value, Handle):
        return {"handle": value.name}
    return {"handle": value} if isinstance(value, str) else None


def _inline(value: Any, name: str) -> dict[str, Any]:
    wired = tensor(value, name)
    return {"b64": base64.b64encode(on_host(wired.data)).decode(), "dtype": wired.dtype, "shape": wired.shape}
