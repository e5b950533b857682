"""The Open Inference Protocol over gRPC: receives calls, hands on products; in the front, on the same event loop.

The way of a call is the one of a request over HTTP: who may (the same keys, as metadata `authorization`), decode,
admit … kernel, reply. Messages arrive whole, so operands are copied once more than over HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc

from service import logs
from service.decode import GemmRequest, Operands
from service.errors import ServiceError
from service.inference import cuda_memory, registration, system_memory
from service.inference.bind import bind
from service.inference.compute import compute
from service.inference.models import MODELS, Model
from service.inference.proto import pb
from service.inference.regions import Regions
from service.inference.request import Inference, parse
from service.inference.rpc_gate import Door, Watched, admit, ask_again, status_code
from service.inference.rpc_messages import (
    InferReply,
    Received,
    cuda_registration,
    infer_document,
    infer_reply,
    message_of,
    system_registration,
)
from service.inference.server import check_ready, server_metadata
from service.inference.statistics import Times
from service.keys import Principal
from service.services import Services

#: The largest message that gRPC's lengths can tell.
_MOST_BYTES = (1 << 31) - 1
#: By the setting's names; a client that doesn't take it gets a reply as it is.
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}

Call = Callable[[Any, Principal, Any], Awaitable[Any]]


async def serve(
    services: Services, host: str, port: int, version: str, credentials: Any = None
) -> tuple[Any, int]:
    """A started server and its port; OSError where the address can't be had. `credentials` None: no TLS."""
    settings = services.settings
    options = [
        ("grpc.max_receive_message_length", min(settings.grpc_message_bytes, _MOST_BYTES)),
        ("grpc.max_send_message_length", _MOST_BYTES),
        ("grpc.max_metadata_size", settings.header_bytes),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(
        options=options,
        maximum_concurrent_rpcs=settings.queue_requests,
        compression=_COMPRESSION[settings.grpc_compression],
    )
    server.add_generic_rpc_handlers((Rpc(services, version).handler(),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise OSError(f"grpc_port = {port}: can't listen on {host} port {port}") from None
    await server.start()
    return server, bound


class Rpc:
    """The protocol's calls."""

    def __init__(self, services: Services, version: str) -> None:
        self._services = services
        self._state = services.inference
        self._version = version

    def handler(self) -> Any:
        """What a server needs to know of them."""
        calls: dict[str, Call] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._system_status,
            "SystemSharedMemoryRegister": self._system_register,
            "SystemSharedMemoryUnregister": self._system_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, call),
                request_deserializer=Received.reader(getattr(pb, f"{name}Request")),
            )
            for name, call in calls.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, request_deserializer=Received.reader(pb.ModelInferRequest)
        )
        return Door(self._services, handlers)

    # -- who may, and what became of it ---------------------------------------------------------------------------

    def _guarded(self, name: str, call: Call) -> Callable[[Any, Any], Awaitable[Any]]:
        """The call between the keys and the log."""

        async def guarded(request: Received, context: Any) -> Any:
            async with Watched(self._services, name, context) as watched:
                try:
                    watched.principal = admit(self._services, name, context, request.nbytes)
                    answer = await call(request.message, watched.principal, context)
                    data = answer.encoded() if isinstance(answer, InferReply) else answer.SerializeToString()
                    self._services.keys.owe(watched.principal, len(data))
                    return data
                except Exception as error:  # The last resort, as in the gate: every caller gets an answer.
                    problem = watched.refused(error)
            return await context.abort(status_code(problem), problem.detail)

        return guarded

    # -- infer ----------------------------------------------------------------------------------------------------

    async def _infer(self, message: Any, principal: Principal, context: Any) -> InferReply:
        model = self._state.repository.ready(message.model_name, message.model_version)
        started = time.perf_counter()
        try:
            reply, times = await self._answer(message, model, principal, context)
        except BaseException:
            self._state.statistics.failed(model, time.perf_counter() - started)
            raise
        self._state.statistics.succeeded(model, times, time.time())
        return reply

    async def _answer(
        self, message: Any, model: Model, principal: Principal, context: Any
    ) -> tuple[InferReply, Times]:
        started = time.perf_counter()
        operands = Operands(self._services, principal.owner, time.monotonic())
        try:
            remaining = context.time_remaining()
            inference, request = await decode(message, operands, self._state.regions, model, remaining)
        except BaseException:
            operands.release()
            raise
        decoded = time.perf_counter()
        try:
            submit = self._services.supervisor.submit
            outcome, kept = await compute(self._services, principal, inference, request, submit)
            computed = time.perf_counter()
            reply = infer_reply(inference, request, outcome, kept)
        finally:
            request.out.release()
        ended = time.perf_counter()
        logs.stages().update(
            {"decode": decoded - started, **outcome.stages(computed - decoded), "reply": ended - computed}
        )
        self._services.metrics.took("decode", decoded - started)
        self._services.metrics.took("reply", ended - computed)
        times = Times(
            outcome.queue_seconds,
            decoded - started,
            outcome.compute_seconds,
            ended - computed,
            outcome.batched,
        )
        return reply, times

    async def _stream(self, requests: AsyncIterator[Received], context: Any) -> AsyncIterator[bytes]:
        """Requests one after the other; a refused one is told in its place, and the stream goes on.

        It ends with its key. What opens it has been counted as a request, which pays for the first message.
        """
        problem: ServiceError | None = None
        count = self._services.keys.spend
        async with Watched(self._services, "ModelStreamInfer", context) as watched:
            try:
                watched.principal = admit(self._services, "ModelStreamInfer", context)
                async for received in requests:
                    principal = ask_again(self._services, "ModelStreamInfer", context)
                    yield await self._streamed(received, principal, context, count)
                    count = self._services.keys.go_on
            except ServiceError as error:
                problem = watched.refused(error)
        if problem is not None:
            await context.abort(status_code(problem), problem.detail)

    async def _streamed(
        self, received: Received, principal: Principal, context: Any, count: Callable[[Principal, int], None]
    ) -> bytes:
        """The answer to one message, which `count` takes out of the key's quotas."""
        message = received.message
        async with Watched(self._services, "ModelInfer", context) as watched:
            try:
                count(principal, received.nbytes)
                data = (await self._infer(message, principal, context)).streamed()
                self._services.keys.owe(principal, len(data))
            except Exception as error:
                told = watched.refused(error).detail
                head = pb.ModelInferResponse(model_name=message.model_name, id=message.id)
                head.parameters["triton_final_response"].bool_param = True
                data = pb.ModelStreamInferResponse(
                    error_message=told, infer_response=head
                ).SerializeToString()
            return data

    # -- server and models ----------------------------------------------------------------------------------------

    async def _live(self, message: Any, principal: Principal, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, message: Any, principal: Principal, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._services.supervisor.ready)

    async def _server(self, message: Any, principal: Principal, context: Any) -> Any:
        return message_of(pb.ServerMetadataResponse, server_metadata(self._services, self._version))

    async def _model_ready(self, message: Any, principal: Principal, context: Any) -> Any:
        try:
            self._state.repository.ready(message.name, message.version)
            check_ready(self._services)
        except ServiceError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def _metadata(self, message: Any, principal: Principal, context: Any) -> Any:
        model = self._state.repository.ready(message.name, message.version)
        return message_of(pb.ModelMetadataResponse, model.metadata())

    async def _config(self, message: Any, principal: Principal, context: Any) -> Any:
        model = self._state.repository.ready(message.name, message.version)
        return message_of(pb.ModelConfigResponse, {"config": model.config()})

    async def _statistics(self, message: Any, principal: Principal, context: Any) -> Any:
        models = [self._state.repository.find(message.name, message.version).name] if message.name else MODELS
        return message_of(pb.ModelStatisticsResponse, self._state.statistics.document(models))

    # -- repository -----------------------------------------------------------------------------------------------

    async def _index(self, message: Any, principal: Principal, context: Any) -> Any:
        rows = self._state.repository.index(ready=message.ready)
        return message_of(pb.RepositoryIndexResponse, {"models": rows})

    async def _load(self, message: Any, principal: Principal, context: Any) -> Any:
        self._state.repository.load(message.model_name, configured=bool(message.parameters))
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, message: Any, principal: Principal, context: Any) -> Any:
        self._state.repository.unload(message.model_name)
        return pb.RepositoryModelUnloadResponse()

    # -- shared memory --------------------------------------------------------------------------------------------

    async def _system_status(self, message: Any, principal: Principal, context: Any) -> Any:
        rows = self._state.regions.status(principal.owner, system_memory.KIND, message.name)
        regions = {row["name"]: row for row in rows}
        return message_of(pb.SystemSharedMemoryStatusResponse, {"regions": regions})

    async def _system_register(self, message: Any, principal: Principal, context: Any) -> Any:
        document = system_registration(message)
        await registration.register(self._services, principal, system_memory.KIND, message.name, document)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _system_unregister(self, message: Any, principal: Principal, context: Any) -> Any:
        await self._state.regions.unregister(principal.owner, system_memory.KIND, message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, message: Any, principal: Principal, context: Any) -> Any:
        rows = self._state.regions.status(principal.owner, cuda_memory.KIND, message.name)
        regions = {row["name"]: row for row in rows}
        return message_of(pb.CudaSharedMemoryStatusResponse, {"regions": regions})

    async def _cuda_register(self, message: Any, principal: Principal, context: Any) -> Any:
        document = cuda_registration(message)
        await registration.register(self._services, principal, cuda_memory.KIND, message.name, document)
        return pb.CudaSharedMemoryRegisterResponse()

    async def _cuda_unregister(self, message: Any, principal: Principal, context: Any) -> Any:
        await self._state.regions.unregister(principal.owner, cuda_memory.KIND, message.name)
        return pb.CudaSharedMemoryUnregisterResponse()


async def decode(
    message: Any, operands: Operands, regions: Regions, model: Model, remaining: float | None = None
) -> tuple[Inference, GemmRequest]:
    """Check a ModelInferRequest that has `remaining` seconds. What it holds is in `operands`, as over HTTP."""
    raw: list[bytes] = list(message.raw_input_contents)  # each access would copy them

    async def read(views: list[memoryview]) -> None:
        for view, content in zip(views, raw, strict=True):
            view[:] = content

    inference = _in_time(parse(infer_document(message, raw), model), remaining)
    return inference, await bind(operands, inference, regions, read)


def _in_time(inference: Inference, remaining: float | None) -> Inference:
    """The request with the call's own deadline, where it is the earlier one."""
    if remaining is None or remaining > 1e6:
        return inference
    late = max(0.0, remaining * 1e3)
    fields = inference.fields
    if fields.deadline_ms is not None and fields.deadline_ms <= late:
        return inference
    return replace(inference, fields=fields.model_copy(update={"deadline_ms": late}))
