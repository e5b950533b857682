"""The service in a Ray cluster of three raylets with pretended GPUs: it scales, and a killed node loses nothing.

Slow: `make test-ray`. The raylets are real processes of this machine; Ray counts their GPUs without looking for any.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml

from benchmarks.drills.traffic import WEIGHT as STORED
from benchmarks.drills.traffic import KeepAlive, Tally, Traffic, nothing_lost
from tests.service import shared
from tests.service.real import ROOT, raw, raw_tensor, result

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, about its use of other packages
    ray = pytest.importorskip("ray")
    from ray import serve
    from ray.cluster_utils import Cluster

    from service.ray_serve import Arguments, application, free, replica_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
WEIGHT = np.random.default_rng(0).standard_normal((48, 32)).astype(np.float32)
#: What a proxy or a replica says while a node dies; anything else is an error.
PASSING = (500, 502, 503, 504)


@pytest.fixture(scope="module")
def stores() -> Iterator[dict[str, Any]]:
    """Settings that name an S3 server and a PostgreSQL, whose credentials all nodes have in their environment."""
    with shared.postgres() as postgres, shared.s3() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environ().items():
            patch.setenv(name, value)
        yield {"store": s3.bucket(), "journal": postgres.database(), "lease_seconds": 3, "shared_seconds": 10}


@pytest.fixture(scope="module")
def cluster(stores: dict[str, Any]) -> Iterator[Any]:
    """A head without GPUs, and two nodes of two each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0, "include_dashboard": False})
    made.add_node(**NODE, num_gpus=2)
    made.add_node(**NODE, num_gpus=2)
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()
        made.shutdown()


@pytest.fixture(scope="module")
def url(cluster: Any) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"


def deploy(folder: Path, more: dict[str, Any] | None = None, **arguments: Any) -> None:
    settings = {"device": "cpu", "backend": "numpy", "arena_bytes": "64MiB", "local": "false"}
    settings |= {"data": str(folder), "log_level": "warning", **(more or {})}
    serve.run(application(Arguments(settings=settings, num_cpus=0.5, **arguments)), route_prefix="/")


def until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError, psutil.NoSuchProcess):
            if value := true():
                return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


class Load:
    """Clients that ask for products and try again where they are refused; each answer is checked."""

    def __init__(self, url: str, clients: int) -> None:
        self.url = url
        self.answered = [0] * clients
        self.refused: list[int] = []
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        a = np.random.default_rng(number + 1).standard_normal((40, 48)).astype(np.float32)
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self._stop.is_set():
                self._ask(http, number, a)

    def _ask(self, http: httpx.Client, number: int, a: np.ndarray) -> None:
        """One product, until it is answered."""
        end = time.monotonic() + 90
        while time.monotonic() < end:
            try:
                answer = http.post("/gemm", **raw(a, WEIGHT))
            except httpx.TransportError:
                self.refused.append(0)
                continue
            if answer.status_code == 200:
                if not np.allclose(result(answer), a @ WEIGHT, rtol=1e-4, atol=1e-4):
                    self.wrong.append("a wrong product")
                self.answered[number] += 1
                return
            if answer.status_code not in PASSING:
                self.wrong.append(f"{answer.status_code} {answer.text[:200]}")
                return
            self.refused.append(answer.status_code)
            time.sleep(0.1)
        self.wrong.append("a request was never answered")

    def goes_on(self, more: int, seconds: float) -> None:
        """Every client gets `more` answers."""
        before = list(self.answered)
        until(
            lambda: all(now >= was + more for now, was in zip(self.answered, before, strict=True)),
            seconds,
            f"{more} answers a client: {before}, {self.answered}, {self.refused[-5:]}, {self.wrong[:3]}",
        )

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive()


