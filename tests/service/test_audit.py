"""The audit log: each change of a stored tensor with who made it, no payload and no key, whatever the log level."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service import audit, keys, logs
from service.errors import ServiceError
from service.logs import Trace
from service.store import Conditions
from tests.service.real import raw_tensor, running
from tests.service.storing import Clock, Settings, open_store, put, tensor

W = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "audit.log"
    audit.to_file(path)
    yield path
    logs._Now.own.clear()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def brief(path: Path) -> list[tuple[str, str, str]]:
    return [(line["event"], line["handle"], line["outcome"]) for line in lines(path)]


async def test_stored_deleted_expired_and_refused_changes_are_told(tmp_path: Path, file: Path) -> None:
    clock = Clock()
    token = logs.bind("r-7", Trace.take(None))
    audit.acting("k1")
    async with open_store(Settings(tmp_path / "data"), clock=clock) as store:
        etag = await put(store, "ann", "w", tensor(3, 4))
        with pytest.raises(ServiceError):
            await store.delete("ann", "w", Conditions(if_match=("other",)))
        await store.delete("ann", "w")
        with pytest.raises(ServiceError):
            await store.delete("ann", "w")
        await put(store, "ann", "short", tensor(1, 1), ttl=5)
        clock.now += 6
        await store.sweep(clock.now)
    logs.unbind(token)
    audit.acting("")
    assert brief(file) == [
        ("store", "w", "ok"),
        ("delete", "w", "precondition_failed"),
        ("delete", "w", "ok"),
        ("delete", "w", "not_found"),
        ("store", "short", "ok"),
        ("expire", "short", "ok"),
    ]
    first = lines(file)[0]
    assert first.pop("time").endswith("Z")
    assert {first.pop(name) for name in ("trace_id", "span_id")}
    assert first == {
        "level": "info",
        "stage": "audit",
        "event": "store",
        "request_id": "r-7",
        "outcome": "ok",
        "owner": "ann",
        "key": "k1",
        "handle": "w",
        "etag": etag,
        "bytes": 48,
    }


def refuse(handle: str) -> None:
    with pytest.raises(ServiceError), audit.refusals("store", "ann", handle):
        raise ServiceError("no_room", "full")


def test_a_rotated_file_is_opened_again_and_closed_to_others(file: Path) -> None:
    refuse("a")
    assert file.stat().st_mode & 0o777 == 0o600
    file.rename(file.with_suffix(".1"))
    refuse("b")
    assert [line["handle"] for line in lines(file)] == ["b"]
    assert [line["handle"] for line in lines(file.with_suffix(".1"))] == ["a"]


def test_a_real_service_tells_key_and_request_and_nothing_secret(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    key, secret = keys.add(tmp_path / "keys.json", "ann")
    flags = ("--keys-file", str(tmp_path / "keys.json"), "--audit-file", str(path), "--log-level", "error")
    with running(tmp_path / "data", *flags) as service:
        service.http.headers["authorization"] = f"Bearer {secret}"
        service.ready()
        name = {"x-request-id": "mine-1"}
        stored = raw_tensor(W)
        stored["headers"] |= name
        assert service.http.put("/tensors/w", **stored).status_code == 201
        answer = service.http.post(
            "/gemm", json={"a": W.T.tolist(), "b": {"handle": "w"}, "out": {"handle": "d"}}, headers=name
        )
        assert answer.status_code == 200, answer.text
        steps = [{"id": "s", "a": {"handle": "w"}, "b": W.T.tolist(), "out": {"handle": "e"}}]
        job = service.http.post("/jobs", json={"steps": steps}, headers=name).json()
        service.until(lambda: service.http.get(f"/jobs/{job['id']}").json()["state"] == "done", what="job")
        assert service.http.delete("/tensors/w", headers={"x-request-id": "mine-2"}).status_code == 204
    assert sorted(brief(path)) == [
        ("delete", "w", "ok"),
        *(("store", handle, "ok") for handle in ("d", "e", "w")),
    ]
    for line in lines(path):
        assert (line["owner"], line["key"]) == ("ann", key.id)
        assert line["request_id"] == ("mine-2" if line["event"] == "delete" else "mine-1")
    assert secret not in path.read_text()


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="audit_file: can't write"),
        running(tmp_path / "data", "--audit-file", str(tmp_path / "absent" / "audit.log")),
    ):
        pass
