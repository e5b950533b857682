"""POST /variants/choose as any other body: bounded, declared as JSON, refused with the right code and field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import ServiceError
from tests.service.serving import Site, serving

JSON = {"content-type": "application/json"}
QUESTION = b'{"m": 1, "n": 2, "k": 3}'


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


async def test_a_question_is_handed_on_whole(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def ask(what: str, args: dict[str, Any]) -> dict[str, Any]:
        asked.append((what, args))
        return {"variant": "numpy"}

    monkeypatch.setattr(site.computer, "ask", ask, raising=False)
    reply = await site.ann.post("/variants/choose", content=QUESTION, headers=JSON)
    assert (reply.status_code, reply.json()) == (200, {"variant": "numpy"})
    ((what, args),) = asked
    assert what == "choose"
    assert (args["m"], args["n"], args["k"], args["variant"], args["trans_b"]) == (1, 2, 3, "auto", False)
    assert args["beta"] == 0.0
    for told, beta in (({"c": True}, 1.0), ({"c": True, "beta": 0}, 0.0), ({"c": True, "beta": -2}, -2.0)):
        await site.ann.post("/variants/choose", json={"m": 1, "n": 2, "k": 3, **told})
        assert asked[-1][1]["beta"] == beta


@pytest.mark.parametrize(
    ("content", "headers", "code", "field"),
    [
        (b"{", JSON, "malformed", "body"),
        (b"\xff", JSON, "malformed", "body"),
        (b"[" * 60_000, JSON, "malformed", "body"),
        (b" " * (1 << 16) + QUESTION, JSON, "too_large", "body"),
        (QUESTION, {"content-type": "text/plain"}, "unsupported_media_type", "content-type"),
        (QUESTION, {}, "unsupported_media_type", "content-type"),
        (QUESTION, {**JSON, "content-encoding": "gzip"}, "unsupported_media_type", "content-encoding"),
        (b'{"m": 1, "n": 2}', JSON, "invalid", "k"),
        (b"[]", JSON, "invalid", "body"),
        (b'{"m": 1, "n": 2, "k": 3, "colour": 4}', JSON, "invalid", "colour"),
        (b'{"m": 1, "n": 2, "k": 3, "k": 4}', JSON, "invalid", "k"),
        (b'{"m": "1", "n": 2, "k": 3}', JSON, "invalid", "m"),
        (b'{"m": true, "n": 2, "k": 3}', JSON, "invalid", "m"),
        (b'{"m": 1, "n": 2, "k": 2147483648}', JSON, "invalid", "k"),
        (b'{"m": 1, "n": 2, "k": 3, "beta": 1}', JSON, "invalid", "beta"),
        (b'{"m": 1, "n": 2, "k": 3, "trans_a": 1}', JSON, "invalid", "trans_a"),
    ],
)
async def test_a_bad_question_is_refused(
    site: Site, content: bytes, headers: dict[str, str], code: str, field: str
) -> None:
    reply = await site.ann.post("/variants/choose", content=content, headers=headers)
    problem = reply.json()
    assert (problem["code"], problem["field"]) == (code, field)


async def test_a_variant_that_does_not_exist_is_the_field_at_fault(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(what: str, args: dict[str, Any]) -> None:
        raise ServiceError("unsupported", "it does not exist")

    monkeypatch.setattr(site.computer, "ask", ask, raising=False)
    for variant, field in (("step10", "variant"), ("auto", None)):
        question = {"m": 1, "n": 2, "k": 3, "variant": variant}
        reply = await site.ann.post("/variants/choose", json=question)
        assert (reply.status_code, reply.json().get("field")) == (422, field)


@pytest.mark.parametrize(
    ("content", "headers", "code", "field"),
    [
        (b"x", JSON, "malformed", "body"),
        (b"{}", {"content-type": "text/plain"}, "unsupported_media_type", "content-type"),
        (b'{"depth": 9}', JSON, "invalid", "depth"),
        (b'{"same_phase": 1}', JSON, "invalid", "same_phase"),
        (b'{"depth": 1, "depth": 2}', JSON, "invalid", "depth"),
    ],
)
async def test_a_bad_schedule_is_refused_as_any_question(
    site: Site, content: bytes, headers: dict[str, str], code: str, field: str
) -> None:
    problem = (await site.ann.post("/timeline", content=content, headers=headers)).json()
    assert (problem["code"], problem["field"]) == (code, field)
