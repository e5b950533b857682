"""POST /gemm: receives a request's bytes, hands on the reply; the way is decode, admit … kernel, reply."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.types import Receive, Scope, Send

from service import logs, reply
from service.arena import Slot
from service.batch import DEFAULT_PRIORITY, Work
from service.decode import GemmRequest, decode
from service.errors import ServiceError, at_stage
from service.keys import Principal
from service.model import GemmBody, GemmQuery
from service.outcome import Outcome
from service.routes.plain import PlainRoute, plain
from service.routes.schema import query_parameters
from service.services import Services
from service.store import Entry
from service.transfer import ClientGone, Transfer

router = APIRouter(route_class=PlainRoute, tags=["gemm"])


def work_of(services: Services, request: GemmRequest, principal: Principal) -> Work:
    """The request as work. Its `release` gives operands and the worker's hold on D's memory back.

    ServiceError forbidden where D is to be kept and the key may not write tensors.
    """
    if request.out_handle is not None:
        principal.require("tensors", field="out")
    let_go = request.out.hold()

    def release() -> None:
        request.release_operands()
        let_go()

    return Work(
        id=services.supervisor.work_id(),
        a=request.a.operand,
        b=request.b.operand,
        out=request.out.operand,
        params=request.params,
        c=request.c.operand if request.c is not None else None,
        bias=request.bias.operand if request.bias is not None else None,
        owner=principal.owner,
        rate=principal.rate,
        priority=request.priority or DEFAULT_PRIORITY,
        deadline=request.deadline,
        release=release,
        trace=logs.sampled_trace(),
    )


async def submit_or_leave(services: Services, transfer: Transfer, work: Work) -> Outcome:
    """Submit, and drop the work if the client leaves first (ClientGone)."""
    task = asyncio.current_task()
    assert task is not None
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    stop_watching = transfer.when_gone(leave)
    try:
        return await services.supervisor.submit(work)
    except asyncio.CancelledError:
        if left:
            task.uncancel()
            raise ClientGone from None
        raise
    finally:
        stop_watching()


async def _gemm(scope: Scope, receive: Receive, send: Send) -> None:
    services: Services = scope["app"].state.services
    state: dict[str, Any] = scope["state"]
    stages: dict[str, float] = state["stages"]
    started = time.perf_counter()
    transfer = Transfer.of(scope, receive, send)
    with at_stage("decode"):
        request = await decode(transfer, scope, services, state["principal"])
    try:
        form = reply.reply_form(transfer, request)
        work = work_of(services, request, state["principal"])
    except BaseException:
        request.release()
        raise
    decoded = time.perf_counter()
    try:
        outcome = await submit_or_leave(services, transfer, work)
        computed = time.perf_counter()
        if request.out_handle is None:
            await reply.send(transfer, request, form, outcome, request_id=state["request_id"])
        else:
            entry = await keep(services, request, state["principal"])
            await reply.send_stored(transfer, request, entry, outcome, request_id=state["request_id"])
    finally:
        # Operands went with the work; the output may still be on its way out of reply.send.
        if not transfer.started or request.out_handle is not None:
            request.out.release()
    ended = time.perf_counter()
    stages |= {"decode": decoded - started, **outcome.stages(computed - decoded), "reply": ended - computed}
    services.metrics.took("decode", decoded - started)
    services.metrics.took("reply", ended - computed)


async def keep(services: Services, request: GemmRequest, principal: Principal) -> Entry:
    """Store D under the handle that the request named."""
    slot, operand = request.out.slot, request.out.operand
    assert isinstance(slot, Slot)
    assert request.out_handle is not None
    try:
        return await services.store.put(
            principal.owner,
            request.out_handle,
            slot,
            operand.nbytes,
            operand.dtype,
            operand.shape,
            durable=request.durable,
            ttl=request.ttl_seconds,
            share=principal.quota.store_bytes,
            id_=request.out_id,
        )
    except ServiceError as refusal:
        refusal.field = "out"  # which the store knows as a body
        raise


_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


@router.post(
    "/gemm",
    summary="Multiply: D = act(alpha · op(A) · op(B) + beta · C + bias)",
    openapi_extra={
        "parameters": query_parameters(GemmQuery),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": GemmBody.model_json_schema(ref_template="#/components/schemas/{model}"),
                },
                "application/vnd.safetensors": _BINARY,
                "application/octet-stream": _BINARY,
            },
        },
    },
    responses={
        200: {
            "description": "D, in the form that Accept chooses",
            "content": {
                "application/json": {},
                "application/vnd.safetensors": _BINARY,
                "application/x-npy": _BINARY,
                "application/octet-stream": _BINARY,
            },
        },
    },
)
@plain(_gemm)
async def gemm() -> None:
    """Operands come inline, as base64, or by handle in JSON; or as a safetensors or raw body with query fields.

    The query is for these binary forms only: JSON has every field in its body.

    The reply tells the variant that ran, why, and how long the request waited and computed.
    """
    raise AssertionError("plain")
