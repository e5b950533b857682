"""A job's JSON becomes specifications: receives the parsed body, hands on steps whose inputs are held.

Everything is checked at acceptance: names, shapes, dtypes, limits. A stored operand is the version that its
handle meant then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from service.arena import check_fits
from service.batch import Rate
from service.errors import ServiceError
from service.formats import Tensor, numbers
from service.jobs.model import Input, Spec
from service.model import Base64, Handle, StepBody, validate
from service.model import Step as StepReference
from service.plan import NAMES, Plan, given_dtype, params_of, plan
from service.store import Hold, TensorStore

#: Inline numbers above this many bytes of JSON are converted in a thread.
_THREAD_BYTES = 1 << 20

EXAMPLE: dict[str, Any] = {
    "steps": [
        {"id": "first", "a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]},
        {"id": "second", "a": {"step": "first"}, "b": [[1, 0], [0, 1]], "activation": "relu"},
    ]
}


class JobBody(BaseModel):
    """Products to compute, in an order that their dependencies allow."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"examples": [EXAMPLE]})

    steps: list[StepBody] = Field(min_length=1, description="A step may read results of earlier steps")


class Limits(Protocol):
    """The settings that bound a job."""

    @property
    def max_body_bytes(self) -> int: ...
    @property
    def max_json_bytes(self) -> int: ...
    @property
    def max_output_bytes(self) -> int: ...
    @property
    def max_flops(self) -> float: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def key_bytes(self) -> int: ...
    @property
    def job_steps(self) -> int: ...
    @property
    def job_bytes(self) -> int: ...
    @property
    def result_ttl_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose job it is, how many bytes of tensors and results that owner may keep, and whether under handles.

    `rate` is the quota that the steps' FLOPs are taken from.
    """

    name: str
    share: int | None = None
    writes: bool = True
    rate: Rate | None = None


@dataclass(slots=True)
class Draft:
    """A job on its way in. `holds` keeps its inputs."""

    owner: str
    specs: list[Spec] = field(default_factory=list)
    holds: dict[str, Hold] = field(default_factory=dict)
    nbytes: int = 0

    def release(self) -> None:
        """Let the inputs go; again is no harm."""
        for hold in self.holds.values():
            hold.release()


@dataclass(slots=True)
class _Operands:
    """A step's operands: what is known of each, where it comes from, the bytes of those sent with it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Input] = field(default_factory=dict)
    data: dict[str, memoryview] = field(default_factory=dict)


async def decode(
    value: Any, size: int, owner: Owner, store: TensorStore, limits: Limits, now: float
) -> Draft:
    """Check a body of `size` bytes of JSON and hold what it needs, inline operands saved."""
    bodies = list(_bodies(value, limits))
    decoder = _Decoder(Draft(owner.name), size, store, limits, now, owner)
    try:
        for position, body in enumerate(bodies):
            with _at(position):
                await decoder.step(body)
        if owner.share is not None:
            (await store.stock(owner.name)).admit(decoder.draft.nbytes, owner.share)
        await decoder.save()
    except BaseException:
        decoder.draft.release()
        raise
    return decoder.draft


def _bodies(value: Any, limits: Limits) -> Iterator[StepBody]:
    if not isinstance(value, dict) or not isinstance(value.get("steps"), list) or not value["steps"]:
        raise ServiceError("invalid", "steps: a list of at least one step is needed", field="steps")
    unknown = next((key for key in value if key != "steps"), None)
    if unknown is not None:
        raise ServiceError("invalid", f"{unknown[:64]}: isn't known", field=unknown[:64])
    if len(value["steps"]) > limits.job_steps:
        raise ServiceError(
            "invalid",
            f"steps: {len(value['steps'])} are above the limit",
            field="steps",
            limit=limits.job_steps,
        )
    for position, step in enumerate(value["steps"]):
        with _at(position):
            yield validate(StepBody, step)


@contextmanager
def _at(position: int) -> Iterator[None]:
    """Name the step in a refusal."""
    try:
        yield
    except ServiceError as error:
        error.field = f"steps.{position}" + (f".{error.field}" if error.field else "")
        raise


