"""A route that is plain ASGI: receives (scope, receive, send) with no FastAPI in between, yet stands in OpenAPI.

FastAPI's own handler reads and validates a body before the endpoint sees it, and its layers cost more than a
small product; a tensor's body must go from the socket into its slot instead. The declared endpoint still makes
the schema.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.query import no_query
from service.transfer import Transfer

PlainApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def plain(application: PlainApp) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an endpoint (which only documents parameters and responses) with the ASGI callable that runs."""

    def mark(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        endpoint.plain = application  # type: ignore[attr-defined]
        return endpoint

    return mark


class PlainRoute(APIRoute):
    """An APIRoute that calls its endpoint's `plain` application, where there is one."""

    #: Methods of all routes of a path, each of which knows its own only.
    _methods: ClassVar[dict[str, set[str]]] = {}

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._methods.setdefault(path, set()).update(self.served)

    @property
    def served(self) -> frozenset[str]:
        """Methods that are answered: HEAD wherever GET is. The OpenAPI document has those that were declared."""
        declared = frozenset(self.methods or ())
        return declared | {"HEAD"} if "GET" in declared else declared

    @property
    def plain(self) -> PlainApp | None:
        """The ASGI callable that serves this route."""
        return getattr(self.endpoint, "plain", None)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As declared, and HEAD as GET."""
        match, child = super().matches(scope)
        if match is Match.PARTIAL and scope["method"] in self.served:
            match = Match.FULL
        return match, child

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the plain application; 405 for other methods."""
        if scope["method"] not in self.served:
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(self._methods[self.path]))})
        if self.plain is not None:
            await self.plain(scope, receive, bodiless(scope, send))
            return
        if self.include_in_schema and not self.dependant.query_params:
            no_query(scope)
        bare = bodiless(scope, send)
        if scope["method"] not in (self.methods or ()):
            scope = {**scope, "method": "GET"}
        await super().handle(scope, receive, bare)


def bodiless(scope: Scope, send: Send) -> Send:
    """The way out of a reply, which has no body where HEAD was asked."""
    if scope["method"] != "HEAD":
        return send

    async def sender(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return sender


async def begin_events(transfer: Transfer) -> bool:
    """Begin a stream of server-sent events; False where HEAD was asked, and all is said."""
    await transfer.start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")])
    if transfer.scope["method"] != "HEAD":
        return True
    await transfer.write(b"", more=False)
    return False


class Shortcut:
    """Calls plain routes of fixed paths directly; all else goes through `app`'s layers."""

    def __init__(self, app: ASGIApp, owner: Any, routers: Iterable[APIRouter]) -> None:
        self._app = app
        self._owner = owner
        self._routes = {
            (method, route.path): (route, route.plain)
            for router in routers
            for route in router.routes
            if isinstance(route, PlainRoute) and route.plain is not None and "{" not in route.path
            for method in route.served
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        route, application = found
        scope["app"], scope["route"] = self._owner, route
        await application(scope, receive, bodiless(scope, send))
