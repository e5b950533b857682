"""The OpenAPI document's loose ends: receives what FastAPI made, hands on one that tells the whole truth.

Bodies of plain routes are described by pydantic's own schemas, which carry their parts along in `$defs`; every
refusal is problem+json, whatever FastAPI supposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from service.errors import CODES
from service.gate import PROBES

_PROBLEM: dict[str, Any] = {
    "title": "Problem",
    "description": "A refusal, as RFC 9457 has it. Clients may switch on `code`.",
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "enum": list(CODES)},
        "detail": {"type": "string"},
        "field": {"type": "string", "description": "What is at fault"},
        "limit": {"type": "number", "description": "The bound that was passed"},
        "request_id": {"type": "string"},
    },
}
#: Who sends what; without keys the service asks for none.
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key (`gemm-service keys add`), where the service was started with keys",
}
_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
#: The inference protocol has an error form of its own.
_ERROR: dict[str, Any] = {
    "application/json": {
        "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    }
}


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """A model's fields as query parameters. Defaults are told in words: tools would send them with every request."""
    properties = model.model_json_schema(ref_template="#/components/schemas/{model}")["properties"]
    return [_parameter(name, dict(field)) for name, field in properties.items()]


def _parameter(name: str, field: dict[str, Any]) -> dict[str, Any]:
    told, default = field.pop("description", ""), field.pop("default", None)
    if default is not None:
        told = f"{told} (default: {str(default).lower() if isinstance(default, bool) else default})".strip()
    parameter = {"name": name, "in": "query", "required": False, "schema": field}
    return parameter | {"description": told} if told else parameter


def finish(document: dict[str, Any]) -> dict[str, Any]:
    """Make every reference resolve and every refusal a problem."""
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    parts: dict[str, Any] = {}
    _collect(document, parts)
    for name, schema in parts.items():
        schemas.setdefault(name, schema)
    schemas["Problem"] = _PROBLEM
    document["components"]["securitySchemes"] = {"key": _KEY}
    document["security"] = [{}, {"key": []}]
    for path, operations in document["paths"].items():
        if path.startswith(PROBES) or path == "/metrics":
            operations.update({method: {**told, "security": []} for method, told in operations.items()})
    for content, operation in _operations(document):
        responses: dict[str, Any] = operation.setdefault("responses", {})
        for status, response in responses.items():
            if status.startswith(("4", "5")):
                response["content"] = content
        responses["default"] = {"description": "A refusal", "content": content}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _operations(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every operation with the form of its refusals."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            yield _ERROR if path.startswith("/v2") else _CONTENT, operation


def _collect(value: Any, parts: dict[str, Any]) -> None:
    if isinstance(value, list):
        for one in value:
            _collect(one, parts)
    elif isinstance(value, dict):
        if isinstance(value.get("$defs"), dict):
            parts.update(value.pop("$defs"))
        for one in list(value.values()):
            _collect(one, parts)
