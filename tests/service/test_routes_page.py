"""The page's files are open and cached by hash; its data needs the key; its numbers are the worker's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

from kernels import predict
from service import keys, results
from service.errors import ServiceError
from service.routes import page
from service.routes.page import FOLDER, files
from tests.service.real import Service
from tests.service.serving import revoke, serving


def test_the_page_is_whole_small_and_asks_no_other_host(service: Service) -> None:
    total = 0
    for name in files():
        reply = service.http.get("/" if name == "index.html" else f"/page/{name}")
        assert reply.status_code == 200, name
        assert reply.content == (FOLDER / name).read_bytes()
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        total += len(reply.content)
        for line in reply.text.splitlines():
            assert "://" not in line or "www.w3.org" in line, line
    assert total < 200_000


def test_what_is_known_is_not_sent_again(service: Service) -> None:
    first = service.http.get("/page/app.js")
    again = service.http.get("/page/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = service.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 1000


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "results", "%2e%2e/__init__.py"])
def test_other_files_are_not_there(service: Service, name: str) -> None:
    assert service.http.get(f"/page/{name}").status_code == 404


async def test_with_keys_the_files_are_open_and_the_data_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as site:
        bare = httpx.AsyncClient(transport=httpx.ASGITransport(site.app), base_url="http://localhost")
        async with bare:
            assert (await bare.get("/")).status_code == 200
            assert (await bare.get("/page/style.css")).status_code == 200
            for path in ("/now", "/now/events", "/ladder"):
                assert (await bare.get(path)).status_code == 401
            assert (await bare.post("/timeline", json={})).status_code == 401


def test_now_counts_what_was_done(service: Service) -> None:
    x = np.ones((64, 64), np.float32)
    service.http.get("/now")
    for _ in range(5):
        service.gemm(x, x)

    def counted() -> dict[str, float] | None:
        told = service.http.get("/now").json()
        return told if told["gemms_per_second"] else None

    told = service.until(counted, what="a rate")
    assert told["status"] == "ready"
    assert told["flops_per_second"] > 0
    assert told["points"][-1]["m"] == 64
    assert told["points"][-1]["flops"] == 2 * 64**3
    assert told["tensor"] == [
        {
            "worker": 0,
            "active": None,
            "source": "",
            "detail": "this computer's CPU has no tensor cores to read",
            "sm_clock_mhz": None,
        }
    ]
    assert sum(told["arena"].values()) == told["arena_bytes"]
    assert told["workers"][0]["device"]["rates"] == "measured"


def test_events_come_each_second(service: Service) -> None:
    seen = []
    with service.http.stream("GET", "/now/events") as reply:
        assert reply.headers["content-type"] == "text/event-stream"
        for line in reply.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
            if len(seen) == 2:
                break
    assert seen[1]["at"] - seen[0]["at"] > 0.8


def test_who_stops_watching_did_not_leave_too_early(service: Service) -> None:
    before = service.metric("gemm_rejected_total", reason="client_gone")
    with service.http.stream("GET", "/now/events") as reply:
        next(reply.iter_lines())
    service.until(lambda: service.metric("gemm_requests_total", route="/now/events", code="200"))
    assert service.metric("gemm_rejected_total", reason="client_gone") == before


def test_the_stream_ends_when_the_service_does(tmp_path: Path) -> None:
    service = Service(tmp_path, "--backend", "numpy", "--arena-bytes", "64MiB").ready()
    try:
        with service.http.stream("GET", "/now/events") as reply:
            lines = reply.iter_lines()
            assert next(lines) == "event: now"
            assert service.stop() == 0
    finally:
        service.close()


async def test_the_stream_ends_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD", 0.02)
    monkeypatch.setattr(keys, "_LOOK_SECONDS", 0.0)
    async with serving(tmp_path) as site, asyncio.timeout(20):
        monkeypatch.setattr(type(site.services.now), "document", lambda *_: {})
        watching = asyncio.create_task(site.ann.get("/now/events"))
        await asyncio.sleep(0.1)
        assert not watching.done()
        revoke(tmp_path, "ann")
        assert (await watching).text.startswith("event: now\n")
        assert (await site.ann.get("/now/events")).status_code == 401


def test_a_timeline_is_what_the_command_prints(service: Service) -> None:
    asked = {"arch": "sm_90a", "step": 7, "depth": 3, "k_tiles": 6, "tiles": 2, "same_phase": False}
    reply = service.http.post("/timeline", json=asked)
    assert reply.json() == json.loads(json.dumps(predict.answer("trace", asked)))
    stuck = service.http.post("/timeline", json={**asked, "same_phase": True}).json()
    assert stuck["chosen"]["deadlock"]
    assert service.http.post("/timeline", json={"depth": 7}).status_code == 422
    assert service.http.post("/timeline", json={"step": 3}).status_code == 422


def test_the_ladder_has_each_kind_of_figure_apart(service: Service) -> None:
    told = service.http.get("/ladder").json()
    assert told["measured"] == results.ladders()
    chips = told["predicted"]["chips"]
    assert set(chips) == {"h200", "b200"}
    assert chips["h200"]["published"] == []
    assert all("seconds" in row for row in chips["b200"]["published"])


async def test_without_a_worker_the_ladder_says_so(tmp_path: Path) -> None:
    async def nobody(what: str, args: object) -> None:
        raise ServiceError("no_worker", "no worker is ready")

    async with serving(tmp_path) as site:
        site.computer.ask = nobody  # type: ignore[attr-defined]
        told = (await site.ann.get("/ladder")).json()
        assert told["predicted"] == {"unavailable": "no worker is ready"}


def test_results_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "ladder.json").write_text('{"what": "ladder", "rows": []}')
    assert results.ladders((tmp_path / "nothing", tmp_path)) == [{"what": "ladder", "rows": []}]
    assert results.ladders((tmp_path / "nothing",)) == []
