"""Histograms that cost little to observe: receives seconds or counts, hands on Prometheus' families, with exemplars.

For one thread, the front's loop. prometheus_client's own take a lock and several calls for each of two numbers, which
for every stage of a small request adds up to more than its parsing.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

#: An exemplar in each bucket is renewed no more often than this.
EXEMPLAR_SECONDS = 1.0


class Series:
    """The histogram of one set of labels. `trace` gives an observation's trace id where it isn't told, "" for none."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_renewed", "_sum", "_trace")

    def __init__(self, bounds: Sequence[float], trace: Callable[[], str] | None) -> None:
        self._bounds = bounds
        self._trace = trace
        self._counts = [0] * len(bounds)
        self._sum = 0.0
        self._exemplars: list[Exemplar | None] = [None] * len(bounds)
        self._renewed = [-math.inf] * len(bounds)

    def observe(self, amount: float, trace: str | None = None) -> None:
        """`trace`: its id, "" for none."""
        bucket = bisect_left(self._bounds, amount)
        self._counts[bucket] += 1
        self._sum += amount
        if trace is None:
            trace = "" if self._trace is None else self._trace()
        if trace and (now := time.monotonic()) - self._renewed[bucket] >= EXEMPLAR_SECONDS:
            self._renewed[bucket] = now
            self._exemplars[bucket] = Exemplar({"trace_id": trace}, amount, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Its samples."""
        told: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        total = 0
        for bound, count, exemplar in zip(self._bounds, self._counts, self._exemplars, strict=True):
            total += count
            name = floatToGoString(bound)  # type: ignore[no-untyped-call]
            told.append((name, float(total)) if exemplar is None else (name, float(total), exemplar))
        family.add_metric(labels, told, self._sum)


class Histogram(Collector):
    """A metric and its series; without label names it is one."""

    def __init__(
        self,
        name: str,
        text: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
        trace: Callable[[], str] | None = None,
    ) -> None:
        self._name, self._text, self._labelnames = name, text, tuple(labelnames)
        self._bounds = (*map(float, buckets), math.inf)
        self._trace = trace
        self._series: dict[tuple[str, ...], Series] = {}
        if not labelnames:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """The series of these labels' values, kept from the first call on."""
        assert len(values) == len(self._labelnames)
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds, self._trace)
        return found

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labelnames)]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        for values, series in self._series.items():
            series.add_to(family, values)
        return [family]
