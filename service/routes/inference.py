"""/v2, the Open Inference Protocol: receives requests of its clients, hands on documents and products.

The forms are that protocol's own, so that its clients work unmodified: any status but 200 is a failure to them,
errors read {"error": …}, and no body needs a Content-Type.
"""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.decode import Operands
from service.errors import ServiceError, at_stage
from service.formats import numbers
from service.inference import cuda_memory, registration, reply, system_memory
from service.inference.compute import compute
from service.inference.decode import decode
from service.inference.models import MODELS, VERSION, Model
from service.inference.request import Document
from service.inference.server import check_ready, server_metadata
from service.inference.statistics import Times
from service.keys import Principal
from service.query import QUESTION_BYTES
from service.reply import send_json
from service.routes.gemm import submit_or_leave
from service.routes.plain import PlainApp, PlainRoute
from service.services import Services
from service.transfer import Transfer

router = APIRouter(route_class=PlainRoute, prefix="/v2", tags=["inference"])

_PATH: dict[str, Any] = {
    "model": {"type": "string", "enum": list(MODELS)},
    "version": {"type": "string", "enum": [VERSION]},
    "region": {"type": "string", "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"},
}
_JSON = "application/json"
_ANSWER: dict[int | str, dict[str, Any]] = {200: {"content": {_JSON: {}}}}
_INFER: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            _JSON: {"schema": Document.model_json_schema(ref_template="#/components/schemas/{model}")},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def route(method: str, path: str, summary: str, application: PlainApp, **options: Any) -> None:
    """Serve `application` at a path; the endpoint only stands in the OpenAPI document."""

    async def endpoint() -> None:
        raise AssertionError("plain")

    endpoint.plain = application  # type: ignore[attr-defined]
    words = path.replace("{", "").replace("}", "").strip("/").split("/")
    name = "_".join(["v2", *words, method.lower()])
    options.setdefault("responses", _ANSWER)
    answered = options["responses"].get(200, {})
    options["response_class"] = JSONResponse if "content" in answered else Response
    extra = options.setdefault("openapi_extra", {})
    extra["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": _PATH[name]}
        for name in re.findall(r"{(\w+)}", path)
    ]
    router.add_api_route(
        path, endpoint, methods=[method], summary=summary, name=name, response_model=None, **options
    )


def _services(scope: Scope) -> Services:
    services: Services = scope["app"].state.services
    return services


def _named(scope: Scope) -> tuple[str, str]:
    """Model and version in the path."""
    return scope["path_params"]["model"], scope["path_params"].get("version", "")


# -- infer ------------------------------------------------------------------------------------------------


async def _infer(scope: Scope, receive: Receive, send: Send) -> None:
    services = _services(scope)
    model = services.inference.repository.ready(*_named(scope))
    started = time.perf_counter()
    try:
        times = await _answer(services, model, Transfer.of(scope, receive, send))
    except BaseException:
        services.inference.statistics.failed(model, time.perf_counter() - started)
        raise
    services.inference.statistics.succeeded(model, times, time.time())


async def _answer(services: Services, model: Model, transfer: Transfer) -> Times:
    """The way of a request: decode, admit … kernel, reply."""
    state: dict[str, Any] = transfer.scope["state"]
    principal: Principal = state["principal"]
    started = time.perf_counter()
    operands = Operands(services, principal.owner, time.monotonic())
    try:
        with at_stage("decode"):
            inference, request = await decode(transfer, operands, services.inference.regions, model)
    except BaseException:
        operands.release()
        raise
    decoded = time.perf_counter()
    try:
        submit = partial(submit_or_leave, services, transfer)
        outcome, kept = await compute(services, principal, inference, request, submit)
        computed = time.perf_counter()
        await reply.send(transfer, inference, request, outcome, kept)
    finally:
        if not transfer.started:
            request.out.release()
    ended = time.perf_counter()
    state["stages"] |= {
        "decode": decoded - started,
        **outcome.stages(computed - decoded),
        "reply": ended - computed,
    }
    services.metrics.took("decode", decoded - started)
    services.metrics.took("reply", ended - computed)
    return Times(
        outcome.queue_seconds, decoded - started, outcome.compute_seconds, ended - computed, outcome.batched
    )


# -- server and models ----------------------------------------------------------------------------------------


async def _empty(scope: Scope, receive: Receive, send: Send) -> None:
    """200 and nothing: what the protocol answers where there is nothing to tell."""
    transfer = Transfer.of(scope, receive, send)
    await transfer.start(200, [(b"content-length", b"0")])
    await transfer.write(b"", more=False)


async def _json(scope: Scope, receive: Receive, send: Send, document: Any) -> None:
    await send_json(Transfer.of(scope, receive, send), document, [])


async def _server(scope: Scope, receive: Receive, send: Send) -> None:
    await _json(scope, receive, send, server_metadata(_services(scope), scope["app"].version))


async def _live(scope: Scope, receive: Receive, send: Send) -> None:
    await _json(scope, receive, send, {"live": True})


async def _ready(scope: Scope, receive: Receive, send: Send) -> None:
    check_ready(_services(scope))
    await _json(scope, receive, send, {"ready": True})


async def _model_ready(scope: Scope, receive: Receive, send: Send) -> None:
    services = _services(scope)
    model = services.inference.repository.ready(*_named(scope))
    check_ready(services)
    await _json(scope, receive, send, {"name": model.name, "ready": True})


async def _metadata(scope: Scope, receive: Receive, send: Send) -> None:
    model = _services(scope).inference.repository.ready(*_named(scope))
    await _json(scope, receive, send, model.metadata())


