"""What a client can ask: receives arguments, hands on generators of calls and pauses that return results.

Each operation is written once; `Client` drives it with threads and sleeps, `AsyncClient` with an event
loop. The generator is sent the Reply to a Call, or thrown the ConnectionFailed; a Pause is slept through.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from service.client import fields, jobs, tensors
from service.client.device import Bytes, OnDevice
from service.client.errors import ConnectionFailed, GemmError, JobFailed, TimedOut, refusal
from service.client.fields import JSON, RAW, Query
from service.client.jobs import Job, Step
from service.client.local import result_of
from service.client.tensors import Array, Handle, Tensor
from service.client.wire import Call, Head, Reply

_RAW_BOTH_WAYS = (("content-type", RAW), ("accept", RAW))
#: Replies after which the same request may succeed: too many, no worker, draining, no room in the arena.
_BUSY = frozenset({429, 503, 507})


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


@dataclass(slots=True)
class Made:
    """A product: the reply, and D as an array, or the handle that it was kept under."""

    reply: Reply
    array: Array
    handle: Handle | None


T = TypeVar("T")
Operation = Generator[Call | Pause, Reply | None, T]


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a refused or broken call is tried, and how long it is waited for in between, seconds."""

    attempts: int = 5
    first_pause: float = 0.1
    longest_pause: float = 10.0

    def pause(self, attempt: int, asked: float | None) -> float:
        """Before attempt `attempt + 1`, seconds: as long as the service asked, else doubling; each with chance.

        `longest_pause` bounds both: what the service asks for is an estimate.
        """
        if asked is not None:
            return min(self.longest_pause, asked * random.uniform(1.0, 1.1))
        return min(self.longest_pause, self.first_pause * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Result:
    """A product and what the service told of it. `array` is None where D was kept, under `handle`."""

    array: Array
    handle: Handle | None
    variant: str
    reason: str
    queue_seconds: float
    compute_seconds: float
    request_id: str


def attempt(
    call: Call, retries: Retries, deadline: float, *, busy: frozenset[int] = _BUSY
) -> Operation[Reply]:
    """The call's successful reply, tried again while that may help and the deadline allows it."""
    number = 0
    while True:
        number += 1
        failure: GemmError
        asked: float | None = None
        try:
            reply = yield call
        except TimedOut:
            raise
        except ConnectionFailed as error:
            if error.sent and not call.idempotent:
                raise
            failure = error
        else:
            assert reply is not None
            if reply.status < 300:
                return reply
            refused = refusal(reply.status, reply.head.headers, reply.body)
            if reply.status not in busy:
                raise refused
            failure, asked = refused, refused.retry_after
        pause = retries.pause(number, asked)
        if number >= retries.attempts or time.monotonic() + pause >= deadline:
            raise failure
        yield Pause(pause)


class Operations:
    """Builds the operations of one client."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries

    def _json(
        self, method: str, target: str, deadline: float, body: Any = None, **options: Any
    ) -> Operation[Any]:
        headers: tuple[tuple[str, str], ...] = (("accept", JSON), *options.pop("headers", ()))
        parts: tuple[bytes, ...] = ()
        busy = options.pop("busy", _BUSY)
        if body is not None:
            headers += (("content-type", JSON),)
            parts = (json.dumps(body).encode(),)
        call = Call(method, target, headers, parts, **options)
        reply = yield from attempt(call, self._retries, deadline, busy=busy)
        return json.loads(reply.body) if reply.body else None

    # -- products -------------------------------------------------------------------------------

    def gemm(
        self,
        a: Array | Handle | str,
        b: Array | Handle | str,
        c: Array | Handle | str | None,
        bias: Array | Handle | str | None,
        *,
        out: Array | Handle | None,
        options: Mapping[str, Any],
        deadline: float,
    ) -> Operation[Made]:
        """D, as raw bytes both ways."""
        given = (a, b, c, bias)
        query, parts = fields.operands(given, options)
        if isinstance(out, Handle):
            target = fields.gemm_path((*query, ("out", f"handle:{out.name}")))
            call = Call("POST", target, (("content-type", RAW), ("accept", JSON)), parts)
            reply = yield from attempt(call, self._retries, deadline)
            return Made(reply, None, fields.kept(json.loads(reply.body)))
        made = _on_gpu(query, given) if out is None else None
        try:
            reply, array = yield from self._product(query, parts, made if out is None else out, deadline)
        except tensors.Unfit:
            if made is None:
                raise
            # What the service keeps isn't of the shape any more that its Handle tells.
            reply, array = yield from self._product(query, parts, None, deadline)
        return Made(reply, array if out is not None else tensors.as_like(array, given), None)

    def _product(
        self, query: Query, parts: tuple[Bytes, ...], into: Array | None, deadline: float
    ) -> Operation[tuple[Reply, Array]]:
        """D in `into`, or in a fresh numpy array; Unfit where it isn't of that shape and dtype."""
        given = tensors.target(into) if into is not None else None
        place = _Place(given)
        data = None
        if given is not None:
            query, data = (("out_dtype", given.dtype), *query), given.data
        call = Call("POST", fields.gemm_path(query), _RAW_BOTH_WAYS, parts, place.take, into=data)
        reply = yield from attempt(call, self._retries, deadline)
        if into is not None:
            place.deliver(reply)
            return reply, into
        return reply, place.array if place.array is not None else _late(reply)

    def choose(self, m: int, n: int, k: int, options: Mapping[str, Any], deadline: float) -> Operation[Any]:
        """What would run, and why."""
        question = {"m": m, "n": n, "k": k, **options}
        return (yield from self._json("POST", "/variants/choose", deadline, question))

    def read(self, target: str, deadline: float) -> Operation[Any]:
        """A JSON document."""
        return (yield from self._json("GET", target, deadline))

    def text(self, target: str, deadline: float) -> Operation[str]:
        """A text, such as the metrics."""
        reply = yield from attempt(Call("GET", target), self._retries, deadline)
        return reply.body.decode()

    # -- stored tensors -------------------------------------------------------------------------

    def put(
        self,
        name: str,
        value: Array | Path,
        *,
        ttl_seconds: float | None,
        if_match: str | None,
        replace: bool,
        deadline: float,
    ) -> Operation[Handle]:
        """Keep an array, or a .npy or .safetensors file, under a name."""
        query: dict[str, Any] = {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
        headers: list[tuple[str, str]] = [("accept", JSON)]
        if if_match is not None:
            headers.append(("if-match", f'"{if_match}"'))
        if not replace:
            headers.append(("if-none-match", "*"))
        data: Bytes
        if isinstance(value, Path):
            data, media = fields.mapped(value)
        else:
            wired = tensors.tensor(tensors.adopt(value), "the array")
            data, media = wired.data, RAW
            query |= {"dtype": wired.dtype, "shape": fields.shape_text(wired.shape)}
        headers.append(("content-type", media))
        # A conditional PUT whose reply was lost would find its own tensor there the second time.
        idempotent = replace and if_match is None
        call = Call("PUT", fields.tensor_path(name, query), tuple(headers), (data,), idempotent=idempotent)
        reply = yield from attempt(call, self._retries, deadline)
        return fields.kept({"name": name, **json.loads(reply.body or b"{}")})

    def get(self, name: str, out: Array | None, like: Array | None, deadline: float) -> Operation[Array]:
        """A kept tensor, as an array."""
        return (yield from self._fetch(fields.tensor_path(name), out, like, deadline))

    def head(self, name: str, deadline: float) -> Operation[Handle]:
        """What is known of a kept tensor."""
        reply = yield from attempt(
            Call("HEAD", fields.tensor_path(name), (("accept", RAW),)), self._retries, deadline
        )
        headers = reply.head.headers
        return Handle(
            name,
            headers.get("etag", "").strip('"') or None,
            headers.get("x-gemm-dtype"),
            fields.parse_shape(headers["x-gemm-shape"]) if "x-gemm-shape" in headers else None,
        )

    def delete(self, name: str, if_match: str | None, deadline: float) -> Operation[None]:
        """Forget a kept tensor."""
        headers = () if if_match is None else (("if-match", f'"{if_match}"'),)
        yield from attempt(Call("DELETE", fields.tensor_path(name), headers), self._retries, deadline)

    def tensors(self, deadline: float) -> Operation[list[Handle]]:
        """All kept tensors, page by page."""
        rows = yield from self._pages("/tensors", "tensors", deadline)
        return [fields.kept(row) for row in rows]

    def _pages(self, path: str, field: str, deadline: float) -> Operation[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        target = path
        while True:
            page = yield from self._json("GET", target, deadline)
            rows += page[field]
            if not page.get("next"):
                return rows
            target = f"{path}?{urlencode({'after': page['next']})}"

    def _fetch(self, target: str, out: Array | None, like: Array | None, deadline: float) -> Operation[Array]:
        place = _Place(tensors.target(out) if out is not None else None)
        call = Call("GET", target, (("accept", RAW),), (), place.take)
        reply = yield from attempt(call, self._retries, deadline)
        if out is not None:
            place.deliver(reply)
            return out
        array = place.array if place.array is not None else _late(reply)
        return tensors.as_like(array, [like])

    # -- jobs -----------------------------------------------------------------------------------

    def submit(self, steps: Iterable[Step], key: str | None, deadline: float) -> Operation[Job]:
        """Hand a job in. The idempotency key makes it one job however often it is sent."""
        headers = (("idempotency-key", key or uuid.uuid4().hex),)
        # 409: the first of two equal requests is still arriving.
        busy = _BUSY | {409}
        told = yield from self._json(
            "POST", "/jobs", deadline, jobs.document(steps), headers=headers, busy=busy
        )
        return Job.of(told)

    def job(self, job_id: str, wait: float | None, deadline: float) -> Operation[Job]:
        """How a job stands, at once or when it has ended or `wait` seconds have passed."""
        query = "" if wait is None else f"?wait={wait:g}"
        return Job.of((yield from self._json("GET", f"/jobs/{quote(job_id, safe='')}{query}", deadline)))

    def wait(
        self, job_id: str, deadline: float, progress: Callable[[Job], None] | None = None
    ) -> Operation[Job]:
        """The job once it has ended; JobFailed where it isn't done, TimedOut where it takes too long."""
        wait = 5.0 if progress is None else 0.25
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"job {job_id} has not ended in the time given", sent=True)
            job = yield from self.job(job_id, min(wait, left), deadline + 5.0)
            if progress is not None:
                progress(job)
            if job.ended:
                break
        if job.state != "done":
            told = "; ".join(
                f"{step.id}: {step.state} {step.detail}".rstrip()
                for step in job.steps
                if step.state != "done"
            )
            raise JobFailed(f"job {job.id} {job.state}: {told}", job)
        return job

    def result(
        self, job_id: str, step: str, out: Array | None, like: Array | None, deadline: float
    ) -> Operation[Array]:
        """A step's result, as an array."""
        target = f"/jobs/{quote(job_id, safe='')}/steps/{quote(step, safe='')}/result"
        return (yield from self._fetch(target, out, like, deadline))

    def cancel(self, job_id: str, deadline: float) -> Operation[None]:
        """Cancel a job."""
        call = Call("DELETE", f"/jobs/{quote(job_id, safe='')}")
        yield from attempt(call, self._retries, deadline)

    def jobs(self, deadline: float) -> Operation[list[Job]]:
        """All jobs, page by page."""
        rows = yield from self._pages("/jobs", "jobs", deadline)
        return [Job.of(row) for row in rows]


def _on_gpu(query: Query, given: Iterable[Any]) -> Array | None:
    """Memory for a D that is wanted on a GPU, so that a service on the same GPU writes it there; else None."""
    kept: list[tuple[str, str]] = []
    for name, value in zip(("a", "b", "c"), given, strict=False):
        if fields.handle_of(value) is None:
            continue
        if not isinstance(value, Handle) or value.shape is None or value.dtype is None:
            return None
        kept.append((f"{name}_shape", fields.shape_text(tuple(value.shape))))
        if name != "c":
            kept.insert(0, ("dtype", value.dtype))
    found = _result_told((*kept, *query))
    if found is None or found[0] not in tensors.DTYPES:
        return None
    return tensors.on_gpu_like(given, *found)


@lru_cache(256)
def _result_told(query: Query) -> tuple[str, tuple[int, ...]] | None:
    return result_of(dict(query))


class _Place:
    """Where a result goes: the caller's array, or one made when the reply's head tells its shape."""

    def __init__(self, given: Tensor | None) -> None:
        self.given = given
        self.array: Array | None = None

    def take(self, head: Head) -> memoryview | None:
        """See wire.Sink; an error's document is not for the array."""
        if head.status >= 300 or "x-gemm-shape" not in head.headers:
            return None
        dtype, shape = self._check(head)
        if self.given is not None and isinstance(self.given.data, memoryview):
            return self.given.data
        self.array, view = tensors.empty(dtype, shape)
        return view

    def deliver(self, reply: Reply) -> None:
        """Bring a result that came to this process's memory to where it was wanted."""
        if reply.in_place:
            self._check(reply.head)
        elif self.given is not None and isinstance(self.given.data, OnDevice):
            self.given.data.fill(self.array if self.array is not None else _late(reply))

    def _check(self, head: Head) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape that a head tells; Unfit where the caller's array isn't so."""
        dtype, shape = fields.dtype_and_shape(head)
        if self.given is not None:
            tensors.check_target(self.given, dtype, shape)
        return dtype, shape


def _late(reply: Reply) -> Array:
    """A result that came where no length was announced, as through a proxy that re-chunks."""
    array, view = tensors.empty(*fields.dtype_and_shape(reply.head))
    if len(view) != len(reply.body):
        raise GemmError(f"the reply has {len(reply.body)} bytes, its headers describe {len(view)}")
    view[:] = reply.body
    return array


def result(made: Made) -> Result:
    """All that the service told of a product."""
    headers = made.reply.head.headers
    times = fields.server_timing(headers.get("server-timing", ""))
    return Result(
        made.array,
        made.handle,
        headers.get("x-gemm-variant", ""),
        headers.get("x-gemm-reason", ""),
        times.get("queue", 0.0),
        times.get("compute", 0.0),
        headers.get("x-request-id", ""),
    )
