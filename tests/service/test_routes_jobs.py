"""/jobs over the application: handing in, watching, waiting, results, keys, owners, refusals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service import keys
from service.jobs import decode
from service.model import StepBody, validate
from service.routes import jobs as jobs_routes
from tests.service.serving import RAW, Site, revoke, serving
from tests.service.storing import tensor
from tests.service.test_jobs import ONE, TWO, A, B
from tests.service.test_routes_tensors import put

KEY = {"idempotency-key": "k"}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with serving(tmp_path) as site:
        yield site


@pytest.fixture
def told_once(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a stream of events has told how the job stands, and waits for a change."""
    told, news = asyncio.Event(), jobs_routes._Shown.news

    def noted(shown: jobs_routes._Shown) -> Iterator[bytes]:
        yield from news(shown)
        told.set()

    monkeypatch.setattr(jobs_routes._Shown, "news", noted)
    return told


async def post(client: httpx.AsyncClient, *steps: dict[str, Any], **headers: str) -> httpx.Response:
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    return await client.post("/jobs", json={"steps": steps}, headers=headers)


async def ended(client: httpx.AsyncClient, reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 202, reply.text
    told = (await client.get(reply.headers["location"], params={"wait": 20})).json()
    assert told["state"] in {"done", "failed", "cancelled"}
    return dict(told)


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


class TestPost:
    async def test_a_large_document_waits_in_the_arena(self, site: Site) -> None:
        """So that what many send at once is bounded, and refused where it is too much."""
        big = tensor(400, 400)
        step = {"id": "big", "a": big.tolist(), "b": big.tolist()}
        slots = site.services.slots
        taken = slots.allocate(7 << 20)
        reply = await post(site.ann, step)
        assert (reply.status_code, reply.json()["code"]) == (507, "no_room")
        assert (await post(site.ann, ONE)).status_code == 202  # a small one needs none
        taken.release()
        told = await ended(site.ann, await post(site.ann, step))
        assert told["state"] == "done"

    async def test_job_runs_and_gives_its_results(self, site: Site) -> None:
        reply = await post(site.ann, ONE, TWO)
        told = await ended(site.ann, reply)
        assert told["state"] == "done"
        assert told["counts"] == {"done": 2}
        assert told["expires"] == told["finished"] + 86400
        one, two = told["steps"]
        assert (one["id"], one["state"], one["dtype"], one["shape"]) == ("one", "done", "fp32", [3, 5])
        assert one["variant"] == "numpy"
        assert two["shape"] == [3, 2]
        url = f"/jobs/{told['id']}/steps/one/result"
        got = await site.ann.get(url, headers={"accept": RAW["content-type"]})
        np.testing.assert_array_equal(np.frombuffer(got.content, np.float32).reshape(3, 5), A @ B)
        part = await site.ann.get(url, headers={"accept": RAW["content-type"], "range": "bytes=4-7"})
        assert part.content == got.content[4:8]
        as_json = await site.ann.get(url, headers={"accept": "application/json"})
        np.testing.assert_array_equal(np.array(as_json.json()["data"], np.float32), A @ B)

    async def test_with_a_stored_weight_and_a_handle_for_the_result(self, site: Site) -> None:
        await put(site.ann, "w", B)
        step = {"id": "s", "a": A.tolist(), "b": {"handle": "w"}, "out": {"handle": "d"}}
        told = await ended(site.ann, await post(site.ann, step))
        assert told["steps"][0]["out"] == {"handle": "d"}
        got = await site.ann.get("/tensors/d", headers={"accept": RAW["content-type"]})
        np.testing.assert_array_equal(np.frombuffer(got.content, np.float32).reshape(3, 5), A @ B)

    async def test_idempotency(self, site: Site) -> None:
        first = await post(site.ann, ONE, **KEY)
        again = await post(site.ann, ONE, **KEY)
        assert first.status_code == again.status_code == 202
        assert first.headers["location"] == again.headers["location"]
        other = await post(site.ann, TWO | {"a": [[1]]}, **KEY)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
        elsewhere = await post(site.bob, ONE, **KEY)
        assert elsewhere.headers["location"] != first.headers["location"]
        await ended(site.ann, first)
        await ended(site.bob, elsewhere)
        assert site.computer.computed == 2

    async def test_an_idempotency_key_is_the_owners_so_that_it_outlives_a_key_that_is_rotated(
        self, site: Site, tmp_path: Path
    ) -> None:
        first = await post(site.ann, ONE, **KEY)
        old = next(key for key in keys.read(tmp_path / "keys.json") if key.owner == "ann")
        token = keys.rotate(tmp_path / "keys.json", old.id)[1]
        site.services.keys._looked = float("-inf")
        again = await post(site.ann, ONE, **KEY, authorization=f"Bearer {token}")
        assert again.headers["location"] == first.headers["location"]
        document = site.app.openapi()["paths"]["/jobs"]
        told = next(one for one in document["post"]["parameters"] if one["name"] == "Idempotency-Key")
        assert "whichever key of the owner" in told["description"]
        assert document["get"]["description"].endswith("those of the key's owner.")

    async def test_idempotency_while_the_first_arrives(self, site: Site) -> None:
        begun, go = asyncio.Event(), asyncio.Event()
        text = json.dumps({"steps": [ONE]}).encode()

        async def body() -> AsyncIterator[bytes]:
            yield text[:10]
            begun.set()
            await go.wait()
            yield text[10:]

        headers = {"content-type": "application/json", **KEY}
        first = asyncio.create_task(site.ann.post("/jobs", content=body(), headers=headers))
        await begun.wait()
        second = await post(site.ann, ONE, **KEY)
        assert (second.status_code, second.json()["code"]) == (409, "conflict")
        assert int(second.headers["retry-after"]) >= 1
        go.set()
        assert (await first).status_code == 202
        again = await site.ann.post("/jobs", content=text, headers=headers)
        assert again.headers["location"] == (await first).headers["location"]

    @pytest.mark.parametrize(
        ("body", "headers", "status", "code"),
        [
            (b"{", {}, 400, "malformed"),
            (b"{}", {}, 422, "invalid"),
            (b'{"steps": []}', {}, 422, "invalid"),
            (b'{"steps": [], "x": 1}', {}, 422, "invalid"),
            (b'{"steps": [{}]}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
            (b'{"steps": [{}]}', {"content-encoding": "gzip"}, 415, "unsupported_media_type"),
            (b'{"steps": [{}]}', {"idempotency-key": ""}, 422, "invalid"),
            (b'{"steps": [{}]}', {"idempotency-key": "x" * 256}, 422, "invalid"),
            (b'{"steps": [{"id": "a", "a": [[1]], "b": [[1]], "speed": 1}]}', {}, 422, "invalid"),
            (b'{"steps": [{"id": "a", "a": {"step": "a"}, "b": [[1]]}]}', {}, 422, "invalid"),
            (b'{"steps": [{"id": "a", "a": {"handle": "w"}, "b": [[1]]}]}', {}, 404, "not_found"),
        ],
    )
    async def test_refused(
        self, site: Site, body: bytes, headers: dict[str, str], status: int, code: str
    ) -> None:
        headers = {"content-type": "application/json", **headers}
        reply = await site.ann.post("/jobs", content=body, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (status, code)
        assert (await site.ann.get("/jobs")).json() == {"jobs": [], "next": None}

    async def test_limits(self, tmp_path: Path) -> None:
        async with serving(tmp_path, max_json_bytes=2000, job_steps=2, job_bytes=300) as site:
            reply = await post(site.ann, *({**ONE, "id": f"s{n}"} for n in range(9)))
            assert (reply.status_code, reply.json()["limit"]) == (413, 2000)
            small = {"a": [[1]], "b": [[1]]}
            reply = await post(site.ann, *({**small, "id": f"s{n}"} for n in range(3)))
            assert (reply.status_code, reply.json()["field"], reply.json()["limit"]) == (422, "steps", 2)
            reply = await post(site.ann, ONE, {**ONE, "id": "two"})
            assert (reply.status_code, reply.json()["limit"]) == (413, 300)
            assert (await post(site.ann, ONE)).status_code == 202

    async def test_share_of_an_owner(self, site: Site) -> None:
        big = {"id": "s", "a": tensor(32, 1).tolist(), "b": tensor(1, 32).tolist()}
        reply = await post(site.bob, big)
        assert (reply.status_code, reply.json()["code"], reply.json()["limit"]) == (413, "too_large", 4096)
        assert (await post(site.ann, big)).status_code == 202
        half = {"id": "s", "a": tensor(22, 1).tolist(), "b": tensor(1, 22).tolist()}
        await ended(site.bob, await post(site.bob, half))
        reply = await post(site.bob, {**half, "id": "t"})
        assert (reply.status_code, reply.json()["code"]) == (429, "quota")

    async def test_flops_are_taken_from_the_quota_of_the_key(self, site: Site, tmp_path: Path) -> None:
        token = keys.add(tmp_path / "keys.json", "ann", quota=keys.Quota(flops_per_second=1200))[1]
        site.services.keys._looked = float("-inf")
        began = time.monotonic()
        steps = ({**ONE, "id": f"s{n}"} for n in range(12))  # 120 FLOPs each
        told = await ended(site.ann, await post(site.ann, *steps, authorization=f"Bearer {token}"))
        assert told["state"] == "done"
        assert time.monotonic() - began > 0.19

    async def test_while_the_service_shuts_down(self, site: Site) -> None:
        await site.services.jobs.pause()
        reply = await post(site.ann, ONE)
        assert (reply.status_code, reply.json()["code"]) == (503, "draining")


class TestSee:
    async def test_failed_steps_say_why(self, site: Site) -> None:
        told = await ended(site.ann, await post(site.ann, {**ONE, "variant": "none"}, TWO))
        assert told["state"] == "failed"
        one, two = told["steps"]
        assert (one["state"], one["code"]) == ("failed", "unsupported")
        assert two["state"] == "skipped"
        assert (await site.ann.get(f"/jobs/{told['id']}/steps/two/result")).status_code == 404

    async def test_wait_is_over_in_time(self, site: Site) -> None:
        site.computer.gate.clear()
        reply = await post(site.ann, ONE)
        told = (await site.ann.get(reply.headers["location"], params={"wait": 0.05})).json()
        assert told["state"] == "running"
        early = await site.ann.get(f"/jobs/{told['id']}/steps/one/result")
        assert (early.status_code, early.json()["code"]) == (409, "conflict")

    @pytest.mark.parametrize("wait", ["-1", "51", "nan", "x"])
    async def test_wait_is_checked(self, site: Site, wait: str) -> None:
        reply = await site.ann.get("/jobs/any", params={"wait": wait})
        assert (reply.status_code, reply.json()["field"]) == (422, "wait")

    async def test_another_owners_job(self, site: Site) -> None:
        location = (await post(site.ann, ONE)).headers["location"]
        for reply in [
            await site.bob.get(location),
            await site.bob.delete(location),
            await site.bob.get(f"{location}/events"),
            await site.bob.get(f"{location}/steps/one/result"),
        ]:
            assert (reply.status_code, reply.json()["code"]) == (404, "not_found")
        assert (await site.bob.get("/jobs")).json()["jobs"] == []

    async def test_pages(self, site: Site) -> None:
        ids = []
        for _ in range(3):
            ids.append((await post(site.ann, ONE)).json()["id"])
            site.clock.now += 1
        page = (await site.ann.get("/jobs", params={"limit": 2})).json()
        assert [job["id"] for job in page["jobs"]] == [ids[2], ids[1]]
        page = (await site.ann.get("/jobs", params={"after": page["next"]})).json()
        assert [job["id"] for job in page["jobs"]] == [ids[0]]
        assert page["next"] is None

    async def test_events(self, site: Site, told_once: asyncio.Event) -> None:
        site.computer.gate.clear()
        location = (await post(site.ann, ONE, TWO)).headers["location"]
        watching = asyncio.create_task(site.ann.get(f"{location}/events"))
        await told_once.wait()
        site.computer.gate.set()
        reply = await watching
        assert reply.headers["content-type"].startswith("text/event-stream")
        told = events(reply.text)
        assert [event["state"] for kind, event in told if event["id"] == "one"] == ["running", "done"]
        assert [event["state"] for kind, event in told if event["id"] == "two"][-1] == "done"
        assert (told[-1][0], told[-1][1]["state"]) == ("job", "done")
        # Who comes late is told how it all stands.
        late = events((await site.ann.get(f"{location}/events")).text)
        assert [(kind, event["state"]) for kind, event in late] == [("step", "done")] * 2 + [("job", "done")]

    async def test_events_end_when_the_service_shuts_down(self, site: Site, told_once: asyncio.Event) -> None:
        site.computer.gate.clear()
        location = (await post(site.ann, ONE)).headers["location"]
        watching = asyncio.create_task(site.ann.get(f"{location}/events"))
        await told_once.wait()
        await site.services.jobs.pause()
        assert events((await watching).text)[-1][1]["state"] == "running"

    async def test_events_end_with_their_key(
        self, site: Site, told_once: asyncio.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keys, "_LOOK_SECONDS", 0.0)
        site.computer.gate.clear()
        location = (await post(site.ann, ONE, TWO)).headers["location"]
        watching = asyncio.create_task(site.ann.get(f"{location}/events"))
        await told_once.wait()
        revoke(tmp_path, "ann")
        site.computer.gate.set()
        states = [event["state"] for _, event in events((await watching).text)]
        assert states == ["running", "queued", "running"]

    async def test_who_waits_is_told_nothing_once_the_key_has_ended(
        self, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keys, "_LOOK_SECONDS", 0.0)
        site.computer.gate.clear()
        location = (await post(site.ann, ONE)).headers["location"]
        waiting = asyncio.create_task(site.ann.get(location, params={"wait": 20}))
        await asyncio.sleep(0.1)
        revoke(tmp_path, "ann")
        site.computer.gate.set()
        assert (await waiting).status_code == 401


class TestCancel:
    async def test_ends_it(self, site: Site) -> None:
        site.computer.gate.clear()
        location = (await post(site.ann, ONE, TWO)).headers["location"]
        told = (await site.ann.delete(location)).json()
        assert told["state"] == "cancelled"
        assert [step["state"] for step in told["steps"]] == ["cancelled", "cancelled"]
        assert (await site.ann.get(location)).json() == told
        assert (await site.ann.delete(location)).json() == told


async def test_example_of_the_document_runs(site: Site) -> None:
    for step in decode.EXAMPLE["steps"]:
        validate(StepBody, step)
    told = await ended(site.ann, await site.ann.post("/jobs", json=decode.EXAMPLE))
    assert told["state"] == "done"
    got = await site.ann.get(
        f"/jobs/{told['id']}/steps/second/result", headers={"accept": "application/json"}
    )
    assert got.json()["data"] == [[19, 22], [43, 50]]


async def test_openapi_tells_of_every_route(site: Site) -> None:
    paths = site.app.openapi()["paths"]
    assert set(paths["/jobs"]) == {"get", "post"}
    assert set(paths["/jobs/{job}"]) == {"get", "delete"}
    assert paths["/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"][
        "steps"
    ]
