"""Unlike products that wait together: they share a launch, and have the bits that they have alone."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.verify import check
from service.drivers.base import problem_of
from service.memory import Memory
from service.messages import Item, Params
from tests.kernels import samples
from tests.service.real import PATIENT, Service, result, running

torch: Any = pytest.importorskip("torch")

from tests.service import cuda_stand_in  # noqa: E402
from tests.service.cuda_stand_in import OWN, TOGETHER, Arenas, StandIn, run  # noqa: E402

random = np.random.default_rng(3)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("together")
    environ = {"PYTHONPATH": cuda_stand_in.folder(folder), "GEMM_CACHE": str(folder / "cache")}
    with running(folder / "data", "--device", "cuda", "--workers", "1", *PATIENT, environ=environ) as one:
        yield one.ready()


def test_unlike_products_that_wait_together_share_a_launch(service: Service) -> None:
    """While the worker stands still all but the first ones gather: stored weights of their own and none."""
    shapes = [(8 + n, 16 + 8 * (n % 3), 24) for n in range(10)]
    operands = [
        (random.standard_normal((m, k), np.float32), random.standard_normal((k, n), np.float32))
        for m, n, k in shapes
    ]
    for number, (_, b) in enumerate(operands[:5]):
        service.put(f"weight-{number}", b).raise_for_status()

    def ask(number: int) -> Any:
        a, b = operands[number]
        import httpx

        from tests.service.real import raw

        return httpx.post(
            f"{service.url}/gemm", timeout=60, **raw(a, f"weight-{number}" if number < 5 else b)
        )

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        with service.standing():
            asked = [pool.submit(ask, number) for number in range(10)]
            service.admitted(10)
        answers = [each.result() for each in asked]
    for answer, (a, b) in zip(answers, operands, strict=True):
        np.testing.assert_allclose(result(answer), a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    variants = [answer.headers["x-gemm-variant"] for answer in answers]
    assert set(variants) <= {TOGETHER, OWN}
    assert variants.count(TOGETHER) >= 8  # two batches were sent ahead, of at least one each
    assert service.metric("gemm_flops_total", variant=TOGETHER) > 0
    assert service.metric("gemm_kernel_busy_seconds_total", variant=TOGETHER) > 0
    assert {each["name"] for each in service.http.get("/variants").json()["variants"]} >= {TOGETHER, OWN}


@pytest.fixture(scope="module")
def kernels() -> Path:
    """The grouped kernel and Step 9 for products alone, compiled."""
    pytest.importorskip("cutlass")
    return samples.built()


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_kernels_give_the_same_bits_together_and_alone(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker's own driver over the virtual H200: its PTX is executed, in one launch and one by one."""
    from kernels.virtual.runtime import VirtualRuntime

    monkeypatch.setenv("GEMM_CACHE", str(tmp_path))
    chip = VirtualRuntime("sm_90a", root=kernels, detect=True)
    # The virtual chip has four SMs, which make waiting for one's turn dear; the estimate is told of a whole H200.
    chip.device = replace(chip.device, sms=132)
    memory = Arenas()

    class Virtual(StandIn):
        def _made(self) -> Any:
            return chip

    cuda_stand_in.undone(monkeypatch)
    driver = Virtual(Memory(memory.arena))
    driver.start(lambda report: None)
    items = []
    given = []
    for number, (m, n, k) in enumerate([(24, 264, 136), (1, 72, 200), (64, 64, 64), (40, 136, 72)]):
        a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((m, k), (k, n)))
        out = memory.room((m, n), "fp16", 2 * m * n)
        params = Params("fp16", alpha=0.5, activation="relu" if number == 1 else "none")
        items.append(Item(number, memory.put(a, "fp16"), memory.put(b, "fp16"), out, params))
        given.append((a, b))
    done = run(driver, items)
    assert [item.code for item in done.items] == [""] * len(items)
    assert {item.variant for item in done.items} == {
        "step9-grouped-128x128"
    }  # the one that is built for fp16
    assert len(chip.reports) == 1
    together = [memory.get(item.out) for item in items]
    for item, (a, b), d in zip(items, given, together, strict=True):
        verdict = check(problem_of(item), d, a, b)
        assert verdict.ok, verdict.detail
        memory.arena.view(item.out.offset, item.out.nbytes)[:] = b"\xff" * item.out.nbytes
        (alone,) = run(driver, [item]).items
        assert alone.variant.startswith("step9-")
        assert "grouped" not in alone.variant
        assert memory.get(item.out).tobytes() == d.tobytes()
