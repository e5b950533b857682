"""Manifests: valid against the schemas of Kubernetes, and true to what the service is."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.settings import OTHER_VARIABLES, PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "deploy/kubernetes/base"
OVERLAYS = sorted(path.parent for path in (ROOT / "deploy/kubernetes/overlays").glob("*/kustomization.yaml"))
KUBERNETES = "1.31"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rendered(overlay: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of an overlay, for the few features that these files use."""
    kustomization = load(overlay / "kustomization.yaml")
    base = (overlay / kustomization["resources"][0]).resolve()
    objects = [load(base / name) for name in load(base / "kustomization.yaml")["resources"]]
    labels = load(base / "kustomization.yaml")["labels"][0]["pairs"]
    for each in objects:
        each.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        if each["kind"] == "Service":
            each["spec"]["selector"] = dict(labels)
        if each["kind"] == "StatefulSet":
            each["spec"]["selector"] = {"matchLabels": dict(labels)}
            each["spec"]["template"].setdefault("metadata", {})["labels"] = dict(labels)
    for patch in kustomization.get("patches", []):
        target = next(o for o in objects if o["kind"] == patch["target"]["kind"])
        for operation in load(overlay / patch["path"]):
            apply(target, operation)
    return objects


def apply(document: Any, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902): add or replace."""
    *parents, last = [p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:]]
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    value = copy.deepcopy(operation["value"])
    if isinstance(document, list):
        assert operation["op"] == "add"
        document.append(value)
        return
    assert operation["op"] == "add" or last in document, operation["path"]
    document[last] = value


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_rendered_manifests_are_valid(overlay: Path) -> None:
    for each in rendered(overlay):
        if each["apiVersion"].startswith("monitoring.coreos.com"):
            continue  # a custom resource: its schema is the operator's
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_variable_is_a_setting(overlay: Path) -> None:
    (pod,) = [o["spec"]["template"]["spec"] for o in rendered(overlay) if o["kind"] == "StatefulSet"]
    for variable in pod["containers"][0]["env"]:
        name = variable["name"]
        assert name in OTHER_VARIABLES or name.removeprefix(PREFIX).lower() in Settings.model_fields, name


def test_the_gpu_overlays_ask_for_their_device() -> None:
    asked = {}
    for overlay in OVERLAYS:
        (pod,) = [o["spec"]["template"]["spec"] for o in rendered(overlay) if o["kind"] == "StatefulSet"]
        asked[overlay.name] = [
            k for k in pod["containers"][0]["resources"]["limits"] if k.startswith("nvidia.com/")
        ]
    assert asked == {"cpu": [], "gpu": ["nvidia.com/gpu"], "mig": ["nvidia.com/mig-1g.18gb"]}


def test_the_pod_outlives_the_grace_period() -> None:
    pod = load(BASE / "statefulset.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    grace = next(float(v["value"]) for v in container["env"] if v["name"] == "GEMM_GRACE_SECONDS")
    pre_stop = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > grace + pre_stop


def test_the_probes_ask_routes_that_exist() -> None:
    container = load(BASE / "statefulset.yaml")["spec"]["template"]["spec"]["containers"][0]
    info = (ROOT / "service/routes/info.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in info


def test_what_is_scaled_by_is_exported() -> None:
    query = load(ROOT / "deploy/keda/scaledobject.yaml")["spec"]["triggers"][0]["metadata"]["query"]
    (name,) = re.findall(r"gemm_\w+", query)
    assert f'"{name}"' in (ROOT / "service/supervisor.py").read_text()


def test_compose_builds_targets_that_the_dockerfile_has() -> None:
    compose = load(ROOT / "deploy/compose.yaml")
    assert {"gemm", "prometheus", "grafana"} <= set(compose["services"])
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {"cpu", "cuda"} <= set(targets)
