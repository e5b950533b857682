"""How a call fails: receives a reply that is no success, hands on an exception to catch by its kind."""

from __future__ import annotations

import json
from typing import Any


class GemmError(Exception):
    """Base of all that this client raises about the service; wrong arguments are ValueError and TypeError."""

    def __reduce__(self) -> Any:
        """So that it crosses to another process, whatever it was made with."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[GemmError], args: tuple[Any, ...], fields: dict[str, Any]) -> GemmError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConnectionFailed(GemmError):
    """No reply came. `sent` tells whether the service may have seen the request."""

    def __init__(self, detail: str, *, sent: bool) -> None:
        super().__init__(detail)
        self.sent = sent


class TimedOut(ConnectionFailed):
    """No reply came within the time given for the call."""


class Refused(GemmError):
    """The service answered with an error: `status` and `code` say which, `detail` why.

    `field` is the parameter at fault, `limit` the bound that was passed, `retry_after` seconds to wait.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        limit: float | None = None,
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        text = f"{status} {code}: {detail}"
        if field is not None and not detail.startswith(f"{field}:"):
            text += f" (field {field})"
        if limit is not None:
            text += f" (limit {limit:g})" if isinstance(limit, float) else f" (limit {limit})"
        if request_id:
            text += f" [request {request_id}]"
        super().__init__(text)
        self.status = status
        self.code = code
        self.detail = detail
        self.field = field
        self.limit = limit
        self.retry_after = retry_after
        self.request_id = request_id


class Invalid(Refused):
    """400, 413, 415, 422 and their like: the same request will fail again."""


class NotAllowed(Refused):
    """401 or 403: the key is missing, wrong, or lacks a scope."""


class NotFound(Refused):
    """404 or 410: there is no such handle, job or step, or it was lost."""


class Busy(Refused):
    """429, 503 or 507: not now; the client has retried as often as it was told to."""


class DeadlinePassed(Refused):
    """504: the request's own deadline passed before the work was begun."""


class JobFailed(GemmError):
    """A job ended otherwise than done; `job` tells how each step ended."""

    def __init__(self, detail: str, job: Any) -> None:
        super().__init__(detail)
        self.job = job


_KINDS: dict[int, type[Refused]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    410: NotFound,
    429: Busy,
    503: Busy,
    507: Busy,
    504: DeadlinePassed,
}


def refusal(status: int, headers: dict[str, str], body: bytes) -> Refused:
    """The exception for a reply; one that isn't problem+json (a proxy's) is told by its status."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {"detail": body[:200].decode("utf-8", "replace").strip() or "no explanation was sent"}
    if 300 <= status < 400:
        document["detail"] = f"sent on to {headers.get('location')}; is that the url to use?"
    kind = _KINDS.get(status, Invalid if 400 <= status < 500 else Refused)
    return kind(
        status,
        str(document.get("code", "unknown")),
        str(document.get("detail", "")),
        field=document.get("field"),
        limit=document.get("limit"),
        retry_after=_seconds(headers.get("retry-after")),
        request_id=headers.get("x-request-id", ""),
    )


def _seconds(text: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, is left to the client's own back-off."""
    return float(text) if text is not None and text.strip().isdigit() else None
