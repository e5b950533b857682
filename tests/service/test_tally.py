"""What workers say becomes series and estimates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.handle import Flight
from service.messages import Batch, BatchDone, ItemDone, Report
from service.metrics import Metrics
from service.tally import Tally
from tests.service.works import work


def test_what_a_worker_reports_of_its_device_is_measured() -> None:
    metrics = Metrics()
    Tally(metrics).report(0, Report({"cached": 7, "only": 2}, sm_clock_mhz=1440.0))
    text = metrics.exposition()[0].decode()
    assert 'gemm_device_bytes{gpu="0",state="cached"} 7.0' in text
    assert 'gemm_device_bytes{gpu="0",state="only"} 2.0' in text
    assert 'gemm_sm_clock_hertz{gpu="0"} 1.44e+09' in text
    assert 'gemm_tensor_probe_up{gpu="0"} 0.0' in text


def test_variants_that_any_worker_has_quarantined_are_told_until_it_says_otherwise() -> None:
    metrics = Metrics()
    tally = Tally(metrics)
    tally.report(0, Report(quarantined={"a": "wrong"}))
    tally.report(1, Report(quarantined={"b": "hang"}))
    text = metrics.exposition()[0].decode()
    assert 'gemm_variant_quarantined{reason="wrong",variant="a"} 1.0' in text
    assert 'gemm_variant_quarantined{reason="hang",variant="b"} 1.0' in text
    tally.report(1, Report())
    assert 'variant="b"' not in metrics.exposition()[0].decode()


def test_estimates_learn_from_the_products_that_were_computed() -> None:
    tally = Tally(Metrics())
    handle: Any = SimpleNamespace(index=0, ready=None)
    works = (work(), work(m=4000, k=4000, n=4000))

    def ended(seconds: float, *codes: str) -> None:
        flight = Flight(Batch(1, ()), works, 0.0, 0.0)
        items = tuple(ItemDone(each.id, code) for each, code in zip(works, codes, strict=True))
        done = BatchDone(1, items, {"kernel": seconds}, {"reference": 1.0}, {})
        tally.done(handle, flight, done, 1.0)

    before = tally.estimate.seconds(works[1])
    for _ in range(60):
        ended(0.003, "", "deadline")
    assert tally.estimate.seconds(works[0]) == pytest.approx(0.003, rel=0.05)
    assert tally.estimate.seconds(works[1]) == pytest.approx(before, abs=0.003)
    after = tally.estimate.seconds(works[0])
    ended(9.0, "unsupported", "deadline")
    assert tally.estimate.seconds(works[0]) == after
