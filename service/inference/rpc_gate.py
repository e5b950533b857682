"""Before and around the calls of gRPC: receives who calls what, hands on its handler, and what became of the call.

A caller that may not pass is refused before its message is read: a message is held on the heap, and a small one may
expand to the largest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import grpc

from service import logs
from service.errors import ServiceError
from service.gate import check_peer, translate
from service.inference.errors import status_of
from service.keys import ANONYMOUS, Principal
from service.services import Services

SERVICE = "inference.GRPCInferenceService"

_OPEN = ("ServerLive", "ServerReady")
_SCOPES = {
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), "gemm"),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), "admin"),
    **dict.fromkeys(("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"), "admin"),
    **dict.fromkeys(("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"), "admin"),
}
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

_log = logs.Log("rpc")


def status_code(problem: ServiceError) -> Any:
    """gRPC's code of a refusal."""
    if problem.code == "deadline":
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return _STATUS.get(status_of(problem), grpc.StatusCode.INTERNAL)


class Door:
    """The protocol's calls by their paths, as gRPC asks for them when only a call's headers have come."""

    def __init__(self, services: Services, handlers: Mapping[str, Any]) -> None:
        self._services = services
        self._handlers = {f"/{SERVICE}/{name}": handler for name, handler in handlers.items()}

    def service(self, details: Any) -> Any:
        """The call's handler, or one that refuses it; None where there is no such call."""
        handler = self._handlers.get(details.method)
        name = details.method.rpartition("/")[2]
        if handler is None or not self._services.keys.required or name in _OPEN:
            return handler
        try:
            _principal(self._services, name, details.invocation_metadata)
        except ServiceError as refusal:
            return self._refusing(name, refusal)
        return handler

    def _refusing(self, name: str, refusal: ServiceError) -> Any:
        async def refuse(requests: Any, context: Any) -> None:
            async with Watched(self._services, name, context) as watched:
                problem = watched.refused(refusal)
            await context.abort(status_code(problem), problem.detail)

        return grpc.stream_stream_rpc_method_handler(refuse)  # a stream begins before a message has come


def admit(services: Services, name: str, context: Any, nbytes: int = 0) -> Principal:
    """Who calls; ServiceError where the call may not pass."""
    if not services.keys.required:
        if not services.settings.insecure:
            check_peer(_peer(context.peer()))
        return ANONYMOUS
    if name in _OPEN:
        return Principal("", frozenset())
    principal = _principal(services, name, context.invocation_metadata())
    services.keys.enter(principal, nbytes)
    return principal


def ask_again(services: Services, name: str, context: Any) -> Principal:
    """Whose open stream it is now, since keys come and go; ServiceError where that key may not go on."""
    if not services.keys.required:
        return ANONYMOUS
    return _principal(services, name, context.invocation_metadata())


def _principal(services: Services, name: str, metadata: Any) -> Principal:
    principal = services.keys.check(dict(metadata or ()).get("authorization"))
    if name in _SCOPES:
        principal.require(_SCOPES[name])
    return principal


class Watched:
    """One call from its begin to its end: its line in the log, its count in the metrics, its key's share."""

    def __init__(self, services: Services, name: str, context: Any) -> None:
        self._services = services
        self._name = name
        self._route = f"grpc/{name}"
        self._trace = logs.Trace.take(dict(context.invocation_metadata() or ()).get("traceparent"))
        self._refused: ServiceError | None = None
        self.principal: Principal | None = None

    async def __aenter__(self) -> Watched:
        self._started = time.perf_counter()
        self._token = logs.bind(logs.new_id(), self._trace)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        services, seconds = self._services, time.perf_counter() - self._started
        if self.principal is not None:
            services.keys.leave(self.principal)
        left = kind is not None and issubclass(kind, asyncio.CancelledError | GeneratorExit)
        code = 499 if left else 200 if self._refused is None else status_of(self._refused)
        services.metrics.request(self._route, code, seconds)
        if left or self._refused is not None:
            services.metrics.reject("client_gone" if self._refused is None else self._refused.code)
        stages = logs.stages()
        if services.tracer is not None:
            attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": self._name}
            failed = code >= 500
            services.tracer.request(self._route, self._trace, seconds, stages, attributes, failed=failed)
        told = {f"{stage}_seconds": round(took, 6) for stage, took in stages.items()}
        _log.info("request", route=self._route, code=code, seconds=round(seconds, 6), **told)
        logs.unbind(self._token)

    def refused(self, error: Exception) -> ServiceError:
        """The call failed: how it is told."""
        self._refused = translate(error)
        if self._refused.code == "internal":
            _log.error("unhandled", exception=error, route=self._route)
        return self._refused


def _peer(text: str) -> tuple[str, int] | None:
    """The address in `ipv4:127.0.0.1:5000` or `ipv6:[::1]:5000`; None for a Unix socket."""
    kind, _, rest = text.partition(":")
    if kind == "unix":
        return None
    host, _, port = unquote(rest).rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 0
