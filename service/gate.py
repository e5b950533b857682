"""First and last of every request: receives it raw, hands it on with its sender, ends it with a clear answer.

The outermost layer, plain ASGI. In: request id, trace, Host list, Origin, key, scope, quota. Out: the
request id on the reply, every exception (ours, the framework's, unforeseen) as problem+json with the
connection left usable, one line of access log, one count in the metrics. Inner layers find in
`scope["state"]`: `principal`, `request_id`, `traceparent`, and `stages`, a dict of seconds by stage word
that they fill for the log.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from service import logs
from service.errors import CODES, ServiceError, short
from service.faults import Place, refusal
from service.inference.errors import status_of
from service.keys import ANONYMOUS, Keys, Principal
from service.path import routed
from service.settings import Settings, SettingsError
from service.traces import Tracer
from service.transfer import EXTENSION, ClientGone

if TYPE_CHECKING:
    from fastapi import FastAPI

    from service.services import Services

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Open without a key and under any Host: probes come by address.
PROBES = ("/health/", "/v2/health/")
#: Open without a key: static files of the page and of /docs. Their data needs the key.
_PAGE = ("/page/", "/docs/static/")
_PAGES = ("/", "/docs")

#: What a key must be allowed to do, by the path's first segment; other paths need any valid key.
_SCOPES = {"gemm": "gemm", "variants": "gemm", "tensors": "tensors", "jobs": "jobs"}

#: Longest X-Request-Id that is taken over.
REQUEST_ID_CHARACTERS = 128
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,%d}" % REQUEST_ID_CHARACTERS)
_CLIENT_LEFT = 499

#: Where FastAPI looks for fields.
_LOOKED = (("query",), ("path",), ("header",), ("body",))

_log = logs.Log("gate")


class Gate:
    """The layer around `app`, which belongs to `owner`, whose `state.services` are the shared parts."""

    def __init__(self, app: ASGIApp, owner: FastAPI) -> None:
        self._app = app
        self._owner = owner
        self._hosts: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, from its head to its end."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, self._lifespan(send))
            else:
                await send({"type": "websocket.close"})  # there are none here, and so no way around the keys
            return
        services: Services = self._owner.state.services
        started = time.perf_counter()
        headers = _Headers(scope["headers"])
        scope["path"] = routed(scope)
        state = scope.setdefault("state", {})
        reply = _Reply(send, headers.request_id(), scope)
        trace = logs.Trace.take(headers.text(b"traceparent"))
        if b"traceparent" in headers:
            reply.headers.append((b"traceresponse", trace.traceparent.encode()))
        state |= {"request_id": reply.request_id, "traceparent": trace.traceparent, "stages": {}}
        token = logs.bind(reply.request_id, trace)
        principal: Principal | None = None
        try:
            principal = self._admit(scope, headers, services)
            state["principal"] = principal
            await self._app(scope, receive, reply)
        except ClientGone:
            reply.left = True
        except asyncio.CancelledError:
            reply.left = True
            raise
        except Exception as error:  # The last resort: whatever was raised, the client gets an answer.
            await reply.refuse(error)
        finally:
            if principal is not None:
                services.keys.leave(principal)
                if principal.quota.bytes_per_second is not None:
                    services.keys.owe(principal, reply.sent_bytes + headers.undeclared(scope))
            self._record(services, scope, reply, trace, time.perf_counter() - started)
            logs.unbind(token)

    def _lifespan(self, send: Send) -> Send:
        """Open and close what lives as long as the app; a failed start is told by its cause, not a traceback."""

        async def sender(message: Message) -> None:
            error = sys.exception()
            if message["type"] == "lifespan.startup.failed":  # perhaps before there were any parts
                if isinstance(error, SettingsError | ServiceError | OSError):
                    message = {**message, "message": str(error)}
                await send(message)
                return
            services: Services = self._owner.state.services
            if message["type"] == "lifespan.startup.complete":
                endpoint = services.settings.otel_endpoint
                services.tracer = Tracer(endpoint) if endpoint is not None else None
            elif services.tracer is not None:
                await asyncio.to_thread(services.tracer.close)
            await send(message)

        return sender

    def _admit(self, scope: Scope, headers: _Headers, services: Services) -> Principal:
        """Who sent it; ServiceError where the request may not pass."""
        path: str = scope["path"]
        probe = path.startswith(PROBES) or path == "/metrics"
        if not probe:
            if self._hosts is None:
                self._hosts = allowed_hosts(services.settings)
            headers.check(host=scope["http_version"] != "1.0")
            host = headers.text(b"host")
            check_host(host, self._hosts)
            check_origin(headers.text(b"origin"), host)
        keys = services.keys
        if not keys.required:
            if not services.settings.insecure:
                check_peer(scope.get("client"))
            return ANONYMOUS
        if probe or path in _PAGES or path.startswith(_PAGE):
            return Principal("", frozenset())
        principal = keys.check(headers.text(b"authorization"))
        wanted = wanted_scope(path)
        if wanted is not None:
            principal.require(wanted)
        keys.enter(principal, headers.declared())
        return principal

    def _record(
        self, services: Services, scope: Scope, reply: _Reply, trace: logs.Trace, seconds: float
    ) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        code = reply.status if reply.complete and not reply.left else _CLIENT_LEFT
        services.metrics.request(route, code, seconds)
        if reply.refused:
            services.metrics.reject(reply.refused)
        elif code == _CLIENT_LEFT:
            services.metrics.reject("client_gone")
        stages: dict[str, float] = scope["state"]["stages"]
        probe = route == "/metrics" or route.startswith(PROBES)
        if services.tracer is not None and not probe:
            method: str = scope["method"]
            attributes = {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": code,
            }
            services.tracer.request(
                f"{method} {route}", trace, seconds, stages, attributes, failed=code >= 500
            )
        if not _log.tells(logging.DEBUG if probe else logging.INFO):
            return
        emit = _log.debug if probe else _log.info
        emit(
            "request",
            method=scope["method"],
            route=route,
            code=code,
            seconds=round(seconds, 6),
            sent_bytes=reply.sent_bytes,
            **({"refused": reply.refused} if reply.refused else {}),
            **({"stage": reply.stage} if reply.stage else {}),
            **{f"{stage}_seconds": round(took, 6) for stage, took in stages.items()},
        )


#: Headers that may come once only: of two, one layer might take the first and another the last.
_ONCE = frozenset(
    {
        b"host",
        b"authorization",
        b"content-type",
        b"content-encoding",
        b"transfer-encoding",
        b"idempotency-key",
    }
)
#: Headers that are looked at here.
_READ = _ONCE | {b"origin", b"traceparent", b"x-request-id", b"content-length"}


class _Headers(dict[bytes, bytes]):
    """The request's headers that are read here, by name in lower case, as ASGI has them."""

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__()
        self.twice: bytes | None = None
        for name, value in raw:
            if name in _READ:
                if name in self and name in _ONCE:
                    self.twice = name
                self[name] = value

    def check(self, *, host: bool) -> None:
        """ServiceError malformed where one that may come once came twice, or no Host came and `host`.

        Also not_implemented where the transfer is encoded: the bytes would be taken as they are.
        """
        if self.twice is not None:
            field = self.twice.decode()
            raise ServiceError("malformed", f"the header {field} came twice", field=field)
        if host and b"host" not in self:
            raise ServiceError("malformed", "a host header is needed", field="host")
        if self.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            detail = "no Transfer-Encoding but chunked is taken"
            raise ServiceError("not_implemented", detail, field="transfer-encoding")

    def text(self, name: bytes) -> str | None:
        """The value of a header."""
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    def declared(self) -> int:
        """Bytes of the body, as far as the headers say; 0 for a chunked one."""
        value = self.get(b"content-length", b"0")
        return int(value) if value.isdigit() else 0

    def undeclared(self, scope: Scope) -> int:
        """Bytes of the body that came beyond these; 0 where the server doesn't count them."""
        transfer = (scope.get("extensions") or {}).get(EXTENSION)
        return max(0, getattr(transfer, "received", 0) - self.declared())

    def request_id(self) -> str:
        """The caller's X-Request-Id where it is a plain word, else a new one."""
        value = self.get(b"x-request-id")
        return value.decode() if value is not None and _REQUEST_ID.fullmatch(value) else logs.new_id()


