"""Fields that a validation refused become one refusal: receives pydantic's errors, hands on a ServiceError.

All fields at fault are named, so that a client mends them at once; the first is the refusal's own, with the
bound that its value passed. Values that came are never repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from service.errors import ServiceError

Place = tuple[int | str, ...]

#: Fields that are named; of more, how many there are.
NAMED = 8
_CHARACTERS = 500
#: Where an error's context holds the bound that was passed.
_BOUNDS = ("le", "lt", "ge", "gt", "max_length", "min_length")
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "isn't known",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "dict_type": "should be an object",
}


def refusal(
    errors: Iterable[Mapping[str, Any]],
    *,
    field_of: Callable[[Place], str],
    words: Mapping[str, str] | None = None,
) -> ServiceError:
    """ServiceError invalid. `field_of` names the field at a place; `words` are of a type of error or a pattern."""
    told: dict[str, list[str]] = {}
    limit: float | None = None
    known = _WORDS | dict(words or {})
    for error in errors:
        field = field_of(error["loc"])[:200]
        context = error.get("ctx") or {}
        if not told:
            limit = _bound(context)
        complaint = known.get(context.get("pattern", "")) or known.get(error["type"])
        # Each form that a field may have complains.
        told.setdefault(field, []).append(complaint or _short(error["msg"]))
    parts = [f"{field or 'body'}: {' or '.join(complaints)}" for field, complaints in told.items()]
    more = len(parts) - NAMED
    detail = "; ".join(parts[:NAMED]) + (f" (and {more} more)" if more > 0 else "")
    return ServiceError("invalid", _cut(detail), field=next(iter(told), "") or "body", limit=limit)


def _bound(context: Mapping[str, Any]) -> float | None:
    bounds = (context[name] for name in _BOUNDS if name in context)
    return next((bound for bound in bounds if isinstance(bound, int | float)), None)


def _short(message: str) -> str:
    """pydantic's words without what the field's name says."""
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    return message[:1].lower() + message[1:].replace(" after validation", "")


def _cut(text: str) -> str:
    return text if len(text) <= _CHARACTERS else text[: _CHARACTERS - 1] + "…"
