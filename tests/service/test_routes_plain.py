"""What holds for every route: HEAD where GET is, no unknown query fields, no redirects, problems for all else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.app import create_app
from service.version import NAME, version
from tests.service.real import running
from tests.service.serving import RAW, Site, serving

#: Routes of the inference protocol take what its clients send; probes and files may be asked with any query.
LENIENT = ("/v2", "/health/", "/metrics")


def got() -> list[str]:
    """Paths of all documented GET routes."""
    return [path for path, operations in create_app().openapi()["paths"].items() if "get" in operations]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


async def filled(site: Site) -> dict[str, str]:
    """Values for the parts of paths: a stored tensor and a job that has ended."""
    await site.ann.put("/tensors/w?shape=1x1&dtype=fp32", content=bytes(4), headers=RAW)
    job = (await site.ann.post("/jobs", json={"steps": [{"id": "s", "a": [[1]], "b": [[2]]}]})).json()["id"]
    await site.ann.get(f"/jobs/{job}?wait=20")
    return {"name": "w", "job": job, "step": "s"}


async def test_head_is_answered_as_get_wherever_get_is(site: Site) -> None:
    values = await filled(site)
    for template in [path for path in got() if not path.startswith("/v2")] + ["/", "/docs", "/openapi.json"]:
        path = template.format(**values)
        async with asyncio.timeout(60):
            head = await site.ann.head(path)
        assert head.content == b"", path
        if path == "/now/events":
            assert head.status_code == 200
            continue
        get = await site.ann.get(path)
        assert head.status_code == get.status_code, path
        assert head.headers["content-type"] == get.headers["content-type"], path
        refused = await site.ann.patch(path)
        assert refused.status_code == 405
        assert path == "/openapi.json" or {"GET", "HEAD"} <= set(refused.headers["allow"].split(", ")), path


async def test_unknown_query_fields_are_refused_on_every_get_route(site: Site) -> None:
    values = await filled(site)
    for template in got():
        if template.startswith(LENIENT):
            continue
        reply = await site.ann.get(template.format(**values) + "?zz=1")
        assert (reply.status_code, reply.json()["field"]) == (422, "zz"), template


@pytest.mark.parametrize("path", ["/gemm/", "/tensors/", "/jobs/", "/limits/"])
async def test_a_slash_too_many_is_404_and_no_redirect(site: Site, path: str) -> None:
    for method in ("GET", "POST"):
        reply = await site.ann.request(method, path)
        assert (reply.status_code, reply.headers["content-type"]) == (404, "application/problem+json")


def test_head_over_a_real_connection_leaves_it_usable(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        for path in ("/limits", "/health/live", "/metrics", "/variants", "/now/events", "/health/live"):
            head = service.http.head(path)
            assert (head.status_code, head.content) in ((200, b""), (503, b"")), path
        assert service.http.get("/openapi.json").json()["info"]["version"] == version() != "unknown"


def test_the_version_comes_from_the_sources_where_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tomllib

    from service import version as module

    def missing(name: str) -> str:
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "installed", missing)
    project = tomllib.loads((Path(module.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    assert module.version.__wrapped__() == project["version"]
