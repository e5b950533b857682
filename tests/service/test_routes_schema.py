"""The OpenAPI document: every reference resolves, every route is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from service.app import create_app


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app().openapi()


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_reference_resolves(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert "#/components/schemas/StepBody" in found
    for reference in found:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            assert part in place, reference
            place = place[part]


def test_refusals_are_problems(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            refusals = {k: v for k, v in operation["responses"].items() if k == "default" or k[0] in "45"}
            assert "default" in refusals, (method, path)
            form = "application/json" if path.startswith("/v2") else "application/problem+json"
            for response in refusals.values():
                assert list(response["content"]) == [form]
    assert "not_found" in document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"]


def test_query_fields_are_described_and_not_sent_unasked(document: dict[str, Any]) -> None:
    """A default in the schema makes Swagger's "Try it out" send the field, also beside a JSON body."""
    for path, method in (("/gemm", "post"), ("/tensors/{name}", "put")):
        fields = [one for one in document["paths"][path][method]["parameters"] if one["in"] == "query"]
        assert fields
        assert not [one["name"] for one in fields if "default" in one["schema"]]
    told = {one["name"]: one.get("description") for one in document["paths"]["/gemm"]["post"]["parameters"]}
    assert told["trans_a"] == "A is stored [K, M] (default: false)"
    assert told["activation"] == "(default: none)"


def test_keys_are_told_and_what_is_open_without_them(document: dict[str, Any]) -> None:
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["security"] == [{}, {"key": []}]
    free = {
        path
        for path, operations in document["paths"].items()
        if all(operation.get("security") == [] for operation in operations.values())
    }
    assert free == {"/health/live", "/health/ready", "/metrics", "/v2/health/live", "/v2/health/ready"}


def test_every_operation_says_what_it_is(document: dict[str, Any]) -> None:
    assert {"/gemm", "/tensors/{name}", "/tensors", "/jobs", "/jobs/{job}"} <= set(document["paths"])
    names = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            names.add(operation["operationId"])
    assert len(names) == sum(map(len, document["paths"].values()))


def test_every_part_of_a_path_is_described(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            told = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert told == set(re.findall(r"{(\w+)}", path)), (method, path)
