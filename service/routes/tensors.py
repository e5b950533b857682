"""/tensors: receives tensors by name and gives them back, in the forms and under the conditions of HTTP.

A body goes from the socket into its slot; the reply to PUT comes when the tensor is durable.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from service import conditional, download
from service.errors import ServiceError
from service.formats import Tensor
from service.keys import Principal
from service.model import NAME, DTypeName, validate_query
from service.query import RAW, SAFETENSORS, no_query, parse_query
from service.reply import NPY, send_json
from service.routes.plain import PlainRoute, plain
from service.routes.schema import query_parameters
from service.services import Services
from service.store import Conditions, Entry, valid
from service.transfer import Transfer
from service.upload import PutQuery, Upload

router = APIRouter(route_class=PlainRoute, tags=["tensors"])

#: Most entries of a page.
PAGE_ENTRIES = 1000


class PageQuery(BaseModel):
    """Which page of a list."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    after: str = Field("", pattern=rf"^$|{NAME}", description="`next` of the page before")
    limit: int = Field(100, ge=1, le=PAGE_ENTRIES, description="Most entries of the page")


class TensorEntry(BaseModel):
    """A stored tensor. Times are seconds of the epoch."""

    name: str
    etag: str = Field(description="Hash of dtype, shape and bytes")
    dtype: DTypeName
    shape: list[int]
    nbytes: int
    created: float
    expires: float | None
    durable: bool = Field(description="Whether it survives a crash already")


class TensorPage(BaseModel):
    """A page of stored tensors, by name."""

    tensors: list[TensorEntry]
    next: str | None = Field(description="`after` of the next page; null on the last")


def name_in(scope: Scope) -> str:
    """The name in the path as it was sent: an escape in it is no name."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    name = raw.rpartition(b"/")[2].decode("latin-1")
    if not valid(name):
        raise ServiceError(
            "invalid", "a tensor's name is a letter or digit, then up to 127 of A-Za-z0-9._-", field="name"
        )
    return name


def conditions_in(transfer: Transfer) -> Conditions:
    """If-Match and If-None-Match."""
    return conditional.conditions(transfer.header(b"if-match"), transfer.header(b"if-none-match"))


def told(entry: Entry) -> dict[str, Any]:
    """An entry's document."""
    return asdict(entry)


async def _put(scope: Scope, receive: Receive, send: Send) -> None:
    services: Services = scope["app"].state.services
    principal: Principal = scope["state"]["principal"]
    owner, share = principal.owner, principal.quota.store_bytes
    transfer = Transfer.of(scope, receive, send)
    name = name_in(scope)
    query = validate_query(PutQuery, parse_query(scope["query_string"]))
    conditions = conditions_in(transfer)
    await services.store.check(owner, name, conditions)
    services.store.contents.check_room(transfer.content_length or 0)
    existed = await services.store.exists(owner, name)

    async def admit(tensor: Tensor) -> None:
        await services.store.check_share(owner, name, tensor.nbytes, tensor.dtype, tensor.shape, share)

    slot, tensor = await Upload(transfer, services, owner, query, admit).receive()
    try:
        entry = await services.store.put(
            owner,
            name,
            slot,
            tensor.nbytes,
            tensor.dtype,
            tensor.shape,
            ttl=query.ttl_seconds,
            conditions=conditions,
            share=share,
        )
    finally:
        slot.release()
    headers = [
        (b"etag", conditional.etag(entry.etag).encode()),
        (b"location", f"/tensors/{name}".encode()),
    ]
    await send_json(transfer, told(entry), headers, status=200 if existed else 201)


async def _get(scope: Scope, receive: Receive, send: Send) -> None:
    services: Services = scope["app"].state.services
    transfer = Transfer.of(scope, receive, send)
    name = name_in(scope)
    no_query(scope)
    hold = await services.store.hold(scope["state"]["principal"].owner, name)
    await download.send(transfer, services.store, hold, name=name)


async def _delete(scope: Scope, receive: Receive, send: Send) -> None:
    services: Services = scope["app"].state.services
    transfer = Transfer.of(scope, receive, send)
    no_query(scope)
    await services.store.delete(scope["state"]["principal"].owner, name_in(scope), conditions_in(transfer))
    await transfer.start(204, [])
    await transfer.write(b"", more=False)


