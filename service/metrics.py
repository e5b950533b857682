"""Every metric of the service: receives counts and times from the stages, hands on the Prometheus exposition.

One process (the front) registers them all; workers report over the link. Base units: seconds, bytes, FLOPs.
Every label has a bound: `code` is an HTTP status, `reason` and `stage` are enumerations, `route` a template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from service.aside import Aside
from service.histogram import Histogram, Series
from service.logs import sampled_trace

#: Stage words, in the order in which a request meets them; file names, logs and traces use the same.
STAGES = ("decode", "admit", "batch", "link", "worker", "copy_in", "kernel", "copy_out", "reply")

REJECTIONS = (
    "queue_full",
    "quota",
    "too_large",
    "invalid",
    "malformed",
    "unauthorized",
    "deadline",
    "draining",
    "no_worker",
    "no_room",
    "client_gone",
    "other",
)

RESTARTS = ("crash", "hang", "start_failed", "device")
#: How ranks of a sharded product had their operands: copied to them, from rank to rank, from a product before.
SHARD_WAYS = ("copied", "exchanged", "kept")
QUARANTINES = ("wrong", "hang", "fault", "untested")

_DURATIONS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_FINE = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.05,
    0.25,
    1.0,
    5.0,
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class _Live(Collector):
    """Gauges that are read when scraped: queue, arena, store."""

    def __init__(self) -> None:
        self.sources: list[Callable[[], list[GaugeMetricFamily]]] = []

    def collect(self) -> list[GaugeMetricFamily]:
        return [family for source in self.sources for family in source()]


class Metrics:
    """The registry and a method for each event; children of labels are kept, so that a hot event is a dict look-up.

    `aside` has what is still to be counted.
    """

    def __init__(self) -> None:
        self.aside = Aside()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._live = _Live()
        registry.register(self._live)
        self._add_requests()
        self._add_workers()
        for way in SHARD_WAYS:
            self.shards.labels(way)
        for reason in REJECTIONS:
            self.rejected.labels(reason)
        for reason in RESTARTS:
            self.restarts.labels(reason)
        self._stages = {name: self.stage.labels(name) for name in STAGES}
        self._queue_wait = self.queue_wait.labels()
        self._batch_requests = self.batch_requests.labels()
        self._requests: dict[tuple[str, int], Counter] = {}
        self._durations: dict[str, Series] = {}
        self._placements: dict[tuple[int, str], Counter] = {}
        self._active: set[tuple[str, str]] = set()
        self._choices: dict[tuple[str, str], Counter] = {}

    def _add_requests(self) -> None:
        """What requests and their products do."""
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        traced = partial(histogram, trace=sampled_trace)
        self.requests = counter("gemm_requests", "Requests answered.", ["route", "code"])
        self.duration = traced(
            "gemm_request_duration_seconds",
            "From the first byte of a request to the last of its reply.",
            ["route"],
            buckets=_DURATIONS,
        )
        self.queue_wait = traced(
            "gemm_queue_wait_seconds", "From acceptance to the hand-over to a worker.", buckets=_FINE
        )
        self.stage = traced(
            "gemm_stage_seconds", "Time in each stage of a request.", ["stage"], buckets=_FINE
        )
        self.flops = counter("gemm_flops", "Floating-point operations done, 2·M·N·K a product.", ["variant"])
        self.kernel_busy = counter(
            "gemm_kernel_busy_seconds", "Seconds in which kernels of a variant ran.", ["variant"]
        )
        self.batch_requests = histogram("gemm_batch_requests", "Requests in a batch.", buckets=_SIZES)
        self.rejected = counter("gemm_rejected", "Requests refused, by reason.", ["reason"])
        self.choices = counter("gemm_variant_choices", "Choices of the selector.", ["variant", "reason"])
        self.shards = counter(
            "gemm_shards_bytes", "Bytes of operands of sharded products, by how ranks had them.", ["way"]
        )
        self.placements = counter(
            "gemm_placements", "Batches by worker and why it was chosen.", ["worker", "reason"]
        )

    def _add_workers(self) -> None:
        """What workers and their devices are."""
        gauge = partial(Gauge, registry=self.registry)
        self.restarts = Counter(
            "gemm_worker_restarts",
            "Workers started again, by the reason of the end.",
            ["reason"],
            registry=self.registry,
        )
        self.quarantined = gauge(
            "gemm_variant_quarantined", "1 for a variant that may not run.", ["variant", "reason"]
        )
        self.build_info = gauge("gemm_build_info", "Versions, as labels.", ["version", "device", "backend"])
        self.probe_up = gauge(
            "gemm_tensor_probe_up", "1 where tensor-core activity can be read from the hardware.", ["gpu"]
        )
        self.tensor_active = gauge(
            "gemm_tensor_active_ratio",
            "Fraction of cycles in which tensor cores were active, read from the hardware.",
            ["gpu", "source"],
        )
        self.sm_clock = gauge("gemm_sm_clock_hertz", "SM clock as read beside it.", ["gpu"])
        self.device_bytes = gauge(
            "gemm_device_bytes",
            "Device memory by state: copies of stored tensors, those that are nowhere else, what torch reserved.",
            ["gpu", "state"],
        )

    def request(self, route: str, code: int, seconds: float) -> None:
        """A request was answered (code 499: the client left first)."""
        key = (route, code)
        counter = self._requests.get(key)
        if counter is None:
            counter = self._requests[key] = self.requests.labels(route, str(code))
            if route not in self._durations:
                self._durations[route] = self.duration.labels(route)
        counter.inc()
        self._durations[route].observe(seconds)

    def took(self, stage: str, seconds: float, trace: str | None = None) -> None:
        """A stage took `seconds`, for a request of `trace`; by default that of this context."""
        self._stages[stage].observe(seconds, trace)

    def waited(self, seconds: float, trace: str) -> None:
        """A product waited in the queue, which is the stage "batch"."""
        self._queue_wait.observe(seconds, trace)
        self._stages["batch"].observe(seconds, trace)

    def batched(self, requests: int) -> None:
        """A batch of so many was sent."""
        self._batch_requests.observe(requests)

    def reject(self, code: str) -> None:
        """A request was refused with a code of service.errors."""
        self.rejected.labels(code if code in REJECTIONS else "other").inc()

    def choice(self, variant: str, reason: str) -> None:
        """The selector chose `variant` for `reason`."""
        counter = self._choices.get((variant, reason))
        if counter is None:
            counter = self._choices[variant, reason] = self.choices.labels(variant, reason)
        counter.inc()

    def placed(self, worker: int, reason: str) -> None:
        """A batch went to `worker` for `reason`."""
        key = (worker, reason)
        counter = self._placements.get(key)
        if counter is None:
            counter = self._placements[key] = self.placements.labels(str(worker), reason)
        counter.inc()

    def unread(self, gpu: str) -> None:
        """Tensor-core activity of this GPU can't be read: its series is absent."""
        for labels in [key for key in self._active if key[0] == gpu]:
            self.tensor_active.remove(*labels)
            self._active.discard(labels)

    def active(self, gpu: str, source: str, ratio: float) -> None:
        """Tensor-core activity as the hardware counted it."""
        self._active.add((gpu, source))
        self.tensor_active.labels(gpu, source).set(ratio)

    def quarantine(self, outcomes: Mapping[str, str]) -> None:
        """The variants that may not run now, each with its reason (see QUARANTINES)."""
        self.quarantined.clear()
        for variant, reason in outcomes.items():
            self.quarantined.labels(variant, reason if reason in QUARANTINES else "fault").set(1)

    def live(
        self,
        name: str,
        text: str,
        read: Callable[[], float | Mapping[str, float]],
        label: str = "",
        **constant: str,
    ) -> None:
        """Register a gauge that is read when scraped; a mapping gives one sample a value of `label`.

        `constant` labels stand on every sample of a mapping.
        """

        def source() -> list[GaugeMetricFamily]:
            value = read()
            if isinstance(value, Mapping):
                family = GaugeMetricFamily(name, text, labels=[label, *constant])
                for key, number in value.items():
                    family.add_metric([key, *constant.values()], number)
            else:
                family = GaugeMetricFamily(name, text, value=value)
            return [family]

        self._live.sources.append(source)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their Content-Type: OpenMetrics, with exemplars, where `accept` names it, else plain text."""
        self.aside.give()
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
