"""Rules, alerts and the dashboard: valid, tested by promtool, and answered by a Prometheus that scrapes a service."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

from tests.service import watched_gpu
from tests.service.real import Service, raw, running

pytestmark = pytest.mark.ci

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
#: On a CPU these are absent by design: nothing there counts tensor cores, or has an SM clock.
ABSENT = ("gemm_tensor_active_ratio", "gemm_sm_clock_hertz", "gemm_flops_ratio")


def tool(name: str, *arguments: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} isn't installed: `make browser` (as root, on Debian) installs it"
    run = subprocess.run([path, *arguments], cwd=RULES, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_rules_are_valid_and_do_what_they_say() -> None:
    for config in ("prometheus.yml", "compose.yml", "compose.tls.yml"):
        assert "SUCCESS" in tool("promtool", "check", "config", config)
    assert "SUCCESS" in tool("promtool", "test", "rules", "tests.yml")


def test_every_alert_tells_what_to_do() -> None:
    alerts = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 8
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}, alert["alert"]
        assert alert["annotations"]["runbook"].startswith("1. ")
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["alert"] in (RULES / "tests.yml").read_text(), "no unit test"


def test_the_dashboard_is_in_grafanas_schema() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert not list(lost(DASHBOARD, known)), "fields that Grafana's model doesn't have"
    assert list(lost({"panels": [{"widht": 3}]}, known)) == ["/panels[0]/widht"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def lost(given: Any, known: Any, path: str = "") -> Iterator[str]:
    """Paths of what the model dropped or changed."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key in known:
                yield from lost(value, known[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(given, list):
        for at, (mine, theirs) in enumerate(zip(given, known, strict=False)):
            yield from lost(mine, theirs, f"{path}[{at}]")
    elif given != known:
        yield path


def test_panels_do_not_overlap() -> None:
    seen: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & seen, panel["title"]
        assert place["x"] + place["w"] <= 24
        seen |= cells


@contextlib.contextmanager
def prometheus(folder: Path, *targets: str) -> Iterator[httpx.Client]:
    """A Prometheus with the project's own configuration, which scrapes `targets` each second."""
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = list(targets)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = shutil.which("prometheus")
    assert path is not None, "prometheus isn't installed: `make browser` (as root, on Debian) installs it"
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [
            *(path, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
        ],
        stdout=log,
        stderr=log,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            yield client
    finally:
        process.terminate()
        process.wait(20)
        log.close()


def asked(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    reply = client.get("/api/v1/query", params={"query": query})
    assert reply.status_code == 200, (query, reply.text)
    found: list[dict[str, Any]] = reply.json()["data"]["result"]
    return found


def test_every_panel_has_data_from_a_real_service(service: Service, tmp_path: Path) -> None:
    x = np.ones((64, 64), np.float32)
    with prometheus(tmp_path, service.url.removeprefix("http://")) as client:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert service.gemm(x, x).status_code == 200
            time.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                if asked(client, "count_over_time(gemm_workers_ready[30s]) >= 8"):
                    break
        else:
            raise AssertionError((tmp_path / "log").read_text())
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")
                found = asked(client, query)
                if any(name in query for name in ABSENT):
                    assert not found, query
                else:
                    assert found, (panel["title"], query)
        flops = asked(client, "sum(gemm_flops_total)")[0]["value"][1]
        assert float(flops) >= 2 * 64**3
        assert float(asked(client, "sum(gemm_tensor_probe_up)")[0]["value"][1]) == 0
        groups = client.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert len(rules) == 17
        assert {rule["health"] for rule in rules} == {"ok"}, rules
        for rule in rules:
            if rule["type"] == "recording":
                assert asked(client, rule["name"]), rule["name"]
            else:
                assert rule["state"] == "inactive", rule["name"]


def test_every_panel_has_data_where_gpus_are_read(tmp_path: Path) -> None:
    """Stand-in GPUs by the real driver and probe: what a CPU leaves absent is there, and exemplars lead to traces."""
    pytest.importorskip("torch")
    flags = ("--device", "cuda", "--workers", "3", "--log-format", "json")
    trace = "c" * 32
    x = np.ones((64, 64), np.float16)
    request = raw(x, x)
    request["headers"]["traceparent"] = f"00-{trace}-{'b' * 16}-01"
    with (
        running(tmp_path / "data", *flags, environ=watched_gpu.environ(tmp_path / "gpu")) as service,
        prometheus(tmp_path, service.ready(90).url.removeprefix("http://")) as client,
    ):

        def there() -> bool:
            assert service.http.post("/gemm", **request).status_code == 200
            time.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                return bool(asked(client, "count_over_time(gemm_tensor_active_ratio{gpu='0'}[30s]) >= 6"))
            return False

        service.until(there, 60, "scraped")
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "10s").replace("$instance", ".*")
                assert asked(client, query), (panel["title"], query)
        read = {
            each["metric"]["gpu"]: float(each["value"][1])
            for each in asked(client, "gemm_tensor_active_ratio")
        }
        assert read == {"0": pytest.approx(0.81), "1": pytest.approx(0.625)}
        up = {each["metric"]["gpu"]: each["value"][1] for each in asked(client, "gemm_tensor_probe_up")}
        assert up == {"0": "1", "1": "1", "2": "0"}
        estimate = asked(client, "gemm_flops_ratio")
        assert {each["metric"]["peak"] for each in estimate} == {"datasheet"}
        assert len(estimate) == 3
        query = {"query": "gemm_stage_seconds_bucket", "start": time.time() - 60, "end": time.time()}
        found = client.get("/api/v1/query_exemplars", params=query).json()["data"]
        stages = {
            each["seriesLabels"]["stage"]
            for each in found
            if any(one["labels"]["trace_id"] == trace for one in each["exemplars"])
        }
        assert stages >= {"decode", "admit", "batch", "link", "copy_in", "kernel", "copy_out", "reply"}
        assert any(f'"trace_id":"{trace}"' in line for line in service.lines)


def test_every_metric_that_is_asked_for_exists() -> None:
    """Names in panels and rules are names that service/metrics.py or app.py register."""
    from service.app import build
    from service.settings import Settings

    text = json.dumps(DASHBOARD) + (RULES / "rules.yml").read_text() + (RULES / "alerts.yml").read_text()
    names = set(re.findall(r"(?<![:\w])gemm_[a-z_]+(?![:\w])", text)) - {"gemm_service"}
    services = build(Settings(arena_bytes=1 << 20, store_memory_bytes=1 << 19, workers=1))
    try:
        known = {family.name for family in services.metrics.registry.collect()}
    finally:
        services.arena.close()
    for name in names:
        stem = re.sub(r"_(total|bucket|sum|count)$", "", name)
        assert stem in known or name in known, name
