"""What happens now: receives metrics, worker states and finished batches, hands on a document for whoever watches.

Counters become rates over the last seconds. Nothing is sampled while nobody watches; what a batch did is noted as
it ends, a few numbers each. What can't be read is None, with a sentence that says why.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from service.batch import Work
from service.messages import BatchDone, Operand, Report
from service.metrics import STAGES, Metrics

if TYPE_CHECKING:
    from service.services import Services

#: Seconds over which rates are taken, and the least between two samples.
WINDOW = 5.0
LEAST = 0.45
#: Batches that the roofline shows.
POINTS = 96

#: Routes by which products are asked for: the door, the host's socket, /v2 over HTTP and over gRPC.
PRODUCT_ROUTES = frozenset(
    {
        "/gemm",
        "local",
        "/v2/models/{model}/infer",
        "/v2/models/{model}/versions/{version}/infer",
        "grpc/ModelInfer",
        "grpc/ModelStreamInfer",
    }
)

Key = tuple[str, tuple[tuple[str, str], ...]]
Wanted = str | frozenset[str]  # a label's value, or any of these


def _carries(has: tuple[tuple[str, str], ...], labels: Mapping[str, Wanted]) -> bool:
    """Whether a sample carries all these labels."""
    own = dict(has)
    return all(
        own.get(name) == value if isinstance(value, str) else own.get(name) in value
        for name, value in labels.items()
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment; keys are a sample's name and its sorted labels."""

    at: float
    values: Mapping[Key, float]


@dataclass(frozen=True, slots=True)
class Delta:
    """What was counted between two samples, `seconds` apart."""

    seconds: float
    values: Mapping[Key, float]

    def total(self, name: str, **labels: Wanted) -> float:
        """The sum over samples of `name` that carry all `labels`."""
        return sum(value for (n, has), value in self.values.items() if n == name and _carries(has, labels))

    def rate(self, name: str, **labels: Wanted) -> float:
        """The same, a second."""
        return self.total(name, **labels) / self.seconds

    def buckets(self, name: str, **labels: Wanted) -> dict[float, float]:
        """Counts of a histogram by upper bound, cumulated."""
        found: dict[float, float] = {}
        for (n, has), value in self.values.items():
            if n == f"{name}_bucket" and _carries(has, labels):
                bound = float(dict(has)["le"])
                found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))

    def spread(self, name: str, **labels: Wanted) -> dict[str, float | None]:
        """Mean, median and 99th percentile of a histogram; None where nothing was observed."""
        count = self.total(f"{name}_count", **labels)
        if count <= 0:
            return {"count": 0.0, "mean": None, "p50": None, "p99": None}
        buckets = self.buckets(name, **labels)
        return {
            "count": count,
            "mean": self.total(f"{name}_sum", **labels) / count,
            "p50": quantile(0.5, buckets),
            "p99": quantile(0.99, buckets),
        }


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """A quantile from cumulated counts by upper bound, linear within a bucket (as Prometheus takes it)."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    wanted, below, before = share * total, 0.0, 0.0
    for bound, count in buckets.items():
        if count >= wanted:
            if math.isinf(bound):
                return below
            return below + (bound - below) * (wanted - before) / max(count - before, 1e-12)
        below, before = bound, count
    return below


@dataclass(slots=True)
class Now:
    """Keeps a few samples and the last batches of one front."""

    samples: deque[Sample] = field(default_factory=deque)
    points: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=POINTS))
    count: int = 0

    def saw(self, works: Sequence[Work], done: BatchDone) -> None:
        """A batch ended; called for each."""
        point = point_of(works, done)
        if point is not None:
            self.count += 1
            self.points.append({"id": self.count, "at": time.time(), **point})

    def sample(self, metrics: Metrics, at: float) -> Delta | None:
        """Take a sample at monotonic `at`; what was counted since the oldest one kept, None at first."""
        if self.samples and at - self.samples[-1].at > 2 * WINDOW:
            self.samples.clear()  # nobody watched in between: not what happens now
        if not self.samples or at - self.samples[-1].at >= LEAST:
            self.samples.append(Sample(at, counters(metrics)))
        while len(self.samples) > 2 and at - self.samples[1].at >= WINDOW:
            self.samples.popleft()
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        values = {key: value - first.values.get(key, 0.0) for key, value in last.values.items()}
        return Delta(last.at - first.at, values)

    def document(self, services: Services, at: float) -> dict[str, Any]:
        """All that the page's first view shows."""
        supervisor = services.supervisor
        workers = supervisor.status()
        reports = supervisor.tally.reports
        return {
            "at": time.time(),
            "status": "ready" if supervisor.ready else "draining" if supervisor.draining else "not ready",
            **rates(self.sample(services.metrics, at)),
            "queue": {"depth": supervisor.queue.depth, "seconds": supervisor.queue.seconds},
            "tensor": [tensor(worker, reports.get(worker["index"])) for worker in workers],
            "flops_ratio": supervisor.tally.ratio.read(at),
            "quarantined": {n: why for report in reports.values() for n, why in report.quarantined.items()},
            "workers": workers,
            "arena": {**services.slots.bytes_by_state, "free": services.slots.free},
            "arena_bytes": services.settings.arena_bytes,
            "store": services.store.bytes_by_tier(),
            "store_bytes": {
                "memory": services.settings.store_memory_bytes,
                "disk": services.settings.store_disk_bytes,
            },
            "points": list(self.points),
        }


