"""/jobs: receives steps to compute, tells how they stand, gives their results."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from service import download
from service.decode import json_text
from service.errors import ServiceError
from service.jobs import Job, Jobs
from service.jobs.decode import JobBody
from service.keys import Principal
from service.model import DTypeName
from service.query import JSON, no_query, require_json
from service.reply import send_json
from service.routes.plain import PlainRoute, begin_events, plain
from service.routes.tensors import DOWNLOAD, DOWNLOAD_HEADERS, PageQuery, header_parameter
from service.services import Services
from service.transfer import Transfer

router = APIRouter(route_class=PlainRoute, tags=["jobs"])

#: Longest `?wait=`, seconds: below the idle times of common proxies.
LONGEST_WAIT = 50.0
#: Seconds between comments on a quiet event stream, which keep proxies from cutting it.
HEARTBEAT = 15.0

#: Longest Idempotency-Key.
KEY_CHARACTERS = 255
_KEY = re.compile(rf"[\x21-\x7e]{{1,{KEY_CHARACTERS}}}")

JobState = Literal["queued", "running", "done", "failed", "cancelled"]
StepState = Literal["queued", "running", "done", "failed", "cancelled", "skipped"]


class Out(BaseModel):
    """The handle that a step's result went to."""

    handle: str


class StepDocument(BaseModel):
    """How a step stands. A failed one has the code and detail that /gemm would have answered with."""

    id: str
    state: StepState
    dtype: DTypeName | None = None
    shape: list[int] | None = None
    variant: str | None = None
    reason: str | None = None
    why: str | None = None
    queue_seconds: float | None = None
    compute_seconds: float | None = None
    out: Out | None = None
    code: str | None = None
    detail: str | None = None


class JobSummary(BaseModel):
    """How a job stands. Times are seconds of the epoch; results are kept until `expires`."""

    id: str
    state: JobState
    accepted: float
    finished: float | None
    expires: float | None
    counts: dict[str, int] = Field(description="Steps by state")


class JobDocument(JobSummary):
    """A job with its steps."""

    steps: list[StepDocument]


class JobPage(BaseModel):
    """A page of jobs, newest first."""

    jobs: list[JobSummary]
    next: str | None = Field(description="`after` of the next page; null on the last")


class WaitQuery(BaseModel):
    """How long to wait for the job's end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wait: float = Field(
        0.0, ge=0, le=LONGEST_WAIT, allow_inf_nan=False, description="Seconds to wait for its end, at most"
    )


def _parts(scope: Scope) -> tuple[Services, Jobs, str]:
    services: Services = scope["app"].state.services
    return services, services.jobs, scope["state"]["principal"].owner


def _document(services: Services, job: Job) -> dict[str, Any]:
    return job.document(services.settings.result_ttl_seconds)


def _key(transfer: Transfer) -> str | None:
    key = transfer.header(b"idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise ServiceError(
            "invalid",
            f"Idempotency-Key: 1 to {KEY_CHARACTERS} visible ASCII characters",
            field="Idempotency-Key",
        )
    return key


async def _post(scope: Scope, receive: Receive, send: Send) -> None:
    services, jobs, owner = _parts(scope)
    transfer = Transfer.of(scope, receive, send)
    no_query(scope)
    require_json(transfer)
    services.store.contents.check_room(0)
    with jobs.arriving(owner, _key(transfer)):
        limit = min(services.settings.max_json_bytes, services.settings.max_body_bytes)
        principal: Principal = scope["state"]["principal"]
        share, writes = principal.quota.store_bytes, principal.may("tensors")
        transfer.bound(limit)
        async with json_text(transfer, services, owner, limit) as text:
            job = await jobs.accept(
                owner, text, _key(transfer), share=share, writes=writes, rate=principal.rate
            )
    location = (b"location", f"/jobs/{job.id}".encode())
    await send_json(transfer, _document(services, job), [location], status=202)


async def _events(scope: Scope, receive: Receive, send: Send) -> None:
    services, jobs, owner = _parts(scope)
    key_id = scope["state"]["principal"].key_id
    transfer = Transfer.of(scope, receive, send)
    no_query(scope)
    job = await jobs.find(owner, scope["path_params"]["job"])
    if not await begin_events(transfer):
        return
    gone = asyncio.ensure_future(transfer.watch_disconnect())
    shown = _Shown(job, services.settings.result_ttl_seconds)
    try:
        while not transfer.gone:
            change = job.changed
            watching = services.keys.in_force(key_id, "jobs")
            for event in shown.news() if watching else ():
                await transfer.write(event)
            if job.ended or jobs.pausing or not watching:
                await transfer.write(b"", more=False)
                return
            changed = asyncio.ensure_future(change.wait())
            await asyncio.wait({changed, gone}, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
            if not changed.done():
                changed.cancel()
                await transfer.write(b": still here\n\n")
    finally:
        gone.cancel()


class _Shown:
    """What a stream has told of a job."""

    def __init__(self, job: Job, ttl: float) -> None:
        self.job = job
        self.ttl = ttl
        self.steps: dict[str, str] = {}
        self.state = ""

    def news(self) -> Iterator[bytes]:
        """Events of what changed; the first time, of how all stands. The job's own end comes last."""
        for id_, step in self.job.steps.items():
            if self.steps.get(id_) != step.state:
                self.steps[id_] = step.state
                yield _event("step", step.document())
        if self.state != self.job.state:
            self.state = self.job.state
            yield _event("job", self.job.summary(self.ttl))