class _Reply:
    """The sending side: adds the request id, remembers what was sent, turns exceptions into problem+json."""

    def __init__(self, send: Send, request_id: str, scope: Scope) -> None:
        self._send = send
        self._scope = scope
        self.request_id = request_id
        self.headers = [(b"x-request-id", request_id.encode())]
        self.status = 0
        self.sent_bytes = 0
        self.complete = False
        self.refused = self.stage = ""
        self._left = False

    async def __call__(self, message: Message) -> None:
        """An ASGI message on its way out."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        elif message["type"] == "http.response.body":
            self.sent_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)

    @property
    def left(self) -> bool:
        """Whether the client went away before the reply was its."""
        transfer = (self._scope.get("extensions") or {}).get(EXTENSION)
        return self._left or bool(getattr(transfer, "gone", False) and not self.complete)

    @left.setter
    def left(self, value: bool) -> None:
        self._left = value

    async def refuse(self, error: Exception) -> None:
        """Answer with what went wrong; a reply that has begun stays cut short, and the connection closes."""
        if type(error).__name__ == "ClientDisconnect":
            self.left = True
            return
        problem = translate(error)
        self.refused, self.stage = problem.code, problem.stage
        if problem.code == "internal":
            _log.error("unhandled", exception=error, route=getattr(self._scope.get("route"), "path", ""))
        if self.status:
            _log.error("reply cut short", code=problem.code)
            return
        status, headers, body = render(problem, self.request_id, self._scope["path"])
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": b"" if self._scope["method"] == "HEAD" else body})


def translate(error: Exception) -> ServiceError:
    """The refusal that an exception stands for: ours, the framework's, or one that nobody foresaw."""
    if isinstance(error, ServiceError):
        return error
    if (soon := short(error)) is not None:
        return soon
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return _from_status(status, getattr(error, "detail", ""), getattr(error, "headers", None))
    if type(error).__name__ in ("RequestValidationError", "ValidationError"):
        return _from_validation(error)
    return ServiceError("internal", "an error that the service didn't foresee; its log has the request id")