async def _config(scope: Scope, receive: Receive, send: Send) -> None:
    model = _services(scope).inference.repository.ready(*_named(scope))
    await _json(scope, receive, send, model.config())


async def _statistics(scope: Scope, receive: Receive, send: Send) -> None:
    services = _services(scope)
    model = services.inference.repository.find(*_named(scope))
    await _json(scope, receive, send, services.inference.statistics.document([model.name]))


async def _all_statistics(scope: Scope, receive: Receive, send: Send) -> None:
    await _json(scope, receive, send, _services(scope).inference.statistics.document(MODELS))


# -- repository -----------------------------------------------------------------------------------------------


async def read_document(transfer: Transfer) -> dict[str, Any]:
    """A small request's JSON object; no body is an empty one."""
    text = await transfer.read_all(QUESTION_BYTES)
    document = numbers.loads(text) if text else {}
    if not isinstance(document, dict):
        raise ServiceError("malformed", "the body isn't a JSON object", field="body")
    return document


async def _index(scope: Scope, receive: Receive, send: Send) -> None:
    transfer = Transfer.of(scope, receive, send)
    ready = (await read_document(transfer)).get("ready", False)
    rows = _services(scope).inference.repository.index(ready=ready is True)
    await send_json(transfer, rows, [])


async def _load(scope: Scope, receive: Receive, send: Send) -> None:
    document = await read_document(Transfer.of(scope, receive, send))
    repository = _services(scope).inference.repository
    repository.load(_named(scope)[0], configured=bool(document.get("parameters")))
    await _empty(scope, receive, send)


async def _unload(scope: Scope, receive: Receive, send: Send) -> None:
    await read_document(Transfer.of(scope, receive, send))
    _services(scope).inference.repository.unload(_named(scope)[0])
    await _empty(scope, receive, send)


# -- what is set once ------------------------------------------------------------------------------------------


async def _settled(scope: Scope, receive: Receive, send: Send) -> None:
    """Clients of the protocol have calls for these settings, so they learn that it's not a wrong path."""
    raise ServiceError(
        "not_implemented",
        "traces and logging are set when the service starts, and neither told nor changed here",
    )


# -- shared memory --------------------------------------------------------------------------------------------


def _region(scope: Scope) -> tuple[Services, Principal, str]:
    """Whose regions, and which of them; "" for all."""
    name: str = scope.get("path_params", {}).get("region", "")
    return _services(scope), scope["state"]["principal"], name


def _status(kind: str) -> PlainApp:
    async def status(scope: Scope, receive: Receive, send: Send) -> None:
        services, principal, name = _region(scope)
        rows = services.inference.regions.status(principal.owner, kind, name)
        await _json(scope, receive, send, rows)

    return status


def _register(kind: str) -> PlainApp:
    async def register(scope: Scope, receive: Receive, send: Send) -> None:
        services, principal, name = _region(scope)
        document = await read_document(Transfer.of(scope, receive, send))
        await registration.register(services, principal, kind, name, document)
        await _empty(scope, receive, send)

    return register


def _unregister(kind: str) -> PlainApp:
    async def unregister(scope: Scope, receive: Receive, send: Send) -> None:
        services, principal, name = _region(scope)
        await read_document(Transfer.of(scope, receive, send))
        await services.inference.regions.unregister(principal.owner, kind, name)
        await _empty(scope, receive, send)

    return unregister


_DONE = {200: {"description": "Done"}}
_NOT_NOW = {**_ANSWER, 503: {"description": "Not now"}}
route("GET", "/health/live", "The front answers", _live)
route("GET", "/health/ready", "A worker takes work", _ready, responses=_NOT_NOW)
route("GET", "", "Name, version and extensions", _server)
route("GET", "/models/stats", "Statistics of all models", _all_statistics)
for _path in ("/models/{model}", "/models/{model}/versions/{version}"):
    route("GET", _path, "A model's inputs and outputs", _metadata)
    route("GET", f"{_path}/ready", "Whether a model takes requests", _model_ready, responses=_NOT_NOW)
    route("GET", f"{_path}/config", "A model's configuration", _config)
    route("GET", f"{_path}/stats", "A model's statistics", _statistics)
    route("POST", f"{_path}/infer", "A product", _infer, openapi_extra=dict(_INFER))
route("POST", "/repository/index", "All models and their state", _index)
route(
    "POST",
    "/repository/models/{model}/load",
    "Take requests for a model (scope admin)",
    _load,
    responses=_DONE,
)
route(
    "POST",
    "/repository/models/{model}/unload",
    "Take no requests for a model (scope admin)",
    _unload,
    responses=_DONE,
)
for _path in ("/logging", "/trace/setting", "/models/{model}/trace/setting"):
    for _method in ("GET", "POST"):
        route(
            _method,
            _path,
            "Not while it runs (501): logs and traces are set at start",
            _settled,
            responses={501: {"description": "Never"}},
        )
for _kind in (system_memory.KIND, cuda_memory.KIND):
    _at = f"/{_kind}sharedmemory"
    _one = f"{_at}/region/{{region}}"
    route("GET", f"{_at}/status", f"All {_kind} shared memory of the key's owner", _status(_kind))
    route("GET", f"{_one}/status", f"A region of {_kind} shared memory", _status(_kind))
    summary = f"Register {_kind} shared memory (scope admin)"
    route("POST", f"{_one}/register", summary, _register(_kind), responses=_DONE)
    route(
        "POST", f"{_one}/unregister", "Let go of a region (scope admin)", _unregister(_kind), responses=_DONE
    )
    summary = f"Let go of all {_kind} regions (scope admin)"
    route("POST", f"{_at}/unregister", summary, _unregister(_kind), responses=_DONE)
