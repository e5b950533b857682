"""Two real services over one S3 server and one PostgreSQL: handles, jobs and clients, whichever front is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from service.client import Client, Handle, Step
from tests.service import shared
from tests.service.real import Service, raw, result, running

pytestmark = pytest.mark.ci
ACCEPT = {"accept": "application/octet-stream"}


@dataclass
class Pair:
    """Two fronts, and the cable over which they reach S3."""

    a: Service
    b: Service
    to_s3: shared.Cable
    environ: dict[str, str]


@pytest.fixture(scope="module")
def pair(
    s3: shared.S3, postgres: shared.Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("fronts")
    with shared.cable(s3.port) as cable:
        environ = s3.environ(port=cable.port) | {
            "GEMM_STORE": s3.bucket(),
            "GEMM_JOURNAL": postgres.database(),
            "GEMM_LEASE_SECONDS": "2",
        }
        with running(folder / "a", environ=environ) as a, running(folder / "b", environ=environ) as b:
            yield Pair(a.ready(), b.ready(), cable, environ)


def matrix(seed: int, rows: int = 64, columns: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(-4, 5, (rows, columns)).astype(np.float32)


def test_the_contract_of_tensors_holds_across_fronts(pair: Pair) -> None:
    a, b = pair.a, pair.b
    first = a.put("w", matrix(1))
    assert (first.status_code, b.put("w", matrix(2)).status_code) == (201, 200)
    read = a.http.get("/tensors/w", headers=ACCEPT)
    np.testing.assert_array_equal(result(read), matrix(2))
    assert (
        a.http.get("/tensors/w", headers=ACCEPT | {"if-none-match": read.headers["etag"]}).status_code == 304
    )
    stale = {"if-match": first.headers["etag"]}
    assert b.http.delete("/tensors/w", headers=stale).status_code == 412
    piece = b.http.get("/tensors/w", headers=ACCEPT | {"range": "bytes=100-199"})
    assert (piece.status_code, piece.content) == (206, matrix(2).tobytes()[100:200])
    assert (
        b.http.head("/tensors/w").headers["x-gemm-shape"] == a.http.head("/tensors/w").headers["x-gemm-shape"]
    )
    assert "w" in [entry["name"] for entry in b.http.get("/tensors").json()["tensors"]]
    np.testing.assert_array_equal(result(a.gemm(matrix(3), "w")), matrix(3) @ matrix(2))
    assert a.http.delete("/tensors/w").status_code == 204
    assert b.http.get("/tensors/w").status_code == 404


def test_a_result_kept_by_one_is_the_others_operand(pair: Pair) -> None:
    made = pair.a.http.post("/gemm", **raw(matrix(1), matrix(2), out="handle:d"))
    assert made.json()["out"]["durable"] is False
    np.testing.assert_array_equal(result(pair.b.gemm(matrix(3), "d")), matrix(3) @ (matrix(1) @ matrix(2)))
    pair.a.http.delete("/tensors/d").raise_for_status()


def test_a_client_of_both_fetches_next_to_nothing(pair: Pair) -> None:
    """By hashing, a handle is used where it was stored; a client of one front fetches what the other stored."""
    weights = {f"weight-{n}": matrix(n, 256, 256) for n in range(12)}
    nbytes = sum(value.nbytes for value in weights.values())
    x = matrix(99, 8, 256)

    def came(client: Client) -> int:
        before = pair.to_s3.came
        for name, value in weights.items():
            np.testing.assert_array_equal(client.gemm(x, name), x @ value)
        return pair.to_s3.came - before

    with Client([pair.a.url, pair.b.url], local=False) as both, Client(pair.b.url, local=False) as one:
        for name, value in weights.items():
            both.put(name, value)
        assert came(both) < 0.02 * nbytes
        assert 0.1 * nbytes < came(one) < nbytes, "the hash sent all to one front"
        assert came(one) < 0.02 * nbytes, "what was fetched is kept in memory"
        for name in weights:
            both.delete(name)


def test_jobs_of_a_killed_front_end_at_the_other(pair: Pair, tmp_path: Path) -> None:
    with running(tmp_path / "c", environ=pair.environ) as c, Client([pair.b.url], local=False) as client:
        c.ready()
        c.put("w", matrix(1)).raise_for_status()
        jobs = {}
        for n in range(30):
            steps = [{"id": "s0", "a": matrix(n, 4).tolist(), "b": {"handle": "w"}}]
            steps += [{"id": f"s{k}", "a": {"step": f"s{k - 1}"}, "b": {"handle": "w"}} for k in range(1, 4)]
            steps[-1]["out"] = {"handle": f"end-{n}"}
            reply = c.http.post("/jobs", json={"steps": steps}, headers={"idempotency-key": f"kill-{n}"})
            jobs[n] = reply.raise_for_status().json()["id"]
        c.kill()
        for n, job in jobs.items():
            told = client.wait(job, timeout=60)
            assert [step.state for step in told.steps] == ["done"] * 4
            want = matrix(n, 4)
            for _ in range(4):
                want = want @ matrix(1)
            np.testing.assert_array_equal(client.get(f"end-{n}"), want)
            client.delete(f"end-{n}")
        listed = [one["id"] for one in pair.b.http.get("/jobs?limit=1000").json()["jobs"]]
        assert set(jobs.values()) <= set(listed)
        assert len(listed) == len(set(listed))
        client.delete("w")


def test_a_job_is_watched_and_cancelled_from_the_other(pair: Pair) -> None:
    with Client(pair.a.url, local=False) as at_a:
        at_a.put("w", matrix(1))
        steps = [Step("s0", matrix(5, 4), Handle("w"))]
        for k in range(1, 150):
            steps.append(Step(f"s{k}", steps[-1], Handle("w"), options={"alpha": 0.01}))
        job = at_a.submit(steps)
    seen = ""
    with pair.b.http.stream("GET", f"/jobs/{job.id}/events") as events:
        for line in events.iter_lines():
            seen += line + "\n"
            if "event: step" in line and "cancel" not in seen:
                break
    assert '"state":"' in pair.b.http.get(f"/jobs/{job.id}").text
    told = pair.b.http.delete(f"/jobs/{job.id}").json()
    assert told["state"] in ("cancelled", "done")
    end = time.monotonic() + 60
    while pair.a.http.get(f"/jobs/{job.id}").json()["state"] != told["state"]:
        assert time.monotonic() < end
    pair.a.http.delete("/tensors/w")


def test_a_result_that_died_with_its_front_is_lost_for_all(pair: Pair, tmp_path: Path) -> None:
    with running(tmp_path / "c", environ=pair.environ) as c:
        c.ready()
        pair.to_s3.cut("refuse")  # so that it can't be written
        try:
            c.http.post("/gemm", **raw(matrix(1), matrix(2), out="handle:gone")).raise_for_status()
            c.kill()
        finally:
            pair.to_s3.mend()
        status = 0
        end = time.monotonic() + 60
        while status != 410 and time.monotonic() < end:
            status = pair.b.http.get("/tensors/gone").status_code
            assert status in (503, 410)
        assert status == 410
        assert pair.b.put("gone", matrix(3)).status_code == 201
        np.testing.assert_array_equal(result(pair.a.http.get("/tensors/gone", headers=ACCEPT)), matrix(3))


def test_whether_what_is_shared_answers_is_told(pair: Pair) -> None:
    assert pair.a.metric("gemm_shared_up", part="store") == 1
    pair.to_s3.cut("refuse")
    try:
        reply = pair.a.put("v", matrix(1))
        assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
        assert int(reply.headers["retry-after"]) >= 1
        assert pair.a.metric("gemm_shared_up", part="store") == 0
        assert pair.a.metric("gemm_shared_up", part="journal") == 1
        assert pair.a.is_ready(), "products of inline operands go on"
        np.testing.assert_array_equal(result(pair.a.gemm(matrix(1), matrix(2))), matrix(1) @ matrix(2))
    finally:
        pair.to_s3.mend()
    pair.a.until(lambda: pair.a.put("v", matrix(1)).status_code == 201, 60)
