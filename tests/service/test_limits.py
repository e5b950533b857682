"""/limits tells all limits: of the settings, of refusals, and of the models that check requests."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from pydantic import BaseModel

import service
from service.inference.request import Document
from service.limits import FIXED, SETTINGS, limits_of
from service.model import GemmBody, GemmQuery
from service.routes.info import Question
from service.routes.jobs import WaitQuery
from service.routes.tensors import PageQuery
from service.settings import Settings
from service.upload import PutQuery

SOURCES = Path(service.__file__).parent
#: Numbers among the settings that bound no client.
NOT_LIMITS = {
    *("port", "metrics_port", "grpc_port", "workers", "start_seconds", "ping_seconds", "hang_seconds"),
    *("lease_seconds", "shared_seconds"),  # between fronts
    *("shard_bytes", "ray_ranks"),  # where products are computed
}
#: What a refusal's `limit=` may read besides constants and settings: a key's own quota or share, memory that a client
#: lent itself, and names under which settings are handed on.
OTHER = {
    "share",
    "rate",
    "largest",
    "most",
    "rate.flops_per_second",
    "region.nbytes",
    "nbytes",
    "limit",
    "self.most",
}
HANDED_ON = {
    "bounds.requests": "queue_requests",
    "bounds.nbytes": "queue_bytes",
    "self.share": "key_bytes",
    "self.arena.size": "arena_bytes",
    "budget": "store_disk_bytes",
    "self._limit": "max_body_bytes",
}


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return limits_of(Settings())


def test_every_number_among_the_settings_is_told_or_no_limit() -> None:
    numbers = {
        name
        for name, field in Settings.model_fields.items()
        if field.annotation in (int, float) or field.annotation == int | None
    }
    assert numbers - NOT_LIMITS == set(SETTINGS)


def refusals() -> Iterator[tuple[Path, ast.expr]]:
    """What each ServiceError in the sources gives as its limit."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ServiceError":
                yield from ((path, one.value) for one in node.keywords if one.arg == "limit")


def test_every_limit_that_a_refusal_names_is_told(told: dict[str, Any]) -> None:
    seen = list(refusals())
    assert len(seen) > 20
    for path, value in seen:
        text = ast.unparse(value)
        if isinstance(value, ast.Constant):
            raise AssertionError(f"{path.name}: {text} has no name")
        if text in OTHER:
            continue
        if text.isupper():
            module = ".".join(["service", *path.relative_to(SOURCES).with_suffix("").parts])
            assert getattr(importlib.import_module(module), text) in FIXED.values(), (path.name, text)
        else:
            assert HANDED_ON.get(text, text.rpartition(".")[2]) in told, (path.name, text)


@pytest.mark.parametrize("model", [GemmBody, GemmQuery, PutQuery, PageQuery, WaitQuery, Question, Document])
def test_every_bound_of_a_request_is_told(model: type[BaseModel], told: dict[str, Any]) -> None:
    lowest = told["priorities"]["lowest"]
    for name, field in model.model_fields.items():
        for bound in field.metadata:
            if isinstance(bound, annotated_types.Le):
                assert bound.le in (*told.values(), lowest), (name, bound)
            if isinstance(bound, annotated_types.MaxLen):
                assert bound.max_length in told.values(), (name, bound)
