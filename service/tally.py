"""What workers say of themselves, as metrics: receives readiness, finished work and reports, hands on series.

Also what is learnt from it: how long the next product will take, and how near its datasheet each GPU works.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from service.batch import Work
from service.estimate import Estimate
from service.handle import Flight, Handle
from service.messages import BatchDone, Ready, Report
from service.metrics import Metrics
from service.ratio import FlopsRatio, ideal_seconds, peaks


class Tally:
    """One front's account of its workers."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.estimate = Estimate()
        self.ratio = FlopsRatio()
        #: The last of each worker, by its index.
        self.reports: dict[int, Report] = {}
        metrics.live(
            "gemm_flops_ratio",
            "FLOPs asked for over those that the datasheet's peak allows: an estimate, not a reading.",
            lambda: self.ratio.read(time.monotonic()),
            "gpu",
            peak="datasheet",
        )

    def ready(self, handle: Handle, ready: Ready) -> None:
        """A worker takes work: estimates begin with what its device promises."""
        device = ready.device
        self.estimate = Estimate(device.get("peak_flops"), device.get("bandwidth", 1e10))
        self.ratio.known(str(handle.index), bool(peaks(device)))
        self.metrics.build_info.clear()
        self.metrics.build_info.labels(
            ready.versions.get("service", ""), device["name"], ready.versions.get("backend", "")
        ).set(1)

    def done(self, handle: Handle, flight: Flight, done: BatchDone, now: float) -> None:
        """A worker's batch came back at monotonic `now`: what the link took is what its stages and its host didn't."""
        stages, trace = sum(done.seconds.values()), flight.works[0].trace
        self.count([handle], flight.works, done, now)
        if done.host:
            self.metrics.took("worker", done.host, trace)
        self.metrics.took("link", max(0.0, now - flight.sent - stages - done.host), trace)
        if done.flops and stages > 0 and (works := _computed(flight.works, done)):
            self.estimate.learn(works, stages)

    def count(self, handles: Sequence[Handle], works: Sequence[Work], done: BatchDone, now: float) -> None:
        """`handles` computed `works` in equal shares until monotonic `now`."""
        for stage, seconds in done.seconds.items():
            self.metrics.took(stage, seconds, works[0].trace)
        for variant, flops in done.flops.items():
            self.metrics.flops.labels(variant).inc(flops)
        for variant, busy in done.busy.items():
            self.metrics.kernel_busy.labels(variant).inc(busy)
        for way, nbytes in done.shards.items():
            self.metrics.shards.labels(way).inc(nbytes)
        for item in done.items:
            if not item.code:
                self.metrics.choice(item.variant, item.reason)
        right = _computed(works, done)
        for handle in handles:
            if handle.ready is not None and (peak := peaks(handle.ready.device)):
                self.ratio.ended(str(handle.index), now, ideal_seconds(right, peak) / len(handles))

    def report(self, worker: int, report: Report) -> None:
        """What a worker reads from its device now and then."""
        self.reports[worker] = report
        self.metrics.quarantine(
            {name: why for each in self.reports.values() for name, why in each.quarantined.items()}
        )
        gpu = str(worker)
        self.metrics.probe_up.labels(gpu).set(report.tensor_active is not None)
        if report.tensor_active is None:
            self.metrics.unread(gpu)
        else:
            self.metrics.active(gpu, report.tensor_source, report.tensor_active)
        for state, nbytes in report.device_bytes.items():
            self.metrics.device_bytes.labels(gpu, state).set(nbytes)
        if report.sm_clock_mhz is not None:
            self.metrics.sm_clock.labels(gpu).set(report.sm_clock_mhz * 1e6)


def _computed(works: Sequence[Work], done: BatchDone) -> list[Work]:
    """The works of a batch that weren't refused."""
    return [work for work, item in zip(works, done.items, strict=True) if not item.code]
