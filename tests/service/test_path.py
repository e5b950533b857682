"""Paths as they are looked up: an escape adds no segment and hides no fixed word, and every bad name has its answer."""

from __future__ import annotations

import re
import string
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service import keys
from service.path import routed
from service.routes import gemm, inference, info, jobs, page, tensors
from service.routes.plain import PlainRoute
from tests.service.real import running
from tests.service.serving import RAW, Site, serving
from tests.service.test_hostile import connect, status

#: As sent. Those that other software on the way would resolve, as "..", come by the socket below.
BAD = (
    *("a%2Fb", "a%2fb", "%2F", "%2e%2e%2F%2e%2e", "a%252Fb", "a%5Cb", "%2e%2e", "%2e"),
    *("a%00b", "%00", "a%0A", "%0A", "a%0D%0Ab", "a%7F", "a%20b", "%20", "a%3Fb", "a%23b"),
    *("%ff", "a%ffb", "%C3%A9", "%ED%A0%80", "a%", "a%zz", "x" * 129, "x" * 3000, "%2F" * 1000),
)
NO_PATH = "there is no such path"


def parametrized() -> list[tuple[str, str, str]]:
    """(method, path, one of its parameters) of all routes."""
    return [
        (method, route.path, name)
        for part in (gemm, inference, info, jobs, page, tensors)
        for route in part.router.routes
        if isinstance(route, PlainRoute)
        for method in sorted(route.served)
        for name in re.findall(r"{(\w+)}", route.path)
    ]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path, shared_memory=True) as site:
        yield site


async def filled(site: Site) -> dict[str, str]:
    """Values for the parts of paths, and a key that may do all."""
    path = site.services.settings.keys_file
    assert path is not None
    token = keys.add(path, "ann", scopes=["admin"])[1]
    site.services.keys._take(keys.read(path))
    site.ann.headers["authorization"] = f"Bearer {token}"
    await site.ann.put("/tensors/w?shape=1x1&dtype=fp32", content=bytes(4), headers=RAW)
    job = (await site.ann.post("/jobs", json={"steps": [{"id": "s", "a": [[1]], "b": [[2]]}]})).json()["id"]
    return {"name": "w", "job": job, "step": "s", "model": "gemm", "version": "1", "region": "r"}


def as_sent(path: str) -> httpx.URL:
    return httpx.URL("http://localhost", raw_path=path.encode())


def text(reply: httpx.Response) -> str:
    """What a refusal says, in either form."""
    document = reply.json()
    return str(document.get("detail") or document["error"])


class TestEveryRoute:
    async def test_a_bad_name_is_refused_as_a_name(self, site: Site) -> None:
        values = await filled(site)
        seen = set()
        for method, path, name in parametrized():
            for bad in BAD:
                target = path.format(**values | {name: bad})
                reply = await site.ann.request(method, as_sent(target), json={"key": "/k", "byte_size": 1})
                what = (method, target[:200], reply.status_code)
                if reply.status_code == 501:  # says so for every name
                    continue
                if path.endswith("/unregister"):  # what isn't there has ended already
                    assert reply.status_code == 200, what
                    continue
                assert reply.status_code in {400, 404, 422}, what
                if method != "HEAD":
                    assert NO_PATH not in text(reply), what
                    assert len(reply.content) < 1000, what
                seen.add(name)
        assert seen == {"name", "job", "step", "model", "version", "region"}

    async def test_a_tensors_bad_name_is_422_with_field_and_rule(self, site: Site) -> None:
        for method in ("PUT", "GET", "DELETE"):
            for bad in BAD:
                query = "?dtype=fp32&shape=1x1" if method == "PUT" else ""
                reply = await site.ann.request(
                    method, as_sent(f"/tensors/{bad}{query}"), content=bytes(4), headers=RAW
                )
                assert reply.status_code == 422, (method, bad)
                assert (reply.json()["code"], reply.json()["field"]) == ("invalid", "name")
                assert "up to 127 of A-Za-z0-9._-" in text(reply)
        assert (await site.ann.get("/tensors")).json()["tensors"] == []

    async def test_a_regions_bad_name_is_told_by_its_rule(self, site: Site) -> None:
        await filled(site)
        for bad in BAD:
            target = as_sent(f"/v2/systemsharedmemory/region/{bad}/register")
            reply = await site.ann.post(target, json={"key": "/k", "byte_size": 1})
            assert (reply.status_code, "1 to 128 letters" in text(reply)) == (400, True), bad

    async def test_what_follows_a_page_is_a_name(self, site: Site) -> None:
        for path in ("/tensors", "/jobs"):
            for bad in BAD:
                if bad in ("a%", "a%zz"):  # no escapes in a query, but characters
                    continue
                reply = await site.ann.get(as_sent(f"{path}?after={bad}"))
                assert (reply.status_code, reply.json()["field"]) == (422, "after"), bad
            assert (await site.ann.get(f"{path}?after=")).status_code == 200


