"""A route that is plain ASGI: receives (scope, receive, send) with no FastAPI in between, yet stands in OpenAPI.

FastAPI's own handler reads and validates a body before the endpoint sees it; a tensor's body must go from the
socket into its slot instead. The declared endpoint still makes the schema.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

PlainApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class PlainRoute(APIRoute):
    """An APIRoute whose application is the ASGI callable found at `endpoint.plain`, where there is one."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        plain: PlainApp | None = getattr(endpoint, "plain", None)
        if plain is not None:
            self.app = plain


def plain(application: PlainApp) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an endpoint (which only documents parameters and responses) with the ASGI callable that runs."""

    def mark(endpoint: Callable[..., Any]) -> Callable[..., Any]:
        endpoint.plain = application  # type: ignore[attr-defined]
        return endpoint

    return mark