# What follows declares the routes: FastAPI makes the OpenAPI document from it.

_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
_NAME: dict[str, Any] = {
    "name": "name",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": NAME},
}


def header_parameter(name: str, description: str) -> dict[str, Any]:
    """A request header in OpenAPI."""
    return {"name": name, "in": "header", "schema": {"type": "string"}, "description": description}


_IF_MATCH = header_parameter("If-Match", "Only if the tensor has one of these ETags, else 412")
_IF_NONE_MATCH = header_parameter("If-None-Match", "Only if the tensor has none of these ETags")
_RANGE = header_parameter("Range", "bytes=first-last of the representation")
_IF_RANGE = header_parameter("If-Range", "Range only if the representation has this ETag")

#: Responses of a download, for OpenAPI.
DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The tensor, in the form that Accept chooses",
        "content": {
            SAFETENSORS: _BINARY,
            NPY: _BINARY,
            RAW: _BINARY,
            "application/json": {"schema": {"type": "object"}},
        },
    },
    206: {"description": "The range asked for"},
    304: {"description": "The client has it already"},
    404: {"description": "There is no such tensor"},
    406: {"description": "No form that Accept names can hold it"},
    410: {"description": "It was lost before it was durable"},
    412: {"description": "A precondition failed"},
    416: {"description": "The range lies outside"},
}
#: Request headers of a download, for OpenAPI.
DOWNLOAD_HEADERS = [_IF_MATCH, _IF_NONE_MATCH, _RANGE, _IF_RANGE]


@router.put(
    "/tensors/{name}",
    summary="Store a tensor",
    status_code=201,
    response_model=TensorEntry,
    responses={
        200: {"model": TensorEntry, "description": "It replaced a tensor of this name"},
        400: {"description": "The body can't be parsed or is cut short"},
        412: {"description": "A precondition failed"},
        413: {"description": "The body is above the limit"},
        415: {"description": "The Content-Type isn't known"},
        422: {"description": "The name, a field or the tensor is invalid"},
        503: {"description": "The data folder can't be written, or what fronts share can't be reached"},
        507: {"description": "There is no room"},
    },
    openapi_extra={
        "parameters": [_NAME, *query_parameters(PutQuery), _IF_MATCH, _IF_NONE_MATCH],
        "requestBody": {
            "required": True,
            "content": {SAFETENSORS: _BINARY, NPY: _BINARY, RAW: _BINARY},
        },
    },
)
@plain(_put)
async def put_tensor() -> None:
    """Answers once the tensor is durable: file and folder synced, row committed.

    safetensors, .npy (versions 1 to 3, any byte order, Fortran order) or raw little-endian row-major bytes
    with `dtype` and `shape`.
    """
    raise AssertionError("plain")


_GET_EXTRA = {"parameters": [_NAME, *DOWNLOAD_HEADERS]}


@router.get("/tensors/{name}", summary="Read a tensor", responses=DOWNLOAD, openapi_extra=_GET_EXTRA)
@plain(_get)
async def get_tensor() -> None:
    """Accept chooses safetensors (the default), .npy, raw or JSON. Each form has its own ETag."""
    raise AssertionError("plain")


@router.head("/tensors/{name}", summary="Look at a tensor", responses=DOWNLOAD, openapi_extra=_GET_EXTRA)
@plain(_get)
async def head_tensor() -> None:
    """Size, shape, dtype and ETag."""
    raise AssertionError("plain")


@router.delete(
    "/tensors/{name}",
    summary="Forget a tensor",
    status_code=204,
    responses={
        404: {"description": "There is no such tensor"},
        412: {"description": "A precondition failed"},
    },
    openapi_extra={"parameters": [_NAME, _IF_MATCH, _IF_NONE_MATCH]},
)
@plain(_delete)
async def delete_tensor() -> None:
    """Work that pinned it before still finds it."""
    raise AssertionError("plain")


@router.get("/tensors", summary="List the stored tensors", response_model=TensorPage)
async def list_tensors(request: Request, query: Annotated[PageQuery, Query()]) -> Any:
    """By name, those of the key's owner."""
    services: Services = request.app.state.services
    entries, following = await services.store.entries(request.state.principal.owner, query.after, query.limit)
    return {"tensors": [told(entry) for entry in entries], "next": following}
