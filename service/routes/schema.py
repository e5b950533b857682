"""The OpenAPI document's loose ends: receives what FastAPI made, hands on one whose every reference resolves.

Bodies of plain routes are described by pydantic's own schemas, which carry their parts along in `$defs`.
"""

from __future__ import annotations

from typing import Any


def hoist(document: dict[str, Any]) -> dict[str, Any]:
    """Move each `$defs` to the document's components, where the references point."""
    parts: dict[str, Any] = {}
    _collect(document, parts)
    known = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in parts.items():
        known.setdefault(name, schema)
    return document


def _collect(value: Any, parts: dict[str, Any]) -> None:
    if isinstance(value, list):
        for one in value:
            _collect(one, parts)
    elif isinstance(value, dict):
        if isinstance(value.get("$defs"), dict):
            parts.update(value.pop("$defs"))
        for one in list(value.values()):
            _collect(one, parts)
