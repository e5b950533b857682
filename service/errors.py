"""Every refusal of the service in one table: receives a code and a detail, hands on problem+json (RFC 9457)."""

from __future__ import annotations

import errno
import json
from types import TracebackType
from typing import Any

#: code → (HTTP status, title). Codes are stable: clients may switch on them.
CODES: dict[str, tuple[int, str]] = {
    "malformed": (400, "The request can't be parsed or is cut short"),
    "unauthorized": (401, "An API key is needed"),
    "forbidden": (403, "This key or origin may not do that"),
    "not_found": (404, "There is no such thing"),
    "method_not_allowed": (405, "The method isn't allowed here"),
    "not_acceptable": (406, "The reply can't be given in an accepted form"),
    "request_timeout": (408, "The request took too long to arrive"),
    "conflict": (409, "Another request is in the way"),
    "lost": (410, "The tensor was lost before it was durable"),
    "precondition_failed": (412, "A precondition failed"),
    "too_large": (413, "The request, or what it asks for, is larger than the limit"),
    "unsupported_media_type": (415, "The form of the body isn't known"),
    "range_not_satisfiable": (416, "The range lies outside the tensor"),
    "misdirected": (421, "The Host isn't one of this service's names"),
    "invalid": (422, "The request is well-formed but invalid"),
    "unsupported": (422, "No variant can take this problem"),
    "idempotency_mismatch": (422, "The Idempotency-Key was used with another body"),
    "queue_full": (429, "The queue is full"),
    "quota": (429, "The key's quota is used up"),
    "headers_too_large": (431, "The headers are larger than the limit"),
    "internal": (500, "The service failed"),
    "not_implemented": (501, "The service can't do that"),
    "draining": (503, "The service is shutting down"),
    "no_worker": (503, "No worker is ready"),
    "unavailable": (503, "A store that fronts share can't be reached"),
    "read_only": (503, "The data folder can't be written"),
    "deadline": (504, "The deadline passed before the work was done"),
    "no_room": (507, "There is no room"),
}


#: What the system says when it has no more descriptors, memory or processes for us.
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class ServiceError(Exception):
    """A refusal with its code. `field` names what is at fault, `limit` the bound that was passed."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        limit: int | float | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.field = field
        self.limit = limit
        self.retry_after = retry_after
        self.headers = headers or {}
        #: The stage word of where it was refused, for the log; "" where that was no stage of a product.
        self.stage = ""

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return CODES[self.code][0]

    def problem(self, request_id: str = "") -> dict[str, Any]:
        """The problem+json document."""
        status, title = CODES[self.code]
        document: dict[str, Any] = {
            "type": "about:blank",
            "title": title,
            "status": status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.field is not None:
            document["field"] = self.field
        if self.limit is not None:
            document["limit"] = self.limit
        if request_id:
            document["request_id"] = request_id
        return document

    def body(self, request_id: str = "") -> bytes:
        """The document as bytes of application/problem+json."""
        return json.dumps(self.problem(request_id)).encode()


class at_stage:
    """Refusals from within the block were made at this stage of a product, unless they know better."""

    __slots__ = ("_stage",)

    def __init__(self, stage: str) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ServiceError):
            error.stage = error.stage or self._stage


def short(error: BaseException) -> ServiceError | None:
    """The refusal where the system is short of something that others may give back soon."""
    if isinstance(error, OSError) and error.errno in _SHORT:
        detail = f"the system has nothing left for this now ({error.strerror})"
        return ServiceError("no_room", detail, retry_after=1.0)
    return None