class TestScopes:
    @pytest.mark.parametrize("end", ["%0A", "%0a", "%0D", "%00", "%2F", "%20"])
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/gemm"),
            ("GET", "/tensors"),
            ("GET", "/jobs"),
            ("GET", "/variants"),
            ("POST", "/v2/models/gemm/infer"),
            ("POST", "/v2/repository/models/gemm/unload"),
            ("POST", "/v2/systemsharedmemory/unregister"),
        ],
    )
    async def test_an_escape_at_the_end_passes_no_scope(
        self, site: Site, method: str, path: str, end: str
    ) -> None:
        file = site.services.settings.keys_file
        assert file is not None
        token = keys.add(file, "eve", scopes=[])[1]
        site.services.keys._take(keys.read(file))
        headers = {"authorization": f"Bearer {token}"}
        body: dict[str, Any] = {"json": {"a": [[1]], "b": [[1]]}} if method == "POST" else {}
        assert (await site.ann.request(method, path, headers=headers, **body)).status_code == 403
        reply = await site.ann.request(method, as_sent(path + end), headers=headers, **body)
        assert reply.status_code in {403, 404}
        assert site.services.inference.repository.ready("gemm")

    async def test_nor_under_a_server_that_tells_no_raw_path(self, site: Site) -> None:
        replies = []

        async def send(message: Any) -> None:
            replies.append(message.get("status"))

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        for path, code in (("/limits", 200), ("/limits\n", 404)):
            scope = {
                **{"type": "http", "method": "GET", "path": path, "query_string": b"", "http_version": "1.1"},
                "headers": [(b"host", b"localhost"), *site.ann.headers.raw],
            }
            replies.clear()
            await site.app(scope, receive, send)
            assert replies[0] == code


class TestRouted:
    def test_printable_escapes_are_resolved(self) -> None:
        for one in string.printable.strip():
            path = f"/a{one}b/c"
            sent = f"/a%{ord(one):02x}b/%63"
            want = "/a%2Fb/c" if one == "/" else path
            assert routed({"path": path, "raw_path": sent.encode()}) == want

    def test_a_path_without_escapes_is_itself(self) -> None:
        assert routed({"path": "/tensors/w", "raw_path": b"/tensors/w"}) == "/tensors/w"

    def test_controls_stay_escaped_wherever_the_path_comes_from(self) -> None:
        for raw in ({}, {"raw_path": None}, {"raw_path": b"/gemm%0A?x=1"}, {"raw_path": b"/gemm%0A"}):
            assert routed({"path": "/gemm\n", **raw}) == "/gemm%0A"

    def test_a_root_path_is_part_of_both(self) -> None:
        assert (
            routed({"path": "/root/tensors/a/b", "raw_path": b"/root/tensors/a%2Fb"}) == "/root/tensors/a%2Fb"
        )


def test_names_over_the_socket(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        service.ready()
        for name, code in (
            (b"..", 422),
            (b".", 422),
            (b"a%2Fb", 422),
            (b"%ff", 422),
            (b"x" * 20000, 422),
            (b"a\xffb", 400),
            (b"a\0b", 400),
            (b"w", 404),
        ):
            with connect(service) as sock:
                sock.sendall(
                    b"GET /tensors/%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % name
                )
                got, problem = status(sock)
            assert got == code, name
            assert NO_PATH not in str(problem["detail"])
