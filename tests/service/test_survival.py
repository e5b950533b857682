"""What the service survives: each test against real processes, with real signals."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import h11
import httpx
import numpy as np
import psutil
import pytest

from tests.service.real import Service, metric, raw, result, running

random = np.random.default_rng(3)
SMALL = [random.standard_normal((8, 16)).astype(np.float32) for _ in range(8)]
WEIGHT = random.standard_normal((16, 24)).astype(np.float32)
#: A product that takes a noticeable time on one core (fp64, about 0.4 s).
HEAVY = random.standard_normal((1500, 1500))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running(
        tmp_path / "data", "--ping-seconds", "0.2", "--hang-seconds", "1.5", "--arena-bytes", "512MiB"
    ) as one:
        yield one.ready()


class Load:
    """Clients that post a small GEMM again and again, and check every answer."""

    def __init__(self, service: Service, clients: int = 4) -> None:
        self.service = service
        self.right = 0
        self.codes: dict[int, int] = {}
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        a = SMALL[number]
        want = a.astype(np.float64) @ WEIGHT
        with httpx.Client(base_url=self.service.url, timeout=60) as http:
            while not self._stop.is_set():
                answer = http.post("/gemm", **raw(a, WEIGHT))
                self.codes[answer.status_code] = self.codes.get(answer.status_code, 0) + 1
                if answer.status_code == 200:
                    if np.allclose(result(answer), want, rtol=1e-5, atol=1e-5):
                        self.right += 1
                    else:
                        self.wrong.append("wrong product")
                elif answer.status_code != 503 or "code" not in answer.json():
                    self.wrong.append(f"{answer.status_code} {answer.text}")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"


def clean(service: Service) -> None:
    """Nothing is held or queued."""

    def at_rest() -> bool:
        text = service.http.get("/metrics").text
        held = metric(text, "gemm_arena_bytes", state="request") + metric(
            text, "gemm_arena_bytes", state="reply"
        )
        return held == 0 and metric(text, "gemm_queue_depth") == 0

    service.until(at_rest, what="arena and queue empty")


def admitted(service: Service, count: int) -> None:
    """Wait until `count` requests were admitted."""
    name, stage = "gemm_stage_seconds_count", "admit"
    service.until(lambda: service.metric(name, stage=stage) >= count, what=f"{count} admitted")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stops_under_load_costs_no_wrong_answer(
    service: Service, blow: signal.Signals
) -> None:
    load = Load(service)
    service.until(lambda: load.right > 20, what="load")
    victim = service.worker()
    descriptors = psutil.Process(service.process.pid).num_fds()
    victim.send_signal(blow)
    service.until(lambda: not service.is_ready(), what="readiness falls")
    service.ready(20)
    before = load.right
    service.until(lambda: load.right > before + 20, what="load goes on")
    load.stop()
    assert load.wrong == []
    assert load.codes.get(200, 0) == load.right
    assert [w.pid for w in service.workers()] != [victim.pid]
    assert not psutil.pid_exists(victim.pid), "the dead worker is a zombie"
    reason = "crash" if blow is signal.SIGKILL else "hang"
    assert service.metric("gemm_worker_restarts_total", reason=reason) == 1
    clean(service)
    assert psutil.Process(service.process.pid).num_fds() <= descriptors + 4


def test_a_heavy_product_whose_worker_dies_runs_again(service: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(service.gemm, HEAVY, HEAVY)
        admitted(service, 1)
        time.sleep(0.1)
        service.worker().kill()
        np.testing.assert_allclose(result(answer.result(60)), HEAVY @ HEAVY, rtol=1e-9, atol=1e-9)
    clean(service)


@pytest.mark.ci
def test_ten_deaths_in_a_row_are_backed_off_and_survived(service: Service) -> None:
    for death in range(1, 11):
        service.worker().kill()
        service.until(
            lambda death=death: service.metric("gemm_worker_restarts_total") >= death,
            40,
            what=f"death {death} is seen",
        )
    service.ready(60)
    np.testing.assert_allclose(
        result(service.gemm(SMALL[0], WEIGHT)), SMALL[0] @ WEIGHT, rtol=1e-5, atol=1e-5
    )
    assert "starts again in" in service.output
    assert len(service.workers()) == 1


def test_sigterm_finishes_accepted_work_refuses_new_and_leaves_with_0(service: Service) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        httpx.Client(base_url=service.url, timeout=60) as open_one,
    ):
        assert open_one.get("/health/ready").status_code == 200
        accepted = [pool.submit(service.gemm, HEAVY, HEAVY) for _ in range(3)]
        admitted(service, 3)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = open_one.post("/gemm", **raw(SMALL[0], WEIGHT))
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert open_one.get("/health/ready").status_code == 503
        assert open_one.get("/health/live").status_code == 200
        for answer in accepted:
            np.testing.assert_allclose(result(answer.result(60)), HEAVY @ HEAVY, rtol=1e-9, atol=1e-9)
    assert service.process.wait(30) == 0


def test_kill_9_of_the_front_takes_the_worker_along_and_loses_nothing_durable(tmp_path: Path) -> None:
    with running(tmp_path / "data") as first:
        first.ready()
        assert first.put("weight", WEIGHT).status_code in (200, 201)
        worker = first.worker().pid
        # A PUT half done: the body never ends.
        half = httpx.Client(base_url=first.url)
        endless = threading.Thread(target=_half_put, args=(half,))
        endless.start()
        time.sleep(0.3)
        first.kill()
        endless.join(20)
        end = time.monotonic() + 5
        while psutil.pid_exists(worker) and time.monotonic() < end:
            time.sleep(0.02)
        assert not psutil.pid_exists(worker)
    with running(tmp_path / "data") as second:
        second.ready()
        got = second.http.get("/tensors/weight", headers={"accept": "application/octet-stream"})
        assert got.content == WEIGHT.tobytes()
        assert second.http.get("/tensors/half").status_code == 404
        np.testing.assert_allclose(
            result(second.gemm(SMALL[0], "weight")), SMALL[0] @ WEIGHT, rtol=1e-5, atol=1e-5
        )
        kept = sum(
            p.stat().st_size
            for p in (tmp_path / "data").rglob("*")
            if p.suffix not in (".db", ".db-wal", ".db-shm")
        )
        assert kept < 2 * WEIGHT.nbytes + 65536, "the half-written tensor still takes room"


def _half_put(http: httpx.Client) -> None:
    def body() -> Iterator[bytes]:
        yield bytes(1 << 20)
        time.sleep(5)

    with pytest.raises((httpx.TransportError, h11.LocalProtocolError)):
        http.put(
            "/tensors/half",
            params={"shape": "1024x1024", "dtype": "fp32"},
            content=body(),
            headers={"content-type": "application/octet-stream", "content-length": str(4 << 20)},
        )
    http.close()


def test_two_fronts_on_one_folder_the_second_refuses(tmp_path: Path) -> None:
    with running(tmp_path / "data"), pytest.raises(AssertionError, match="ended with") as refused:
        Service(tmp_path / "data", "--backend", "numpy")
    assert str(tmp_path / "data") in str(refused.value)


def ask_heavy(service: Service) -> httpx.Response:
    """A product of the stored tensor `heavy` by itself: no body, so that it is in the queue at once."""
    query = {"a": "handle:heavy", "b": "handle:heavy"}
    headers = {"content-type": "application/octet-stream"}
    return httpx.post(f"{service.url}/gemm", params=query, headers=headers, timeout=60)


def test_a_client_that_leaves_has_its_queued_work_dropped(service: Service) -> None:
    assert service.put("heavy", HEAVY).status_code in (200, 201)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(ask_heavy, service) for _ in range(8)]
        admitted(service, 8)
        for _ in range(3):
            with (
                pytest.raises(httpx.TimeoutException),
                httpx.Client(base_url=service.url, timeout=0.1) as http,
            ):
                http.post("/gemm", **raw(SMALL[0], WEIGHT))
        service.until(lambda: metric_499(service) == 3, what="those who left are counted")
        for answer in busy:
            assert answer.result(60).status_code == 200
    clean(service)
    assert service.metric("gemm_requests_total", route="/gemm", code="200") == 8
    assert service.metric("gemm_flops_total") == 8 * 2 * 1500**3, "work of those who left was done"


def metric_499(service: Service) -> float:
    return service.metric("gemm_requests_total", route="/gemm", code="499")


def test_a_deadline_shorter_than_the_queue_is_504_and_not_done(service: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        busy = [pool.submit(service.gemm, HEAVY, HEAVY) for _ in range(3)]
        admitted(service, 3)
        late = service.gemm(SMALL[0], WEIGHT, deadline_ms=50)
        assert (late.status_code, late.json()["code"]) == (504, "deadline")
        for answer in busy:
            assert answer.result(60).status_code == 200
    assert service.metric("gemm_flops_total") == 3 * 2 * 1500**3


def test_a_full_queue_is_429_at_once_with_retry_after(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data", "--queue-requests", "2", "--arena-bytes", "512MiB") as service,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        service.ready()
        assert service.put("heavy", HEAVY).status_code in (200, 201)

        answers = [each.result(60) for each in [pool.submit(ask_heavy, service) for _ in range(8)]]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(answers) - len(refused) >= 3
        assert {answer.status_code for answer in refused} == {429}
        assert refused[0].json()["limit"] == 2
        assert float(refused[0].headers["retry-after"]) >= 1
        slowest = max(answer.elapsed for answer in answers)
        assert all(answer.elapsed < slowest / 2 for answer in refused), "a refusal waited for the queue"


def test_bytes_of_one_reply_never_reach_another(service: Service) -> None:
    stamps = [np.full((200, 200), float(n), np.float32) for n in range(1, 17)]
    identity = np.eye(200, dtype=np.float32)

    def ask(stamp: np.ndarray) -> bool:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            return all(
                np.array_equal(result(http.post("/gemm", **raw(stamp, identity))), stamp) for _ in range(25)
            )

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, stamps))


@pytest.mark.ci
def test_ten_thousand_requests_leave_memory_flat(service: Service) -> None:
    sizes = [(1, 16), (8, 64), (33, 129), (128, 128), (64, 300)]
    operands = [
        (random.standard_normal((m, n)).astype(np.float32), random.standard_normal((n, m)).astype(np.float32))
        for m, n in sizes
    ]

    def many(count: int) -> None:
        with httpx.Client(base_url=service.url, timeout=60) as http:
            for number in range(count):
                a, b = operands[number % len(operands)]
                assert http.post("/gemm", **raw(a, b)).status_code == 200

    def anonymous() -> list[int]:
        return [_anonymous(pid) for pid in (service.process.pid, service.worker().pid)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(many, [500] * 4))
        before = anonymous()
        list(pool.map(many, [2000] * 4))
    after = anonymous()
    assert all(b - a < 8 << 20 for a, b in zip(before, after, strict=True)), (before, after)
    clean(service)


def _anonymous(pid: int) -> int:
    """Bytes of anonymous memory, VmRSS's RssAnon."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def test_live_within_a_second_and_a_half_of_the_process_start(tmp_path: Path) -> None:
    best = min(_time_to_live(tmp_path / str(n)) for n in range(2))
    # Twice the goal: test machines are shared. benchmarks/serving.py measures it.
    assert best < 3.0


def _time_to_live(data: Path) -> float:
    started = time.monotonic()
    with running(data) as service:
        assert service.http.get("/health/live").status_code == 200
        return time.monotonic() - started


def test_the_front_imports_neither_torch_nor_cuda(service: Service) -> None:
    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    for name in ("torch", "libcuda", "cutlass"):
        assert name not in maps, f"the front has loaded {name}"