def family(node: Any, word: str) -> list[psutil.Process]:
    """The processes below a node's raylet whose command line has `word`."""
    (raylet,) = node.all_processes["raylet"]
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(raylet.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(process.cmdline()):
                    found.append(process)
    return found


def replicas(node: Any) -> list[psutil.Process]:
    return family(node, "ServeReplica")


def workers(cluster: Any) -> list[psutil.Process]:
    """The service's worker processes on all nodes."""
    return [process for node in cluster.worker_nodes for process in family(node, "service.worker")]


def test_it_scales_with_load_and_a_node_killed_under_load_loses_nothing(
    cluster: Any, url: str, tmp_path: Path
) -> None:
    deploy(tmp_path, num_gpus=1, min_replicas=1, max_replicas=3, target_ongoing_requests=2)
    until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 60, "ready")
    load = Load(url, 8)
    try:
        load.goes_on(10, 60)
        until(lambda: len(workers(cluster)) >= 2, 90, "a second replica")
        for worker in workers(cluster):
            # Each replica was lent a whole GPU, and its workers see that one alone.
            assert worker.environ()["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        victim = max(cluster.worker_nodes, key=lambda node: len(replicas(node)))
        dying = replicas(victim)
        assert dying
        before = len(load.refused)
        cluster.remove_node(victim, allow_graceful=False)
        until(
            lambda: not any(process.is_running() for process in dying),
            60,
            "the dead node's replicas are gone",
        )
        load.goes_on(30, 120)
        assert any(replicas(node) for node in cluster.worker_nodes)
    finally:
        load.stop()
    assert load.wrong == []
    assert all(answered > 30 for answered in load.answered)
    print(f"{sum(load.answered)} answers, {len(load.refused) - before} tries refused around the death")


class Persistent(KeepAlive):
    """Asks again where it is told that a node dies; a wrong answer or any other refusal is a failure at once."""

    def __init__(self, url: str, number: int, tally: Tally) -> None:
        super().__init__(url, number, tally)
        self.walks = self.passed = 0
        self.http.event_hooks = {"response": [self._look]}

    @staticmethod
    def _look(reply: httpx.Response) -> None:
        if reply.status_code in PASSING:
            raise httpx.HTTPStatusError("passing", request=reply.request, response=reply)

    def walk(self) -> None:
        super().walk()
        self.walks += 1

    def _do(self, kind: str, ask: Callable[[], None]) -> bool:
        def until_answered() -> None:
            end = time.monotonic() + 90
            while True:
                try:
                    return ask()
                except (httpx.TransportError, httpx.HTTPStatusError):
                    if time.monotonic() > end:
                        raise
                    self.passed += 1
                    time.sleep(0.2)

        return super()._do(kind, until_answered)


def test_replicas_that_share_stores_lose_nothing_when_a_node_is_killed_under_load(
    cluster: Any, url: str, tmp_path: Path, stores: dict[str, Any]
) -> None:
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(**NODE, num_gpus=2)
    deploy(tmp_path, stores, num_gpus=1, min_replicas=3, max_replicas=3)
    until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 60, "ready")
    until(lambda: all(replicas(node) for node in cluster.worker_nodes), 90, "a replica on each node")
    assert httpx.put(f"{url}/tensors/weight", **raw_tensor(STORED)).status_code in (200, 201)
    tally = Tally()
    clients = [Persistent(url, number, tally) for number in range(4)]

    def go_on(walks: int) -> None:
        wanted = [client.walks + walks for client in clients]
        until(
            lambda: all(client.walks >= want for client, want in zip(clients, wanted, strict=True)),
            120,
            f"{walks} walks a client: {[client.walks for client in clients]}, {tally.failures[:3]}",
        )

    with Traffic(clients):  # type: ignore[arg-type]
        go_on(8)
        victim = max(cluster.worker_nodes, key=lambda node: len(replicas(node)))
        dying = replicas(victim)
        cluster.remove_node(victim, allow_graceful=False)
        until(lambda: not any(process.is_running() for process in dying), 60, "the node's replicas are gone")
        go_on(25)
    assert not tally.failures
    print(f"{tally.total} requests well, {sum(client.passed for client in clients)} tries refused")
    print(nothing_lost(url, tally))


def test_two_replicas_share_a_gpu(cluster: Any, url: str, tmp_path: Path) -> None:
    deploy(tmp_path, num_gpus=0.5, min_replicas=2, max_replicas=2)
    until(lambda: len(workers(cluster)) == 2, 90, "two workers")
    seen = workers(cluster)
    until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 60, "ready")
    assert {len(worker.environ()["CUDA_VISIBLE_DEVICES"].split(",")) for worker in seen} == {1}
    # Each has a folder of its own.
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["replica-0", "replica-1"]
    a = np.ones((4, 48), np.float32)
    np.testing.assert_allclose(result(httpx.post(f"{url}/gemm", **raw(a, WEIGHT))), a @ WEIGHT, rtol=1e-5)


def test_a_replica_computes_with_ranks_that_ray_placed(cluster: Any, url: str, tmp_path: Path) -> None:
    spread = {"ray_address": cluster.address, "ray_ranks": 2}
    deploy(tmp_path, spread, min_replicas=1, max_replicas=1)
    until(lambda: httpx.get(f"{url}/health/ready").status_code == 200, 60, "ready")
    a = np.random.default_rng(9).standard_normal((40, 48)).astype(np.float32)
    answer = httpx.post(f"{url}/gemm", **raw(a, WEIGHT, variant="sharded"), timeout=90)
    np.testing.assert_allclose(result(answer), a @ WEIGHT, rtol=1e-4, atol=1e-4)
    assert answer.headers["x-gemm-variant"] == "sharded"
    ranks = [process for node in cluster.list_all_nodes() for process in family(node, "_Rank")]
    assert len(ranks) == 2


def test_a_replica_takes_the_first_folder_that_nobody_holds(tmp_path: Path) -> None:
    from service.folder import DataFolder

    first = replica_settings({"data": str(tmp_path)})
    assert first.data == tmp_path / "replica-0"
    held = DataFolder(first.data)
    held.open()
    assert not free(first.data)
    assert replica_settings({"data": str(tmp_path)}).data == tmp_path / "replica-1"
    held.close()
    assert replica_settings({"data": str(tmp_path)}).data == tmp_path / "replica-0"


def test_the_config_that_is_deployed_fits_the_application() -> None:
    from ray.serve.schema import ServeDeploySchema

    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text()))
    (one,) = config.applications
    assert one.import_path == "service.ray_serve:application"
    arguments = Arguments.model_validate(one.args)
    assert arguments.num_gpus == 1
    assert isinstance(application(arguments), serve.Application)