class _Decoder:
    """One job's body, step by step."""

    def __init__(
        self, draft: Draft, size: int, store: TensorStore, limits: Limits, now: float, owner: Owner
    ) -> None:
        self.draft = draft
        self.owner = owner
        self.size = size
        self.store = store
        self.limits = limits
        self.now = now
        self.results: dict[str, Tensor] = {}
        self.handles: dict[str, Hold] = {}
        self.written: set[str] = set()
        self.inline: list[tuple[dict[str, Input], str, Tensor, memoryview]] = []

    async def step(self, body: StepBody) -> None:
        """Check a step and add it to the draft."""
        if body.id in self.results:
            raise ServiceError("invalid", f"id: {body.id!r} names an earlier step already", field="id")
        handle = body.out.handle if isinstance(body.out, Handle) else None
        if handle is not None and not self.owner.writes:
            raise ServiceError("forbidden", "out: this key lacks the scope 'tensors'", field="out")
        if handle is not None and handle in self.written:
            raise ServiceError("invalid", f"out: another step writes to {handle!r}", field="out")
        operands = await self._operands(body)
        made = plan(body, operands.tensors, self.limits)
        self._bound(made, operands)
        for name, data in operands.data.items():
            self.inline.append((operands.inputs, name, operands.tensors[name], data))
        self.results[body.id] = made.out
        if handle is not None:
            self.written.add(handle)
        self.draft.specs.append(self._spec(body, made, operands, handle))

    async def _operands(self, body: StepBody) -> _Operands:
        operands = _Operands()
        for name in NAMES:
            operand = getattr(body, name)
            if isinstance(operand, Handle):
                operands.tensors[name], operands.inputs[name] = await self._stored(name, operand.handle)
            elif isinstance(operand, StepReference):
                operands.tensors[name] = self._result(name, operand.step)
                operands.inputs[name] = Input(step=operand.step)
            elif isinstance(operand, Base64):
                read = partial(numbers.base64, operand.model_dump(), field=name)
                tensor, data = await asyncio.to_thread(read) if self.size > _THREAD_BYTES else read()
                operands.tensors[name], operands.data[name] = tensor, memoryview(data)
        for name in NAMES:
            operand = getattr(body, name)
            if isinstance(operand, list):
                dtype = given_dtype(operands.tensors)
                if name in ("c", "bias"):  # cast to the compute type anyway
                    dtype = "fp64" if dtype == "fp64" else "fp32"
                convert = partial(numbers.taken, operand, dtype, field=name)
                array = await asyncio.to_thread(convert) if self.size > _THREAD_BYTES else convert()
                operands.tensors[name] = Tensor(dtype, array.shape)
                operands.data[name] = array.reshape(-1).view("u1").data
        return operands

    async def _stored(self, name: str, handle: str) -> tuple[Tensor, Input]:
        if handle not in self.handles:
            try:
                self.handles[handle] = await self.store.hold(self.draft.owner, handle)
            except ServiceError as error:
                error.field = name
                raise
        row = self.handles[handle].content.row
        self.draft.holds[row.id] = self.handles[handle]
        return Tensor(row.dtype, row.shape), Input(content=row.id)

    def _result(self, name: str, step: str) -> Tensor:
        if step not in self.results:
            raise ServiceError("invalid", f"{name}: {step!r} names no earlier step", field=name)
        return self.results[step]

    async def save(self) -> None:
        """Write the inline operands, and what of the stored ones isn't on disk yet."""
        holds = list(self.draft.holds.values())
        results = await asyncio.gather(
            *(self._save(*inline) for inline in self.inline),
            *(self.store.contents.write_back(hold.content) for hold in holds),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _save(self, inputs: dict[str, Input], name: str, tensor: Tensor, data: memoryview) -> None:
        hold = await self.store.save(self.draft.owner, data, tensor.nbytes, tensor.dtype, tensor.shape)
        self.draft.holds[hold.content.row.id] = hold
        inputs[name] = Input(content=hold.content.row.id)

    def _bound(self, made: Plan, operands: _Operands) -> None:
        """Refuse a step that could never be computed, or its result never be kept beside the others."""
        self.draft.nbytes += made.out.nbytes + sum(map(len, operands.data.values()))
        limit = min(self.limits.job_bytes, self.store.contents.disk_budget)
        if self.draft.nbytes > limit:
            raise ServiceError("too_large", "inline operands and results are above the limit", limit=limit)
        # A tensor that is several operands is read from one place.
        names = {operands.inputs.get(name, name): name for name in reversed(operands.tensors)}
        read = [{name: operands.tensors[name].nbytes} for name in names.values()]
        share, size = self.limits.key_bytes, self.limits.arena_bytes
        check_fits([{"out": made.out.nbytes}], read, share=share, size=size)

    def _spec(self, body: StepBody, made: Plan, operands: _Operands, handle: str | None) -> Spec:
        return Spec(
            id=body.id,
            inputs=operands.inputs,
            params=params_of(body, made),
            dtype=made.out.dtype,
            shape=made.out.shape,
            handle=handle,
            ttl_seconds=body.ttl_seconds,
            deadline=None if body.deadline_ms is None else self.now + body.deadline_ms / 1e3,
            priority=body.priority,
            rate=self.owner.rate,
            flops=float(made.flops),
        )