def _event(kind: str, document: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(document))


async def _result(scope: Scope, receive: Receive, send: Send) -> None:
    services, jobs, owner = _parts(scope)
    transfer = Transfer.of(scope, receive, send)
    no_query(scope)
    job = await jobs.find(owner, scope["path_params"]["job"])
    hold = await jobs.result(job, scope["path_params"]["step"])
    await download.send(transfer, services.store, hold, name="d")


# What follows declares the routes: FastAPI makes the OpenAPI document from it.

_NOT_FOUND: dict[str, Any] = {"description": "There is no such job"}
_PATH_JOB: dict[str, Any] = {"name": "job", "in": "path", "required": True, "schema": {"type": "string"}}
_PATH_STEP: dict[str, Any] = {**_PATH_JOB, "name": "step"}


@router.post(
    "/jobs",
    summary="Hand in a job",
    status_code=202,
    response_model=JobDocument,
    responses={
        400: {"description": "The body can't be parsed"},
        409: {"description": "The first request with this Idempotency-Key is still arriving"},
        413: {"description": "The body, or its operands and results, are above the limit"},
        415: {"description": "The Content-Type isn't application/json"},
        422: {"description": "The job is invalid, or its Idempotency-Key came with another body before"},
        503: {"description": "The service shuts down, or what keeps jobs can't be written or reached"},
        507: {"description": "There is no room"},
    },
    openapi_extra={
        "parameters": [
            header_parameter(
                "Idempotency-Key",
                "For 24 hours, whichever key of the owner comes with it, the same body makes no second job; "
                "another body is refused",
            )
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": JobBody.model_json_schema(ref_template="#/components/schemas/{model}")}
            },
        },
    },
)
@plain(_post)
async def post_job() -> None:
    """Answers once inputs and job are durable: from then on it ends right, whatever happens.

    Steps wait until the key's quota on FLOPs a second permits them.
    """
    raise AssertionError("plain")


@router.get("/jobs", summary="List jobs", response_model=JobPage)
async def list_jobs(request: Request, query: Annotated[PageQuery, Query()]) -> Any:
    """Newest first, those of the key's owner."""
    services, jobs, owner = _parts(request.scope)
    found = await jobs.page(owner, query.after, query.limit + 1)
    page, more = found[: query.limit], len(found) > query.limit
    ttl = services.settings.result_ttl_seconds
    return {"jobs": [job.summary(ttl) for job in page], "next": page[-1].id if more else None}


@router.get(
    "/jobs/{job}",
    summary="Look at a job",
    response_model=JobDocument,
    response_model_exclude_unset=True,
    responses={404: _NOT_FOUND},
)
async def get_job(request: Request, job: str, query: Annotated[WaitQuery, Query()]) -> Any:
    """At once, or with `wait` when it has ended or the time is over."""
    services, jobs, owner = _parts(request.scope)
    found = await jobs.find(owner, job)
    if query.wait:
        await jobs.wait(found, query.wait)
        services.keys.check(request.headers.get("authorization")).require("jobs")  # keys come and go
    return _document(services, found)


@router.get(
    "/jobs/{job}/events",
    summary="Watch a job",
    responses={
        200: {"description": "Server-sent events", "content": {"text/event-stream": {}}},
        404: _NOT_FOUND,
    },
    openapi_extra={"parameters": [_PATH_JOB]},
)
@plain(_events)
async def job_events() -> None:
    """Events `step` and `job`: first how all stands, then each change, until the job has ended or the key does."""
    raise AssertionError("plain")


@router.get(
    "/jobs/{job}/steps/{step}/result",
    summary="Read a step's result",
    responses={**DOWNLOAD, 409: {"description": "The step hasn't ended"}},
    openapi_extra={"parameters": [_PATH_JOB, _PATH_STEP, *DOWNLOAD_HEADERS]},
)
@plain(_result)
async def step_result() -> None:
    """As GET /tensors/{name}; in safetensors the tensor is called d."""
    raise AssertionError("plain")


@router.delete(
    "/jobs/{job}",
    summary="Cancel a job",
    response_model=JobDocument,
    response_model_exclude_unset=True,
    responses={
        404: _NOT_FOUND,
        503: {"description": "What keeps jobs can't be written or reached, so the job goes on"},
        507: {"description": "There is no room to keep the cancellation, so the job goes on"},
    },
)
async def cancel_job(request: Request, job: str) -> Any:
    """Steps that haven't ended never will; results stay. A job that has ended stays as it is."""
    services, jobs, owner = _parts(request.scope)
    found = await jobs.find(owner, job)
    await jobs.cancel(found)
    return _document(services, found)
