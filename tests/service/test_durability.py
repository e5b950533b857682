"""The real service killed, full and read-only: accepted jobs end right and once, /gemm goes on."""

from __future__ import annotations

import base64
import concurrent.futures
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.real import Service, raw_tensor, result, running

RNG = np.random.default_rng(7)
#: Small whole numbers: products are exact in fp32, so results can be compared bit by bit.
WEIGHT = RNG.integers(-4, 5, (64, 64)).astype(np.float32)
JOBS = 40
ACCEPT = {"accept": "application/octet-stream"}


def job_of(n: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """A job of four steps, in a chain and aside, and what its steps two and three give."""
    a = np.random.default_rng(n).integers(-4, 5, (16, 64)).astype(np.float32)
    inline = {"b64": base64.b64encode(a.tobytes()).decode(), "dtype": "fp32", "shape": [16, 64]}
    steps = [
        {"id": "one", "a": inline, "b": {"handle": "weight"}},
        {"id": "aside", "a": inline, "b": {"handle": "weight"}, "alpha": 2},
        {"id": "two", "a": {"step": "one"}, "b": {"handle": "weight"}, "out": {"handle": f"d{n}"}},
        {"id": "three", "a": {"step": "two"}, "b": {"handle": "weight"}, "c": {"step": "aside"}},
    ]
    two = a @ WEIGHT @ WEIGHT
    return {"steps": steps}, two, two @ WEIGHT + 2 * (a @ WEIGHT)


def submit(service: Service, n: int) -> httpx.Response:
    return service.http.post("/jobs", json=job_of(n)[0], headers={"idempotency-key": f"key-{n}"})


def check(service: Service, n: int, job: str) -> None:
    """It ended right."""
    told = service.until(
        lambda: (d := service.http.get(f"/jobs/{job}?wait=10").json())["state"] == "done" and d,
        60,
        f"job {n}",
    )
    assert [step["state"] for step in told["steps"]] == ["done"] * 4
    got = result(service.http.get(f"/jobs/{job}/steps/three/result", headers=ACCEPT))
    _, two, three = job_of(n)
    np.testing.assert_array_equal(got, three)
    kept = result(service.http.get(f"/tensors/d{n}", headers=ACCEPT))
    np.testing.assert_array_equal(kept, two)


def test_kill_9_with_jobs_accepted_ends_each_right_and_once(tmp_path: Path) -> None:
    accepted: dict[int, str] = {}
    with running(tmp_path / "data") as service:
        service.ready()
        service.put("weight", WEIGHT).raise_for_status()

        def submit_until_killed(n: int) -> None:
            try:
                reply = submit(service, n)
            except httpx.TransportError:
                return
            assert reply.status_code == 202, reply.text
            accepted[n] = reply.json()["id"]
            if len(accepted) >= 10:
                service.process.kill()  # seven others are under way

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for n in range(JOBS):
                pool.submit(submit_until_killed, n)
    assert 10 <= len(accepted) < JOBS, "all were accepted before the kill"
    with running(tmp_path / "data") as service:
        service.ready()
        again = {n: submit(service, n).json()["id"] for n in range(JOBS)}
        assert {n: again[n] for n in accepted} == accepted, "a job was taken twice"
        listed, after = [], ""
        while after is not None:
            page = service.http.get("/jobs", params={"after": after, "limit": 25}).json()
            listed += [job["id"] for job in page["jobs"]]
            after = page["next"]
        assert sorted(listed) == sorted(again.values()), "a job is there that nobody asked for"
        for n, job in again.items():
            check(service, n, job)
        # What is on disk is what can be asked for: the weight, four results a job; d{n} is one of them.
        files = list((tmp_path / "data" / "tensors").iterdir())
        assert {file.suffix for file in files} == {".safetensors"}
        assert len(files) == 1 + 4 * JOBS


def test_kill_9_of_the_worker_with_jobs_running(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        service.ready()
        service.put("weight", WEIGHT).raise_for_status()
        jobs = {n: submit(service, n).json()["id"] for n in range(10)}
        service.worker().kill()
        jobs |= {n: submit(service, n).json()["id"] for n in range(10, 20)}
        for n, job in jobs.items():
            check(service, n, job)


def test_sigterm_with_jobs_running_keeps_them(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        service.ready()
        service.put("weight", WEIGHT).raise_for_status()
        jobs = {n: submit(service, n).json()["id"] for n in range(20)}
        assert service.stop() == 0
    with running(tmp_path / "data") as service:
        service.ready()
        for n, job in jobs.items():
            check(service, n, job)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("durability") / "data") as service:
        yield service.ready()


def test_disk_full_refuses_what_must_be_kept_and_goes_on_multiplying(service: Service) -> None:
    service.put("weight", WEIGHT).raise_for_status()
    x = RNG.integers(-4, 5, (8, 64)).astype(np.float32)
    pid = service.process.pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    try:
        # The system refuses every file's growth beyond this, as a full disk does.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, unlimited[1]))
        put = service.put("more", WEIGHT)
        assert (put.status_code, put.json()["code"]) == (507, "no_room")
        job = submit(service, 1000)
        assert job.status_code in (503, 507), job.text
        kept = service.gemm(x, "weight", out="handle:d", durable="true")
        assert kept.status_code in (503, 507), kept.text
        np.testing.assert_array_equal(result(service.gemm(x, "weight")), x @ WEIGHT)
        assert service.http.get("/health/ready").status_code == 200
        assert service.http.get("/tensors/more").status_code == 404
        assert service.http.get("/tensors/d").status_code == 404
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
    assert service.put("more", WEIGHT).status_code == 201
    check(service, 1000, submit(service, 1000).json()["id"])


def test_a_full_disk_under_the_log_costs_the_log_alone(tmp_path: Path) -> None:
    under = ("sh", "-c", 'exec "$0" "$@" 2>/dev/full')
    with running(tmp_path / "data", under=under) as service:
        service.ready().put("weight", WEIGHT).raise_for_status()
        x = RNG.integers(-4, 5, (8, 64)).astype(np.float32)
        for _ in range(3):
            np.testing.assert_array_equal(result(service.gemm(x, "weight")), x @ WEIGHT)
        assert service.http.get("/nothing").status_code == 404
        service.worker().kill()
        service.until(lambda: service.metric("gemm_worker_restarts_total") == 1, what="its end is noticed")
        service.ready()
        np.testing.assert_array_equal(result(service.gemm(x, "weight")), x @ WEIGHT)
        assert service.stop() == 0


#: Becomes the command that follows a folder, which it sees read-only. Root may write whatever its mode says.
READ_ONLY = (
    "unshare",
    "-m",
    "sh",
    "-c",
    'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"',
)


def test_a_read_only_folder_serves_what_it_holds_and_goes_on_multiplying(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(data) as before:
        before.ready().put("weight", WEIGHT).raise_for_status()
    under = (*READ_ONLY, str(data))
    if subprocess.run([*under, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a folder read-only takes rights that this user lacks")
    x = RNG.integers(-4, 5, (8, 64)).astype(np.float32)
    with running(data, under=under) as service:
        service.ready()
        refused = [service.put("more", WEIGHT), submit(service, 1), service.http.delete("/tensors/weight")]
        refused.append(service.gemm(x, "weight", out="handle:d"))
        assert [(reply.status_code, reply.json()["code"]) for reply in refused] == [(503, "read_only")] * 4
        np.testing.assert_array_equal(result(service.gemm(x, "weight")), x @ WEIGHT)
        np.testing.assert_array_equal(result(service.http.get("/tensors/weight", headers=ACCEPT)), WEIGHT)
        assert service.stop() == 0
    with running(data) as after:
        after.ready().put("more", WEIGHT).raise_for_status()


def test_results_that_are_kept(service: Service) -> None:
    service.put("weight", WEIGHT).raise_for_status()
    x = RNG.integers(-4, 5, (8, 64)).astype(np.float32)
    for durable in (False, True):
        reply = service.gemm(x, "weight", out="handle:kept", durable=str(durable).lower())
        assert reply.status_code == 200, reply.text
        assert reply.json()["out"]["handle"] == "kept"
        assert reply.json()["out"]["durable"] is durable
        np.testing.assert_array_equal(result(service.http.get("/tensors/kept", headers=ACCEPT)), x @ WEIGHT)
    service.until(lambda: service.http.get("/tensors").json()["tensors"][0]["durable"], what="written back")


def test_a_weight_that_is_larger_than_the_memory_tier(tmp_path: Path) -> None:
    big = RNG.integers(-4, 5, (2048, 2048)).astype(np.float32)  # 16 MiB, four of them
    x = RNG.integers(-4, 5, (4, 2048)).astype(np.float32)
    with running(tmp_path / "data", "--store-memory-bytes", "20MiB") as service:
        service.ready()
        for n in range(4):
            service.http.put(f"/tensors/w{n}", **raw_tensor(big + n)).raise_for_status()
        assert service.metric("gemm_tensor_store_bytes", tier="memory") <= 20 << 20
        assert service.metric("gemm_tensor_store_bytes", tier="disk") >= 4 * big.nbytes
        for n in (0, 1, 2, 3, 0):
            np.testing.assert_array_equal(result(service.gemm(x, f"w{n}")), x @ (big + n))


def test_who_stops_watching_a_job_leaves_nothing_behind(service: Service) -> None:
    service.put("weight", WEIGHT).raise_for_status()
    worker = service.worker()
    worker.suspend()
    try:
        job = submit(service, 2000).json()["id"]
        with (
            httpx.Client(base_url=service.url, timeout=20) as watcher,
            watcher.stream("GET", f"/jobs/{job}/events") as reply,
        ):
            lines = reply.iter_lines()
            assert next(lines) == "event: step"
            assert '"id":"one","state":"running"' in next(lines)
        left = {"route": "/jobs/{job}/events", "code": "499"}
        service.until(lambda: service.metric("gemm_requests_total", **left) == 1, what="noticed")
    finally:
        worker.resume()
    check(service, 2000, job)
    told = service.http.get(f"/jobs/{job}/events").text
    assert told.count("event: step") == 4
    assert told.count("event: job") == 1