def counters(metrics: Metrics) -> dict[Key, float]:
    """The counters that rates are taken of."""
    sampled = (
        *(metrics.requests, metrics.flops, metrics.kernel_busy, metrics.rejected),
        *(metrics.queue_wait, metrics.stage, metrics.batch_requests, metrics.duration),
    )
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for metric in sampled
        for family in metric.collect()
        for one in family.samples
    }


def rates(delta: Delta | None) -> dict[str, Any]:
    """Rates and times of the last seconds; None for each before two samples are there."""
    if delta is None:
        names = ("requests_per_second", "gemms_per_second", "flops_per_second", "wait", "kernel")
        return dict.fromkeys(
            ("window_seconds", *names, "kernel_busy", "request", "batch", "stages", "rejected")
        )
    busy = delta.total("gemm_kernel_busy_seconds_total")
    sizes = delta.buckets("gemm_batch_requests")
    return {
        "window_seconds": delta.seconds,
        "requests_per_second": delta.rate("gemm_requests_total"),
        "gemms_per_second": delta.rate("gemm_requests_total", route=PRODUCT_ROUTES),
        "flops_per_second": delta.rate("gemm_flops_total"),
        "kernel_busy": busy / delta.seconds,
        "wait": delta.spread("gemm_queue_wait_seconds"),
        "kernel": delta.spread("gemm_stage_seconds", stage="kernel"),
        "request": delta.spread("gemm_request_duration_seconds", route=PRODUCT_ROUTES),
        "batch": {**delta.spread("gemm_batch_requests"), "sizes": _apart(sizes)},
        "stages": {
            stage: mean
            for stage in STAGES
            if (mean := delta.spread("gemm_stage_seconds", stage=stage)["mean"]) is not None
        },
        "rejected": {
            dict(labels)["reason"]: value
            for (name, labels), value in delta.values.items()
            if name == "gemm_rejected_total" and value > 0
        },
    }


def _apart(buckets: Mapping[float, float]) -> list[list[float | None]]:
    """[upper bound, count in this bucket alone]; None for the open end."""
    rows: list[list[float | None]] = []
    before = 0.0
    for bound, count in buckets.items():
        rows.append([None if math.isinf(bound) else bound, count - before])
        before = count
    return rows


def tensor(worker: Mapping[str, Any], report: Report | None) -> dict[str, Any]:
    """How busy one worker's tensor cores were, as its hardware counts; else why that isn't readable here."""
    device = worker["device"] or {}
    if report is not None and report.tensor_active is not None:
        return {
            "worker": worker["index"],
            "active": report.tensor_active,
            "source": report.tensor_source,
            "detail": "",
            "sm_clock_mhz": report.sm_clock_mhz,
        }
    if device.get("virtual"):
        why = "a virtual GPU has no clock to count by"
    elif device.get("arch") == "cpu":
        why = "this computer's CPU has no tensor cores to read"
    elif not device:
        why = "no worker is ready"
    else:
        why = (report.tensor_detail if report else "") or "nothing was read yet"
    return {"worker": worker["index"], "active": None, "source": "", "detail": why, "sm_clock_mhz": None}


def point_of(works: Sequence[Work], done: BatchDone) -> dict[str, Any] | None:
    """A batch as a point of the roofline; None where no kernel ran."""
    flops, seconds = sum(done.flops.values()), sum(done.busy.values())
    if not works or flops <= 0 or seconds <= 0:
        return None
    first = works[0]
    k = first.a.shape[-2] if first.params.trans_a else first.a.shape[-1]
    return {
        "m": first.out.shape[-2],
        "n": first.out.shape[-1],
        "k": k,
        "batch": first.out.shape[0] if len(first.out.shape) == 3 else 1,
        "dtype": first.a.dtype,
        "requests": len(works),
        "flops": flops,
        "bytes": touched(works),
        "seconds": seconds,
        "variant": max(done.flops, key=lambda name: done.flops[name]),
    }


def touched(works: Sequence[Work]) -> int:
    """Bytes that the batch must move once at least: what several products share counts once."""
    parts: dict[int, Operand] = {}
    for work in works:
        for part in (work.a, work.b, work.out, work.c, work.bias):
            if part is not None:
                parts[part.offset] = part
    return sum(part.nbytes for part in parts.values())
