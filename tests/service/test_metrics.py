"""The exposition: plain text or OpenMetrics by what is asked for, with a trace in each bucket as its exemplar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from service import histogram as module
from service import logs
from service.metrics import STAGES, Metrics

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"  # as Prometheus sends
TRACE = logs.Trace.take(f"00-{'a' * 32}-{'b' * 16}-01")


def exemplars(metrics: Metrics, name: str) -> dict[str, str]:
    """Trace ids by the bucket that they stand in."""
    text, _ = metrics.exposition(OPEN)
    return {
        sample.labels["le"]: sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == f"{name}_bucket" and sample.exemplar
    }


def test_who_asks_for_openmetrics_gets_it() -> None:
    metrics = Metrics()
    plain, plain_type = metrics.exposition()
    told, open_type = metrics.exposition(OPEN)
    assert plain_type.startswith("text/plain; version=0.0.4")
    assert open_type.startswith("application/openmetrics-text; version=1.0.0")
    assert told.endswith(b"# EOF\n")
    assert not plain.endswith(b"# EOF\n")
    names = re.compile(rb"^(gemm_\w+)", re.MULTILINE)
    assert set(names.findall(plain)) == set(names.findall(told))
    assert metrics.exposition("text/html")[1] == plain_type


def test_a_bucket_names_the_last_trace_that_fell_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = Metrics()
    metrics.took("kernel", 0.002, "c" * 32)
    metrics.took("kernel", 2.0, "d" * 32)  # slow ones have a bucket of their own
    metrics.took("kernel", 0.002, "e" * 32)  # too soon
    assert exemplars(metrics, "gemm_stage_seconds") == {"0.0025": "c" * 32, "5.0": "d" * 32}
    now[0] += module.EXEMPLAR_SECONDS
    metrics.took("kernel", 0.002, "f" * 32)
    assert exemplars(metrics, "gemm_stage_seconds")["0.0025"] == "f" * 32
    assert b"trace_id" not in metrics.exposition()[0]


def test_the_trace_is_that_of_the_request_whose_context_it_is() -> None:
    metrics = Metrics()
    token = logs.bind("r", TRACE)
    metrics.took("decode", 0.01)
    metrics.request("/gemm", 200, 0.02)
    logs.unbind(token)
    assert exemplars(metrics, "gemm_stage_seconds") == {"0.01": "a" * 32}
    assert exemplars(metrics, "gemm_request_duration_seconds") == {"0.025": "a" * 32}
    metrics.waited(0.001, "b" * 32)
    assert exemplars(metrics, "gemm_queue_wait_seconds") == {"0.001": "b" * 32}


@pytest.mark.parametrize("traceparent", [f"00-{'a' * 32}-{'b' * 16}-00", None])
def test_what_nobody_keeps_is_no_exemplar(traceparent: str | None) -> None:
    metrics = Metrics()
    token = logs.bind("r", logs.Trace.take(traceparent)) if traceparent else None
    for stage in STAGES:
        metrics.took(stage, 0.01)
    if token:
        logs.unbind(token)
    assert exemplars(metrics, "gemm_stage_seconds") == {}


def test_every_metric_is_described_in_one_place() -> None:
    """deploy/prometheus/METRICS.md: a row each, with its labels, and no row of what isn't there."""
    from service.app import build
    from service.settings import Settings

    text = (Path(__file__).parents[2] / "deploy" / "prometheus" / "METRICS.md").read_text()
    rows = dict(re.findall(r"^\| `(gemm_\w+)` \| ([\w, ]*?) ?\|", text, re.MULTILINE))
    services = build(Settings(arena_bytes=1 << 20, store_memory_bytes=1 << 19, workers=1))
    try:
        registry = services.metrics.registry
        known = {family.name for family in registry.collect() if family.name.startswith("gemm_")}
        labels = {
            name: collector._labelnames  # type: ignore[attr-defined]
            for collector, names in registry._collector_to_names.items()
            for name in names
            if hasattr(collector, "_labelnames")
        }
    finally:
        services.arena.close()
    assert set(rows) == known
    for name, told in rows.items():
        if name in labels:
            assert tuple(filter(None, told.split(", "))) == tuple(labels[name]), name
