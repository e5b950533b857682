"""What a request says beside its operands: receives headers, query and small bodies, hands on media type and fields."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar
from urllib.parse import parse_qsl

from pydantic import BaseModel

from service.errors import ServiceError
from service.formats import numbers
from service.model import GemmQuery, validate, validate_query
from service.transfer import Scope, Transfer

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"
RAW = "application/octet-stream"

#: Longest question or other small request in JSON: it is read onto the heap.
QUESTION_BYTES = 1 << 16

#: Most fields of a query.
QUERY_FIELDS = 64

Question = TypeVar("Question", bound=BaseModel)


def media_of(transfer: Transfer) -> str:
    """The body's media type, without parameters; an encoded body is refused."""
    if transfer.header(b"content-encoding") not in (None, "identity"):
        raise ServiceError(
            "unsupported_media_type", "bodies are taken as they are, not encoded", field="content-encoding"
        )
    return (transfer.header(b"content-type") or "").partition(";")[0].strip().lower()


def require_json(transfer: Transfer) -> None:
    """Refuse a body that isn't said to be JSON."""
    media = media_of(transfer)
    if media != JSON:
        raise ServiceError(
            "unsupported_media_type",
            f"Content-Type {media[:80] or '(none)'} isn't {JSON}",
            field="content-type",
            headers={"Accept": JSON},
        )


async def read_question(transfer: Transfer, model: type[Question]) -> Question:
    """A small request in JSON, without query fields."""
    no_query(transfer.scope)
    require_json(transfer)
    return validate(model, numbers.loads(await transfer.read_all(QUESTION_BYTES)))


def parse_query(text: bytes) -> dict[str, str]:
    """Query fields; one given twice is refused."""
    try:
        pairs = parse_qsl(
            text.decode("ascii"), keep_blank_values=True, strict_parsing=True, max_num_fields=QUERY_FIELDS
        )
    except ValueError:
        if not text:
            return {}
        raise ServiceError("malformed", "the query can't be parsed", field="query") from None
    return numbers.unique(pairs)


def no_query(scope: Scope) -> None:
    """Refuse fields where none are known."""
    fields = parse_query(scope["query_string"])
    if fields:
        field = next(iter(fields))[:64]
        raise ServiceError("invalid", f"{field}: isn't known here", field=field)


@lru_cache(maxsize=512)
def query_fields(text: bytes) -> GemmQuery:
    """The fields of a binary form. Clients send few different queries, many times."""
    return validate_query(GemmQuery, parse_query(text))


def handle_in(reference: str | None) -> str | None:
    """The name in `handle:NAME`."""
    return reference.removeprefix("handle:") if reference and reference.startswith("handle:") else None
