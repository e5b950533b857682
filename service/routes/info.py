"""What the service is and can: variants, the selector's choice, limits, health, metrics."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from service.errors import ServiceError
from service.formats.base import MAX_DIM
from service.limits import limits_of
from service.model import VARIANT_CHARACTERS, Count, DTypeName, Flag, Real
from service.query import JSON, read_question
from service.reply import send_json
from service.routes.plain import PlainRoute, plain
from service.services import Services
from service.transfer import Transfer

router = APIRouter(route_class=PlainRoute, tags=["info"])

Extent = Annotated[Count, Field(ge=0, le=MAX_DIM)]


class Question(BaseModel):
    """A problem to choose a variant for: D = act(alpha · op(A) · op(B) + beta · C + bias)."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"m": 4096, "n": 4096, "k": 4096, "dtype": "fp16"}]}
    )

    m: Extent
    n: Extent
    k: Extent
    batch: Extent = 1
    dtype: DTypeName = "fp32"
    out_dtype: DTypeName | None = None
    trans_a: Flag = False
    trans_b: Flag = False
    alpha: Real = 1.0
    beta: Real | None = Field(None, description="1 with c, else 0")
    c: Flag = Field(False, description="whether a C is given")
    bias: Literal["n", "m"] | None = Field(None, description="dimension of a bias, if one is given")
    activation: Literal["none", "relu", "gelu", "silu"] = "none"
    precision: Literal["ieee", "tf32"] = "ieee"
    batch_invariant: Flag = True
    variant: str = Field("auto", max_length=VARIANT_CHARACTERS)


class Candidate(BaseModel):
    """One variant as the selector saw it: its time, or why it can't be used."""

    variant: str
    seconds: float | None = Field(description="seconds, None where it can't be used")
    measured: bool = Field(description="measured on this device; else estimated")
    because: str | None = Field(description="why it can't be used")


class Choice(BaseModel):
    """What would run for the problem, and why."""

    variant: str
    reason: str
    why: str
    seconds: float
    candidates: list[Candidate]


def services_of(request: Request) -> Services:
    """The front's parts."""
    services: Services = request.app.state.services
    return services


@router.get("/variants", summary="The variants of this device, and whether each may run")
async def variants(request: Request) -> dict[str, Any]:
    """Every variant that this device can run: its rung of the ladder, its state, and why it is barred if it is."""
    answer: dict[str, Any] = await services_of(request).supervisor.ask("variants")
    return answer


async def _choose(scope: Scope, receive: Receive, send: Send) -> None:
    transfer = Transfer.of(scope, receive, send)
    question = await read_question(transfer, Question)
    if question.beta and not question.c:
        raise ServiceError("invalid", "beta: needs c", field="beta")
    if question.beta is None:
        question.beta = float(question.c)
    services: Services = scope["app"].state.services
    try:
        choice = await services.supervisor.ask("choose", question.model_dump())
    except ServiceError as error:
        if error.code == "unsupported" and question.variant != "auto":
            error.field = "variant"
        raise
    await send_json(transfer, choice, [])


@router.post(
    "/variants/choose",
    summary="What would run for a problem",
    response_model=Choice,
    responses={
        413: {"description": "Larger than a question is"},
        415: {"description": "The body isn't JSON"},
        422: {"description": "Parsed but invalid, or a variant that can't run it"},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": Question.model_json_schema(ref_template="#/components/schemas/{model}")}
            },
        },
    },
)
@plain(_choose)
async def choose() -> None:
    """Each candidate's estimate, the choice, and why not the others. Nothing is computed."""
    raise AssertionError("plain")


@router.get("/limits", summary="All limits")
async def limits(request: Request) -> dict[str, Any]:
    """What a request may be and hold; a refusal names the limit that it passed.

    A client on this machine is told where the socket for shared memory is.
    """
    services = services_of(request)
    limits = limits_of(services.settings)
    if services.local is not None and services.local.path is not None and _near(request):
        limits["local"] = {"socket": str(services.local.path), "instance": services.local.instance}
    return limits


def _near(request: Request) -> bool:
    """Whether the client may be on this machine; one that isn't is told no paths."""
    return request.client is None or ipaddress.ip_address(request.client.host).is_loopback


async def _live(scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse({"status": "live"})(scope, receive, send)


async def _ready(scope: Scope, receive: Receive, send: Send) -> None:
    supervisor = scope["app"].state.services.supervisor
    ready = supervisor.ready
    status = "ready" if ready else "draining" if supervisor.draining else "not ready"
    workers = [{key: worker[key] for key in ("index", "state", "detail")} for worker in supervisor.status()]
    response = JSONResponse({"status": status, "workers": workers}, status_code=200 if ready else 503)
    await response(scope, receive, send)


async def _metrics(scope: Scope, receive: Receive, send: Send) -> None:
    accept = Transfer.of(scope, receive, send).header(b"accept") or ""
    body, content_type = scope["app"].state.services.metrics.exposition(accept)
    response = Response(body, headers={"content-type": content_type, "vary": "accept"})
    await response(scope, receive, send)


@router.get("/health/live", summary="The front answers")
@plain(_live)
async def live() -> dict[str, Any]:
    """200 as long as the process serves."""
    raise AssertionError("plain")


@router.get("/health/ready", summary="A worker takes work", responses={503: {"description": "Not now"}})
@plain(_ready)
async def ready() -> dict[str, Any]:
    """200 while a worker is ready and new work is taken, else 503."""
    raise AssertionError("plain")


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
@plain(_metrics)
async def metrics() -> Response:
    """The text exposition format; OpenMetrics, with trace ids as exemplars, for whoever asks for it."""
    raise AssertionError("plain")