def _from_status(status: int, detail: object, headers: Any) -> ServiceError:
    codes = [code for code, (known, _) in CODES.items() if known == status]
    code = codes[0] if codes else "internal" if status >= 500 else "malformed"
    if status == 404:
        detail = "there is no such path; /docs lists all"
    elif status == 405:
        detail = f"this path takes {dict(headers or {}).get('allow') or dict(headers or {}).get('Allow')}"
    return ServiceError(code, str(detail), headers=dict(headers or {}))


def _from_validation(error: Any) -> ServiceError:
    """The faults of a pydantic error: each place and what was expected, never the value that came."""
    return refusal(error.errors(), field_of=_field)


def _field(place: Place) -> str:
    """FastAPI's path begins with where it looked."""
    return ".".join(map(str, place[1:] if place[:1] in _LOOKED else place))


def render(problem: ServiceError, request_id: str, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of a refusal: problem+json, under /v2 that protocol's own form."""
    if path.startswith("/v2"):
        status = status_of(problem)
        body = json.dumps({"error": problem.detail}).encode()
        media = b"application/json"
    else:
        status = problem.status
        body = problem.body(request_id)
        media = b"application/problem+json"
    headers = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in problem.headers.items()]
    if problem.retry_after is not None:
        headers.append((b"retry-after", str(max(1, round(problem.retry_after + 0.5))).encode()))
    return status, headers, body


def wanted_scope(path: str) -> str | None:
    """The scope that a path asks of a key; None where any valid key does."""
    parts = path.strip("/").split("/")
    if parts[0] == "v2":
        if "repository" in parts or parts[-1] in ("register", "unregister"):
            return "admin" if parts[-1] in ("load", "unload", "register", "unregister") else None
        return "gemm" if parts[-1] == "infer" else None
    return _SCOPES.get(parts[0])


def allowed_hosts(settings: Settings) -> frozenset[str]:
    """Names taken in Host. Beyond loopback any address does too: a name is what a rebinding page needs."""
    if "*" in settings.hosts:
        return frozenset({"*"})
    names = {"localhost", "127.0.0.1", "::1", settings.host, *settings.hosts}
    if not settings.loopback:
        names |= {socket.gethostname(), "<address>"}
    return frozenset(name.lower().strip("[]").rstrip(".") for name in names)


def check_host(host: str | None, allowed: frozenset[str]) -> None:
    """ServiceError misdirected where `host` (with or without port) isn't one of the service's names."""
    if host is None or "*" in allowed:
        return
    name = _without_port(host)
    if name in allowed:
        return
    name = name.lower().rstrip(".")
    if name in allowed or ("<address>" in allowed and _is_address(name)):
        return
    raise ServiceError(
        "misdirected", "the Host isn't one of this service's names; see the setting hosts", field="Host"
    )


def check_origin(origin: str | None, host: str | None) -> None:
    """ServiceError forbidden where a page of another origin made a browser send this."""
    if origin is not None and origin.partition("://")[2].lower() != (host or "").lower():
        raise ServiceError("forbidden", "a page of another origin may not use this service", field="Origin")


def check_peer(client: tuple[str, int] | None) -> None:
    """ServiceError forbidden where a request came from another machine though no keys are set.

    Start-up refuses such an address already; another ASGI server that runs this app may listen anywhere.
    """
    if client is None or client[0] in ("127.0.0.1", "::1") or _is_loopback(client[0]):
        return
    raise ServiceError("forbidden", "without keys only this machine may use the service")


def _is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_loopback or bool(
        parsed.version == 6 and parsed.ipv4_mapped and parsed.ipv4_mapped.is_loopback
    )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_exposure(settings: Settings, keys: Keys) -> None:
    """Refuse to start where anyone on the network could use the service: SettingsError names the ways out."""
    if settings.loopback or settings.insecure or keys.required:
        return
    raise SettingsError(
        f"host = {settings.host!r} would let anyone who reaches it use the service: give it keys"
        " (`gemm-service keys add`, then --keys-file), or say --insecure"
    )
