"""Products over several workers' devices: real ranks on gloo behind /gemm, and what a rank's death costs."""

from __future__ import annotations

import concurrent.futures
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.service.real import Service, result, running
from tests.service.teams import check_epilogue, moved, sharded

pytestmark = pytest.mark.ci

RNG = np.random.default_rng(11)
A, B = RNG.standard_normal((301, 190)), RNG.standard_normal((190, 257))
C, BIAS = RNG.standard_normal((301, 257)), RNG.standard_normal(257)
HEAVY = RNG.standard_normal((3000, 3000))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--workers", "2", "--device", "cpu", "--hang-seconds", "20", "--arena-bytes", "512MiB")
    with running(tmp_path_factory.mktemp("team"), *flags) as one:
        yield one.ready()


def ranks(service: Service) -> list[psutil.Process]:
    return [each for each in service.workers() if "--rank" in each.cmdline()]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_it_has_the_bits_of_one_worker(service: Service, kind: type) -> None:
    a, b = A.astype(kind), B.astype(kind)
    alone = result(service.gemm(a, b, variant="reference-numpy"))
    assert sharded(service, a, b).tobytes() == alone.tobytes()
    assert len(ranks(service)) == 2


def test_bfloat16_with_epilogue_by_handle_and_transposed(service: Service) -> None:
    check_epilogue(service, A, B, C, BIAS)


def test_bias_along_m_and_two_at_once_take_turns(service: Service) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = [pool.submit(sharded, service, A, B * n) for n in range(1, 5)]
        for n, answer in enumerate(asked, 1):
            np.testing.assert_allclose(answer.result(60), A @ (B * n), rtol=1e-10, atol=1e-9)
    assert service.put("m", BIAS[:2]).status_code in (200, 201)
    d = sharded(service, A[:2], B, bias="handle:m", bias_dim="m")
    np.testing.assert_allclose(d, A[:2] @ B + BIAS[:2, None], rtol=1e-10, atol=1e-9)


def test_blocks_of_a_stored_operand_do_not_move_again_until_it_is_replaced(service: Service) -> None:
    for times in (1.0, -2.0):  # stored, then replaced
        assert service.put("again", B * times).status_code in (200, 201)
        first = moved(service)
        want = sharded(service, A, "again")
        np.testing.assert_allclose(want, A @ (B * times), rtol=1e-10, atol=1e-9)
        second = moved(service)
        assert second["copied"] - first["copied"] == B.nbytes  # each rank its block,
        assert second["exchanged"] - first["exchanged"] == B.nbytes  # and that of the other
        assert sharded(service, A, "again").tobytes() == want.tobytes()
        third = moved(service)
        assert {way: third[way] - second[way] for way in third} == {
            **{"copied": 0, "exchanged": 0, "kept": 2 * B.nbytes}
        }
        kept = service.metric("gemm_shards_kept_bytes")
        assert kept >= 2 * B.nbytes
    assert service.http.delete("/tensors/again").status_code < 300
    assert sharded(service, A, B).shape == (301, 257)  # tells of what ranks keep, once they have forgotten
    assert service.metric("gemm_shards_kept_bytes") == kept - 2 * B.nbytes


def test_a_deadline_counts_while_others_have_the_ranks(service: Service) -> None:
    sharded(service, A, B)
    for rank in ranks(service):
        rank.suspend()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            before = service.metric("gemm_queue_wait_seconds_count")
            asked = pool.submit(sharded, service, A, B)
            service.until(
                lambda: service.metric("gemm_queue_wait_seconds_count") > before, what="the ranks have it"
            )
            late = service.gemm(A, B, variant="sharded", deadline_ms=300)
            assert (late.status_code, late.json()["code"]) == (504, "deadline")
            for rank in ranks(service):
                rank.resume()
            np.testing.assert_allclose(asked.result(60), A @ B, rtol=1e-10, atol=1e-9)
    finally:
        for rank in ranks(service):
            rank.resume()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_is_a_clear_error_and_the_service_goes_on(
    tmp_path: Path, blow: signal.Signals
) -> None:
    flags = ("--workers", "2", "--device", "cpu", "--hang-seconds", "2", "--ping-seconds", "0.2")
    with running(tmp_path / "data", *flags, "--arena-bytes", "512MiB") as service:
        service.ready()
        assert service.put("heavy", HEAVY).status_code in (200, 201)
        sharded(service, A, B)
        workers = {each.pid for each in service.workers()} - {each.pid for each in ranks(service)}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            victim = ranks(service)[1]
            victim.suspend()
            body = {"a": {"handle": "heavy"}, "b": {"handle": "heavy"}, "variant": "sharded"}
            asked = pool.submit(service.http.post, "/gemm", json={**body, "out": {"handle": "d"}})
            if blow is signal.SIGKILL:
                admitted = lambda: service.metric("gemm_queue_wait_seconds_count") >= 2  # noqa: E731
                service.until(admitted, what="the ranks have it")
                victim.kill()
            # Meanwhile the workers answer.
            np.testing.assert_allclose(result(service.gemm(A, B)), A @ B, rtol=1e-10, atol=1e-9)
            answer = asked.result(60)
        assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
        assert "rank" in answer.json()["detail"]
        assert not ranks(service)
        np.testing.assert_allclose(sharded(service, A, B), A @ B, rtol=1e-10, atol=1e-9)
        assert {each.pid for each in service.workers()} - {each.pid for each in ranks(service)} == workers
        assert service.metric("gemm_arena_bytes", state="request") == 0
        assert service.stop() == 0


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [(A[:1], B, "at least 2 rows"), (np.stack([A, A]), np.stack([B, B]), "no batch")],
    ids=["one row", "batch"],
)
def test_what_ranks_cannot_take_is_refused(
    service: Service, a: np.ndarray, b: np.ndarray, because: str
) -> None:
    answer = service.gemm(a, b, variant="sharded")
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported")
    assert because in answer.json()["detail"]


def test_one_worker_alone_cannot_shard(tmp_path: Path) -> None:
    with running(tmp_path / "data") as service:
        service.ready()
        answer = service.gemm(A, B, variant="sharded")
    assert (answer.status_code, answer.json()["field"]) == (422, "variant")
    assert "two workers" in answer.json()["detail"]
