"""The page and what it shows: receives requests for `/`, its files and its data, hands on bytes and events.

The files are the package's own, read once; the page asks no other host, and the browser is told to hold it to
that. Its data needs the key where keys are set.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from service import results
from service.conditional import etag, unchanged
from service.errors import ServiceError
from service.model import Count, Flag
from service.query import JSON, no_query, read_question
from service.reply import send_json
from service.routes.info import services_of
from service.routes.plain import PlainRoute, begin_events, plain
from service.services import Services
from service.transfer import Transfer

router = APIRouter(route_class=PlainRoute, tags=["page"])

FOLDER = Path(__file__).parents[1] / "page"
MEDIA = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}
#: Seconds between two events of the stream.
PERIOD = 1.0

# No other host, no inline script, nobody's frame: a page that holds a key keeps it to itself.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Swagger UI's styles have pictures in them, and some of its elements styles.
_DOCS_POLICY = _POLICY.replace(b"img-src 'self'", b"img-src 'self' data:").replace(
    b"style-src 'self'", b"style-src 'self' 'unsafe-inline'"
)


@lru_cache(maxsize=1)
def files() -> dict[str, tuple[bytes, bytes, str]]:
    """Every file of the page by name: media type, bytes, hash."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in MEDIA:
            data = path.read_bytes()
            found[path.name] = (MEDIA[path.suffix], data, hashlib.sha256(data).hexdigest()[:32])
    return found


async def _index(scope: Scope, receive: Receive, send: Send) -> None:
    await _send(Transfer.of(scope, receive, send), "index.html")


async def _docs(scope: Scope, receive: Receive, send: Send) -> None:
    await _send(Transfer.of(scope, receive, send), "docs.html", _DOCS_POLICY)


async def _file(scope: Scope, receive: Receive, send: Send) -> None:
    await _send(Transfer.of(scope, receive, send), scope["path_params"]["name"])


async def _send(transfer: Transfer, name: str, policy: bytes = _POLICY) -> None:
    if name not in files():
        raise ServiceError("not_found", "the page has no such file")
    media, data, digest = files()[name]
    headers = [
        (b"etag", etag(digest).encode()),
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", policy),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    if unchanged(transfer.header(b"if-none-match"), digest, "raw"):
        await transfer.start(304, headers)
        await transfer.write(b"", more=False)
        return
    headers += [(b"content-type", media), (b"content-length", str(len(data)).encode())]
    await transfer.start(200, headers)
    await transfer.write(data, more=False)


@router.get("/", include_in_schema=False)
@plain(_index)
async def index() -> None:
    """The page."""
    raise AssertionError("plain")


@router.get("/docs", include_in_schema=False)
@plain(_docs)
async def docs() -> None:
    """The API's description, by Swagger UI; the document itself needs the key where keys are set."""
    raise AssertionError("plain")


@router.get("/page/{name}", include_in_schema=False)
@plain(_file)
async def file() -> None:
    """A file of the page."""
    raise AssertionError("plain")


@router.get("/now", summary="What happens now")
async def now(request: Request) -> dict[str, Any]:
    """Rates and times of the last seconds, worker states, memory, the last batches. What can't be read is null."""
    services = services_of(request)
    return services.now.document(services, time.monotonic())


async def _events(scope: Scope, receive: Receive, send: Send) -> None:
    services: Services = scope["app"].state.services
    transfer = Transfer.of(scope, receive, send)
    no_query(scope)
    if not await begin_events(transfer):
        return
    gone = asyncio.ensure_future(transfer.watch_disconnect())
    key_id = scope["state"]["principal"].key_id
    try:
        while services.keys.in_force(key_id) and not (transfer.gone or gone.done()):
            document = services.now.document(services, time.monotonic())
            await transfer.write(b"event: now\ndata: " + json.dumps(document).encode() + b"\n\n")
            if services.supervisor.draining:
                break
            await asyncio.wait({gone}, timeout=PERIOD)
        # Whoever stops watching has had the whole of it: that isn't a client that left too early.
        await transfer.write(b"", more=False)
    finally:
        gone.cancel()


@router.get(
    "/now/events",
    summary="Watch what happens",
    responses={200: {"description": "Server-sent events", "content": {"text/event-stream": {}}}},
)
@plain(_events)
async def now_events() -> None:
    """An event `now` each second with the document of /now, until client or key go or the service drains."""
    raise AssertionError("plain")


@router.get("/ladder", summary="The ladder's measured, predicted and published times")
async def ladder(request: Request) -> dict[str, Any]:
    """What results files hold and what the model predicts, each under its own name, by chip."""
    supervisor = services_of(request).supervisor
    measured = await asyncio.to_thread(results.ladders)
    try:
        predicted = await supervisor.ask("predict", {})
    except ServiceError as refusal:
        predicted = {"unavailable": refusal.detail}
    return {"measured": measured, "predicted": predicted}


class Schedule(BaseModel):
    """Which kernel's schedule to play."""

    model_config = ConfigDict(extra="forbid")

    arch: Literal["sm_90a", "sm_100a"] = "sm_100a"
    step: Literal[4, 5, 6, 7, 8, 9] = 9
    depth: Count = Field(4, ge=1, le=6, description="stages of the ring (PIPE_DEPTH)")
    k_tiles: Count = Field(8, ge=1, le=64, description="blocks of K in a tile")
    tiles: Count = Field(2, ge=1, le=4, description="tiles that a CTA (or cluster) computes")
    same_phase: Flag = Field(
        False, description="start producer and consumer at one phase, to see the deadlock"
    )


async def _timeline(scope: Scope, receive: Receive, send: Send) -> None:
    transfer = Transfer.of(scope, receive, send)
    schedule = await read_question(transfer, Schedule)
    services: Services = scope["app"].state.services
    await send_json(transfer, await services.supervisor.ask("trace", schedule.model_dump()), [])


@router.post(
    "/timeline",
    summary="Play a kernel's schedule by the model",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": Schedule.model_json_schema(ref_template="#/components/schemas/{model}")}
            },
        },
    },
)
@plain(_timeline)
async def timeline() -> dict[str, Any]:
    """Lanes of roles and engines with their events, barriers with their phases, and how busy each engine was."""
    raise AssertionError("plain")
