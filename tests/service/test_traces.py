"""Traces: what a collector receives, over real HTTP, of requests through the gate."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service import traces
from service.client import Client
from service.metrics import STAGES
from service.settings import SettingsError, load
from tests.service.real import Service, raw, running
from tests.service.test_gate import app_with

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans as OTLP's protobuf."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.paths: set[str] = set()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        collector: Any = self.server
        collector.paths.add(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                collector.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Be quiet."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


async def test_spans_of_a_request_and_its_stages(collector: Collector) -> None:
    app = app_with(load({"otel_endpoint": f"http://127.0.0.1:{collector.server_address[1]}"}, environ={}))
    messages: list[Any] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    transport = httpx.ASGITransport(app)

    async def receive() -> Any:
        if len(messages) == 1:  # started: make requests, then shut down
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                sampled = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
                assert (await client.post("/gemm", headers=sampled)).status_code == 200
                unsampled = {"traceparent": f"00-{'c' * 32}-{'d' * 16}-00"}
                await client.post("/gemm", headers=unsampled)
                await client.get("/health/live")
                assert (await client.get("/fail/bug")).status_code == 500
        return messages.pop(0)

    async def send(message: Any) -> None:
        assert message["type"].endswith(".complete")

    await app({"type": "lifespan", "state": {}}, receive, send)
    assert collector.paths == {"/v1/traces"}
    by_name = {span.name: span for span in collector.spans}
    assert set(by_name) == {"POST /gemm", "decode", "GET /fail/{how}"}
    request, stage, failed = by_name["POST /gemm"], by_name["decode"], by_name["GET /fail/{how}"]
    assert request.trace_id.hex() == stage.trace_id.hex() == "a" * 32
    assert request.parent_span_id.hex() == "b" * 16
    assert stage.parent_span_id == request.span_id
    assert stage.end_time_unix_nano - stage.start_time_unix_nano == 500_000_000
    assert request.start_time_unix_nano <= request.end_time_unix_nano
    assert not failed.parent_span_id
    assert failed.status.code == 2  # error


@pytest.mark.parametrize("way", ["http", "grpc", "local"])
def test_a_product_of_a_real_service_leaves_a_span_for_each_stage(
    collector: Collector, tmp_path: Path, way: str
) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
    x = np.eye(64, dtype=np.float32)
    flags = ("--otel-endpoint", endpoint, "--log-format", "json", "--grpc-port", "0")
    with running(tmp_path, *flags) as service:
        service.ready()
        ask(service, way, x)
        assert service.stop() == 0  # what is left is sent then
    roots = [span for span in collector.spans if span.name in NAMES[way]]
    (root,) = roots
    inner = {span.name: span for span in collector.spans if span.parent_span_id == root.span_id}
    assert [stage for stage in STAGES if stage in inner] == list(inner)
    assert set(inner) >= {"decode", "admit", "batch", "link", "kernel"}
    for span in inner.values():
        assert span.trace_id == root.trace_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    lines = [json.loads(line) for line in service.lines if '"event":"request"' in line]
    (line,) = [line for line in lines if line["trace_id"] == root.trace_id.hex()]
    assert {f"{stage}_seconds" for stage in inner} <= set(line)
    if way != "local":  # whose protocol carries no trace
        assert root.trace_id.hex() == "a" * 32
        assert root.parent_span_id.hex() == "b" * 16


NAMES = {"http": {"POST /gemm"}, "grpc": {"grpc/ModelInfer"}, "local": {"local"}}
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


def ask(service: Service, way: str, x: Any) -> None:
    """One product."""
    if way == "http":
        request = raw(x, x)
        request["headers"]["traceparent"] = CALLER
        assert service.http.post("/gemm", **request).status_code == 200
    elif way == "local":
        with Client(service.url) as client:
            near = client.empty(x.shape, x.dtype)
            near[:] = x
            client.gemm(near, x)
    else:
        triton = pytest.importorskip("tritonclient.grpc")
        (port,) = {match[1] for line in service.lines if (match := re.search(r"gRPC on port (\d+)", line))}
        inputs = [triton.InferInput(name, [64, 64], "FP32") for name in "AB"]
        for each in inputs:
            each.set_data_from_numpy(x)
        with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
            client.infer("gemm_fp32", inputs, headers={"traceparent": CALLER})


def test_without_the_extra_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(SettingsError, match=r"otel_endpoint = .*gemm-service\[otel\]"):
        traces.Tracer("http://127.0.0.1:4318")
