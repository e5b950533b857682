"""What workers say becomes series and estimates."""

from __future__ import annotations

from service.messages import Report
from service.metrics import Metrics
from service.tally import Tally


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
