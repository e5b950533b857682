"""Products over the nodes of a Ray cluster behind /gemm: right, kept there, and clear when a node dies.

Slow: `make test-ray`. Three raylets, real processes of this machine, with a rank on each.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.service.real import Service, result, running
from tests.service.teams import check_epilogue, moved, sharded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, about its use of other packages
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}
RNG = np.random.default_rng(21)
A, B, C = (RNG.standard_normal(shape) for shape in ((301, 190), (190, 257), (301, 257)))
BIAS = RNG.standard_normal(257)
HEAVY = RNG.standard_normal((2400, 2400))
#: Seconds within which a product that has lost a rank is refused.
REFUSED_SECONDS = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    made.add_node(**NODE)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(scope="module")
def service(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With one worker of its own, and three ranks in the cluster."""
    ranks = ("--ray-address", cluster.address, "--ray-ranks", "3", "--start-seconds", "60")
    flags = ("--device", "cpu", "--local", "false", "--arena-bytes", "512MiB", *ranks)
    with running(tmp_path_factory.mktemp("team"), *flags) as one:
        yield one.ready()


def actors(node: Any) -> list[psutil.Process]:
    """The ranks on a node."""
    (raylet,) = node.all_processes["raylet"]
    below = psutil.Process(raylet.process.pid).children(recursive=True)
    return [process for process in below if "_Rank" in " ".join(process.cmdline())]


def test_a_rank_on_each_node_and_the_bits_of_one_worker(cluster: Any, service: Service) -> None:
    for kind in (np.float32, np.float64, np.float16):
        a, b = A.astype(kind), B.astype(kind)
        alone = result(service.gemm(a, b, variant="reference-numpy"))
        assert sharded(service, a, b).tobytes() == alone.tobytes()
    assert [len(actors(node)) for node in cluster.list_all_nodes()] == [1, 1, 1]


def test_epilogue_transposed_and_by_handle(service: Service) -> None:
    check_epilogue(service, A, B, C, BIAS)


def test_shards_stay_on_the_nodes_and_so_does_a_result(service: Service) -> None:
    for name, x in (("x", A), ("y", B)):
        assert service.put(name, x).status_code in (200, 201)
    body = {"a": {"handle": "x"}, "b": {"handle": "y"}, "variant": "sharded", "out": {"handle": "xy"}}
    before = moved(service)
    assert service.http.post("/gemm", json=body).status_code == 200
    once = moved(service)
    assert once["copied"] - before["copied"] == A.nbytes + B.nbytes
    assert once["exchanged"] - before["exchanged"] == 2 * B.nbytes
    assert service.http.post("/gemm", json=body).status_code == 200
    twice = moved(service)
    assert {way: twice[way] - once[way] for way in twice} == {
        **{"copied": 0, "exchanged": 0, "kept": A.nbytes + 3 * B.nbytes}
    }
    assert service.metric("gemm_shards_kept_bytes") >= A.nbytes + 3 * B.nbytes + C.nbytes
    # The result is the next product's A: its rows are there already.
    right = RNG.standard_normal((257, 40))
    assert service.put("right", right).status_code in (200, 201)
    follows = {"a": {"handle": "xy"}, "b": {"handle": "right"}, "variant": "sharded", "out": {"handle": "z"}}
    assert service.http.post("/gemm", json=follows).status_code == 200
    assert moved(service)["copied"] - twice["copied"] == right.nbytes
    z = service.http.get("/tensors/z", headers={"accept": "application/octet-stream"})
    np.testing.assert_allclose(np.frombuffer(z.content).reshape(301, 40), A @ B @ right, rtol=1e-9, atol=1e-8)
    # What is replaced is never taken for what it was.
    assert service.put("y", -B).status_code in (200, 201)
    np.testing.assert_allclose(sharded(service, A, "y"), -(A @ B), rtol=1e-10, atol=1e-9)


def test_a_node_killed_amid_a_product_is_a_clear_error_and_the_team_forms_again_with_the_next_node(
    cluster: Any, service: Service
) -> None:
    assert service.put("heavy", HEAVY).status_code in (200, 201)
    sharded(service, A, B)
    victim = next(node for node in cluster.worker_nodes if actors(node))
    (rank,) = actors(victim)
    rank.suspend()
    body = {"a": {"handle": "heavy"}, "b": {"handle": "heavy"}, "variant": "sharded", "out": {"handle": "hh"}}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        before = service.metric("gemm_queue_wait_seconds_count")
        asked = pool.submit(service.http.post, "/gemm", json=body)
        service.until(lambda: service.metric("gemm_queue_wait_seconds_count") > before, what="ranks have it")
        cluster.remove_node(victim, allow_graceful=False)
        began = time.monotonic()
        # Meanwhile the worker answers.
        np.testing.assert_allclose(result(service.gemm(A, B)), A @ B, rtol=1e-10, atol=1e-9)
        answer = asked.result(120)
    assert time.monotonic() - began < REFUSED_SECONDS
    assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
    assert "rank" in answer.json()["detail"]
    # Two nodes have no room for three ranks: that is said within the deadline.
    late = service.gemm(A, B, variant="sharded", deadline_ms=3000)
    assert (late.status_code, late.json()["code"]) == (504, "deadline")
    np.testing.assert_allclose(result(service.gemm(A, B)), A @ B, rtol=1e-10, atol=1e-9)
    cluster.add_node(**NODE)
    service.until(
        lambda: service.gemm(A, B, variant="sharded").status_code == 200, 90, "ranks on the new node"
    )
    assert sharded(service, A, B).tobytes() == result(service.gemm(A, B)).tobytes()
    assert service.metric("gemm_arena_bytes", state="request") == 0
    assert service.metric("gemm_worker_restarts_total") == 0


def test_no_room_is_said_within_the_time(cluster: Any, tmp_path: Path) -> None:
    ranks = ("--ray-address", cluster.address, "--ray-ranks", "64", "--start-seconds", "24")
    with running(tmp_path / "data", "--device", "cpu", *ranks) as service:
        service.ready()
        answer = service.gemm(A, B, variant="sharded")
        assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
        assert "no room for 64 ranks" in answer.json()["detail"]
        assert service.stop() == 0
