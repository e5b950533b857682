"""Our histograms tell what prometheus_client's own would."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client import Histogram as Theirs
from prometheus_client.exposition import choose_encoder

from service import histogram
from service.histogram import Histogram

#: As text and as OpenMetrics.
PLAIN, OPEN = (choose_encoder(accept)[0] for accept in ("", "application/openmetrics-text"))
BOUNDS = (0.001, 0.25, 1.0, 30.0)
SEEN = (0.0, 0.001, math.nextafter(0.001, 1), 0.25, 0.3, 1, 29.9, 31.0, math.inf)


@pytest.mark.parametrize("labels", [(), ("route", "code")])
def test_the_exposition_is_theirs(labels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    monkeypatch.setattr("time.time", lambda: 12.5)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("a_seconds", "What it says.", labels, buckets=BOUNDS, registry=ours)
    other = Theirs("a_seconds", "What it says.", labels, buckets=BOUNDS, registry=theirs)
    for values in (("/x", "200"), ("/y", "404")) if labels else ((),):
        for trace in ("", "t" * 32):
            for amount in SEEN:
                one.labels(*values).observe(amount, trace)
                (other.labels(*values) if values else other).observe(amount)
    assert PLAIN(ours) == PLAIN(theirs)
    told = OPEN(ours).decode().splitlines()
    wanted = OPEN(theirs).decode().splitlines()
    assert [line.split(" # ")[0] for line in told] == [line.split(" # ")[0] for line in wanted]
    assert sum(" # " in line for line in told) == 5 * (2 if labels else 1)


def test_where_no_trace_is_told_the_context_is_asked() -> None:
    registry, asked = CollectorRegistry(), iter(["", "a" * 32])
    one = Histogram("a_seconds", "text", buckets=BOUNDS, registry=registry, trace=lambda: next(asked))
    for _ in range(2):
        one.labels().observe(0.5)
    assert OPEN(registry).count(b"a" * 32) == 1


def test_an_exemplar_is_renewed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    registry = CollectorRegistry()
    one = Histogram("a_seconds", "text", buckets=BOUNDS, registry=registry).labels()
    for trace, later in (
        ("a", 0.0),
        ("b", histogram.EXEMPLAR_SECONDS / 2),
        ("c", histogram.EXEMPLAR_SECONDS),
    ):
        now[0] = later
        one.observe(0.5, trace)
        told = OPEN(registry)
        assert (f'trace_id="{trace}"' in told.decode()) == (trace != "b")
