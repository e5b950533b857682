"""What the service survives: each test against real processes, with real signals."""

from __future__ import annotations

import concurrent.futures
import http.client
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.service.real import PATIENT, Service, metric, raw, result, running

random = np.random.default_rng(3)
SMALL = [random.standard_normal((8, 16)).astype(np.float32) for _ in range(8)]
WEIGHT = random.standard_normal((16, 24)).astype(np.float32)
#: A product that takes a noticeable time on one core (fp64, about 0.4 s).
HEAVY = random.standard_normal((1500, 1500))

RAW = {"content-type": "application/octet-stream"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with running(
        tmp_path / "data", "--ping-seconds", "0.2", "--hang-seconds", "1.5", "--arena-bytes", "512MiB"
    ) as one:
        yield one.ready()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Service]:
    """One whose worker may stand still."""
    with running(tmp_path / "data", *PATIENT, "--arena-bytes", "512MiB") as one:
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


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stops_under_load_costs_no_wrong_answer(
    service: Service, blow: signal.Signals
) -> None:
    load = Load(service)
    service.until(lambda: load.right > 20, what="load")
    victim = service.worker()
    descriptors = psutil.Process(service.process.pid).num_fds()
    victim.send_signal(blow)
    service.until(lambda: service.metric("gemm_worker_restarts_total") == 1, what="its end is noticed")
    service.ready()
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


def test_a_heavy_product_whose_worker_dies_amid_it_runs_again(patient: Service) -> None:
    victim = patient.worker()
    before = victim.cpu_times().user
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(patient.gemm, HEAVY, HEAVY)
        patient.until(lambda: victim.cpu_times().user > before, what="it computes")
        victim.kill()
        np.testing.assert_allclose(result(answer.result(60)), HEAVY @ HEAVY, rtol=1e-9, atol=1e-9)
    assert patient.metric("gemm_worker_restarts_total", reason="crash") == 1
    clean(patient)


def test_sigterm_finishes_accepted_work_refuses_new_and_leaves_with_0(patient: Service) -> None:
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        httpx.Client(base_url=patient.url, timeout=60) as open_one,
    ):
        with patient.standing():
            accepted = [pool.submit(patient.gemm, HEAVY, HEAVY) for _ in range(3)]
            patient.admitted(3)
            patient.process.send_signal(signal.SIGTERM)
            patient.until(lambda: open_one.get("/health/ready").status_code == 503, what="it drains")
            refused = open_one.post("/gemm", **raw(SMALL[0], WEIGHT))
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            assert open_one.get("/health/live").status_code == 200
        for answer in accepted:
            np.testing.assert_allclose(result(answer.result(60)), HEAVY @ HEAVY, rtol=1e-9, atol=1e-9)
    assert patient.process.wait(30) == 0


def test_kill_9_of_the_front_takes_the_worker_along_and_loses_nothing_durable(tmp_path: Path) -> None:
    with running(tmp_path / "data") as first:
        first.ready()
        assert first.put("weight", WEIGHT).status_code in (200, 201)
        worker = first.worker().pid
        half = http.client.HTTPConnection(first.url.removeprefix("http://"))
        half.putrequest("PUT", "/tensors/half?shape=1024x1024&dtype=fp32")
        half.putheader("content-type", RAW["content-type"])
        half.putheader("content-length", str(4 << 20))
        half.endheaders(bytes(1 << 20))  # and never the rest
        first.until(lambda: first.metric("gemm_arena_bytes", state="request") >= 4 << 20, what="it comes")
        first.kill()
        half.close()
        first.until(lambda: not psutil.pid_exists(worker), what="the worker ends")
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


def test_two_fronts_on_one_folder_the_second_refuses(tmp_path: Path) -> None:
    with running(tmp_path / "data"), pytest.raises(AssertionError, match="ended with") as refused:
        Service(tmp_path / "data", "--backend", "numpy")
    assert str(tmp_path / "data") in str(refused.value)


def ask_heavy(service: Service) -> httpx.Response:
    """A product of the stored tensor `heavy` by itself: no body, so that it is in the queue at once."""
    query = {"a": "handle:heavy", "b": "handle:heavy"}
    return httpx.post(f"{service.url}/gemm", params=query, headers=RAW, timeout=60)


def test_a_client_that_leaves_has_its_queued_work_dropped(patient: Service) -> None:
    for name, value in (("heavy", HEAVY), ("small", HEAVY[:8, :8].copy())):
        assert patient.put(name, value).status_code in (200, 201)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with patient.standing():
            busy = [pool.submit(ask_heavy, patient) for _ in range(3)]
            patient.admitted(3)
            for left in range(1, 4):
                connection = http.client.HTTPConnection(patient.url.removeprefix("http://"))
                connection.request("POST", "/gemm?a=handle:small&b=handle:small", headers=RAW)
                patient.admitted(3 + left)
                connection.close()
            patient.until(lambda: metric_499(patient) == 3, what="those who left are counted")
        for answer in busy:
            assert answer.result(60).status_code == 200
    clean(patient)
    assert patient.metric("gemm_requests_total", route="/gemm", code="200") == 3
    assert patient.metric("gemm_flops_total") == 3 * 2 * 1500**3, "work of those who left was done"


def metric_499(service: Service) -> float:
    return service.metric("gemm_requests_total", route="/gemm", code="499")


def test_a_deadline_shorter_than_the_queue_is_504_and_not_done(patient: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        with patient.standing():
            busy = [pool.submit(patient.gemm, HEAVY, HEAVY) for _ in range(3)]
            patient.admitted(3)
            late = patient.gemm(SMALL[0], WEIGHT, deadline_ms=50)
            assert (late.status_code, late.json()["code"]) == (504, "deadline")
        for answer in busy:
            assert answer.result(60).status_code == 200
    assert patient.metric("gemm_flops_total") == 3 * 2 * 1500**3


def test_a_full_queue_is_429_at_once_with_retry_after(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data", *PATIENT, "--queue-requests", "2", "--arena-bytes", "512MiB") as service,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        service.ready()
        assert service.put("heavy", HEAVY).status_code in (200, 201)
        with service.standing():
            asked = [pool.submit(ask_heavy, service) for _ in range(8)]
            # The worker has one batch, or two where a product takes less time than the link; two requests wait.
            service.until(
                lambda: sum(one.done() for one in asked) >= 4, what="refusals, though nothing moves"
            )
            refused = [one.result() for one in asked if one.done()]
        answers = [one.result(60) for one in asked]
        assert {answer.status_code for answer in refused} == {429}
        assert refused[0].json()["limit"] == 2
        assert float(refused[0].headers["retry-after"]) >= 1
        assert sum(answer.status_code == 200 for answer in answers) in (3, 4)


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


def test_the_front_imports_neither_torch_nor_cuda(service: Service) -> None:
    maps = Path(f"/proc/{service.process.pid}/maps").read_text()
    for name in ("torch", "libcuda", "cutlass"):
        assert name not in maps, f"the front has loaded {name}"
