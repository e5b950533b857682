"""Manifests: valid against the schemas of Kubernetes, and true to what the service is."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kernels.device_file import DeviceFile
from service.settings import OTHER_VARIABLES, PREFIX, Settings, parse_bytes
from tests import operator_rules
from tests.build_context import let_through

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "deploy/kubernetes/base"
OVERLAYS = sorted(path.parent for path in (ROOT / "deploy/kubernetes/overlays").glob("*/kustomization.yaml"))
KUBERNETES = "1.31"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rendered(overlay: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` makes of a folder, for the few features that these files use."""
    kustomization = load(overlay / "kustomization.yaml")
    objects: list[dict[str, Any]] = []
    for name in kustomization.get("resources", ()):
        path = (overlay / name).resolve()
        objects += rendered(path) if path.is_dir() else [load(path)]
    for labels in kustomization.get("labels", ()):
        for each in objects:
            label(each, labels["pairs"])
    for component in kustomization.get("components", ()):
        folder = (overlay / component).resolve()
        objects += [load(folder / name) for name in load(folder / "kustomization.yaml").get("resources", ())]
        patch(objects, folder)
    patch(objects, overlay)
    for image in kustomization.get("images", ()):
        name_image(objects, image)
    return objects


def label(each: dict[str, Any], labels: dict[str, str]) -> None:
    """Labels with includeSelectors."""
    each.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    if each["kind"] == "Service":
        each["spec"]["selector"] = dict(labels)
    if each["kind"] == "StatefulSet":
        each["spec"]["selector"] = {"matchLabels": dict(labels)}
        each["spec"]["template"].setdefault("metadata", {})["labels"] = dict(labels)
        for claim in each["spec"]["volumeClaimTemplates"]:
            claim["metadata"]["labels"] = dict(labels)
    if each["kind"] == "NetworkPolicy":
        each["spec"]["podSelector"].setdefault("matchLabels", {}).update(labels)


def identity(each: dict[str, Any]) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def patch(objects: list[dict[str, Any]], folder: Path) -> None:
    """The JSON patches of a kustomization, each on the object that it targets."""
    for each in load(folder / "kustomization.yaml").get("patches", ()):
        wanted = (each["target"]["kind"], each["target"]["name"])
        target = next(o for o in objects if identity(o) == wanted)
        for operation in load(folder / each["path"]):
            apply(target, operation)


def name_image(objects: list[dict[str, Any]], image: dict[str, str]) -> None:
    """Another name, tag or digest for an image."""
    for each in objects:
        for container in each["spec"].get("template", {}).get("spec", {}).get("containers", ()):
            name, _, tag = container["image"].partition(":")
            if name == image["name"]:
                end = f"@{image['digest']}" if "digest" in image else f":{image.get('newTag', tag)}"
                container["image"] = image.get("newName", name) + end


def apply(document: Any, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902): add or replace."""
    *parents, last = [p.replace("~1", "/").replace("~0", "~") for p in operation["path"].split("/")[1:]]
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    value = copy.deepcopy(operation["value"])
    if isinstance(document, list):
        if operation["op"] == "replace":
            document[int(last)] = value
        else:
            assert (operation["op"], last) == ("add", "-")
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
        if "fieldRef" in variable.get("valueFrom", {}):
            continue  # for other variables to name
        assert name in OTHER_VARIABLES or name.removeprefix(PREFIX).lower() in Settings.model_fields, name


def test_the_gpu_overlays_ask_for_their_device() -> None:
    asked = {}
    for overlay in OVERLAYS:
        (pod,) = [o["spec"]["template"]["spec"] for o in rendered(overlay) if o["kind"] == "StatefulSet"]
        asked[overlay.name] = [
            k for k in pod["containers"][0]["resources"]["limits"] if k.startswith("nvidia.com/")
        ]
    gpu = ["nvidia.com/gpu"]
    mig = ["nvidia.com/mig-1g.18gb"]
    assert asked == {"cpu": [], "gpu": gpu, "mig": mig, "release": gpu, "replicas": []}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl isn't there")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kustomize_renders_the_same(overlay: Path) -> None:
    command = ["kubectl", "kustomize", str(overlay)]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    theirs = {identity(each): each for each in yaml.safe_load_all(text)}
    assert theirs == {identity(each): each for each in rendered(overlay)}


def test_the_release_names_its_image_by_digest_and_speaks_tls() -> None:
    release = {each["kind"]: each for each in rendered(ROOT / "deploy/kubernetes/overlays/release")}
    (container,) = release["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(r"registry\.example/gemm-service@sha256:[0-9a-f]{64}", container["image"])
    environ = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    for name in ("GEMM_TLS_CERT", "GEMM_TLS_KEY", "GEMM_TLS_CLIENT_CA"):
        assert str(Path(environ[name]).parent) in mounts
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["metrics"] == int(environ["GEMM_METRICS_PORT"])
    # Neither probes nor Prometheus have a client certificate.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert [e["port"] for e in release["ServiceMonitor"]["spec"]["endpoints"]] == ["metrics"]


def test_more_than_one_replica_shares_store_and_journal() -> None:
    for overlay in OVERLAYS:
        objects = rendered(overlay)
        (stateful,) = [each for each in objects if each["kind"] == "StatefulSet"]
        container = stateful["spec"]["template"]["spec"]["containers"][0]
        environ = {each["name"]: each.get("value", "from a secret") for each in container["env"]}
        shares = {"GEMM_STORE", "GEMM_JOURNAL"} <= set(environ)
        assert (stateful["spec"]["replicas"] > 1) == shares == (overlay.name == "replicas"), overlay
        if not shares:
            continue
        assert Settings(store=environ["GEMM_STORE"], journal="postgresql://host/database").store
        (policy,) = [each for each in objects if each["kind"] == "NetworkPolicy"]
        ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert {53, 5432, 443} <= ports
        headless, any_pod = sorted(
            (each for each in objects if each["kind"] == "Service"), key=lambda each: each["metadata"]["name"]
        )
        assert headless["spec"]["clusterIP"] == "None"
        assert "clusterIP" not in any_pod["spec"]
        pod_labels = stateful["spec"]["template"]["metadata"]["labels"]
        assert any_pod["spec"]["selector"].items() <= pod_labels.items()


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_a_pod_answers_under_every_name_that_its_services_give_it(overlay: Path) -> None:
    objects = rendered(overlay)
    (stateful,) = [each for each in objects if each["kind"] == "StatefulSet"]
    environ = {
        each["name"]: each.get("value", "")
        for each in stateful["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    hosts = (
        environ["GEMM_HOSTS"].replace("$(POD_NAME)", "gemm-2").replace("$(POD_NAMESPACE)", "ns").split(",")
    )
    services = [each["metadata"]["name"] for each in objects if each["kind"] == "Service"]
    names = [*services, "gemm-2.gemm"]
    suffixes = ("", ".ns", ".ns.svc", ".ns.svc.cluster.local")
    wanted = {name + suffix for name in names for suffix in suffixes}
    assert set(hosts) == wanted
    assert len(hosts) == len(wanted)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_each_pod_is_scraped_once_as_the_alerts_know_it(overlay: Path) -> None:
    objects = rendered(overlay)
    (monitor,) = [each for each in objects if each["kind"] == "ServiceMonitor"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        each["metadata"]["name"]
        for each in objects
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    assert scraped == ["gemm"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {"targetLabel": "job", "replacement": "gemm-service"} in endpoint["relabelings"]
    assert 'up{job="gemm-service"}' in (ROOT / "deploy/prometheus/alerts.yml").read_text()


def test_the_operators_rules_are_prometheus_own() -> None:
    assert operator_rules.FILE.read_text() == operator_rules.text(), "`make rules` writes it"
    rule = load(operator_rules.FILE)
    own = [
        group["rules"]
        for name in ("rules.yml", "alerts.yml")
        for group in load(ROOT / "deploy/prometheus" / name)["groups"]
    ]
    assert [group["rules"] for group in rule["spec"]["groups"]] == own
    names = [group["name"] for group in rule["spec"]["groups"]]
    assert len(names) == len(set(names))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl isn't there")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_any_overlay_takes_the_component_of_rules(overlay: Path, tmp_path: Path) -> None:
    kustomization = {
        "resources": [os.path.relpath(overlay, tmp_path)],
        "components": [os.path.relpath(operator_rules.FILE.parent, tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    command = ["kubectl", "kustomize", str(tmp_path)]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    objects = [(identity(each), each) for each in yaml.safe_load_all(text)]
    assert dict(objects)["PrometheusRule", "gemm"] == load(operator_rules.FILE)
    assert len(objects) == len(rendered(overlay)) + 1


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.tls.yaml")], ids=len)
def test_what_compose_mounts_is_there_and_prometheus_asks_the_service(files: tuple[str, ...]) -> None:
    services: dict[str, Any] = {}
    for name in files:
        for service, told in load(ROOT / "deploy" / name)["services"].items():
            services[service] = services.get(service, {}) | told
    (config,) = [each for each in services["prometheus"]["command"] if each.startswith("--config.file=")]
    file = ROOT / "deploy/prometheus" / Path(config.partition("=")[2]).name
    (scrape,) = load(file)["scrape_configs"]
    assert scrape["job_name"] == "gemm-service"
    (target,) = [target for each in scrape["static_configs"] for target in each["targets"]]
    port = services["gemm"]["environment"].get("GEMM_METRICS_PORT", "8000")
    assert target == f"gemm:{port}"
    assert f"./prometheus:{Path(config.partition('=')[2]).parent}:ro" in services["prometheus"]["volumes"]
    assert all((file.parent / name).is_file() for name in load(file)["rule_files"])
    # Asked by that name, the service has to know it.
    assert "gemm" in load(ROOT / "deploy/compose.yaml")["services"]["gemm"]["environment"][
        "GEMM_HOSTS"
    ].split(",")
    for mount in services["grafana"]["volumes"]:
        assert (ROOT / "deploy" / mount.split(":")[0]).exists(), mount
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = load(provisioning / "datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = load(provisioning / "dashboards/gemm.yaml")["providers"]
    targets = [mount.split(":")[1] for mount in services["grafana"]["volumes"]]
    assert any(target.startswith(provider["options"]["path"]) for target in targets)


def test_a_build_is_sent_what_the_dockerfile_copies() -> None:
    folders = ("service", "kernels", "benchmarks", "deploy", "tests")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    sent = let_through(str(path.relative_to(ROOT)) for path in paths if path.is_file() or path.is_symlink())
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    for name in names:
        assert any(each == name or each.startswith(f"{name}/") for each in sent), name
    assert all(each.startswith(tuple(names)) for each in sent)
    assert not any("__pycache__" in each for each in sent)
    # The page's link is whole in the image: what it leads to is copied as well, and only the ladder of it.
    link = ROOT / "service/page/results"
    assert "service/page/results" in sent
    assert str(link.resolve().relative_to(ROOT)) in names
    results = [each for each in sent if each.startswith("benchmarks/")]
    assert results
    assert {Path(each).name for each in results} == {"ladder.json"}


def test_the_images_hold_what_replicas_and_traces_need() -> None:
    installs = re.findall(
        r"pip install -c constraints\.txt .*'\.\[(\S+)\]'", (ROOT / "Dockerfile").read_text()
    )
    assert sum({"cluster", "otel"} <= set(extras.split(",")) for extras in installs) == 2


def test_compose_with_tls_sets_what_the_service_knows() -> None:
    environ = load(ROOT / "deploy/compose.tls.yaml")["services"]["gemm"]["environment"]
    for name in environ:
        assert name.removeprefix(PREFIX).lower() in Settings.model_fields, name


def test_who_reads_a_secret_in_the_container_is_said_and_git_ignores_secrets() -> None:
    (user,) = re.findall(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    secret = load(ROOT / "deploy/compose.yaml")["secrets"]["keys.json"]["file"]
    assert f"chown {user} deploy/keys.json" in (ROOT / "deploy/compose.yaml").read_text()
    assert f"chown {user} deploy/tls/tls.key" in (ROOT / "deploy/compose.tls.yaml").read_text()
    assert f"chown {user} deploy/keys.json" in (ROOT / "deploy/README.md").read_text()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {f"/deploy/{Path(secret).name}", "/deploy/tls/"} <= set(ignored)


def test_the_namespaces_that_may_connect_are_labelled_as_the_readme_says() -> None:
    (rule,) = load(BASE / "network.yaml")["spec"]["ingress"]
    assert {"podSelector": {}} in rule["from"]  # its own namespace
    labels = [
        f"{name}={value}"
        for each in rule["from"]
        for name, value in each.get("namespaceSelector", {}).get("matchLabels", {}).items()
    ]
    told = re.findall(
        r"^kubectl label namespace \w+ (\S+)$", (ROOT / "deploy/README.md").read_text(), re.MULTILINE
    )
    assert told == labels


def test_the_store_leaves_room_on_its_volume() -> None:
    stateful = load(BASE / "statefulset.yaml")["spec"]
    (claim,) = stateful["volumeClaimTemplates"]
    predictor = load(ROOT / "deploy/kserve/inferenceservice.yaml")["spec"]["predictor"]
    (folder,) = [volume["emptyDir"] for volume in predictor["volumes"] if volume["name"] == "data"]
    for container, size in (
        (stateful["template"]["spec"]["containers"][0], claim["spec"]["resources"]["requests"]["storage"]),
        (predictor["containers"][0], folder["sizeLimit"]),
    ):
        environ = {each["name"]: each.get("value") for each in container["env"]}
        budget = Settings.model_validate({"store_disk_bytes": environ["GEMM_STORE_DISK_BYTES"]})
        assert budget.store_disk_bytes < parse_bytes(f"{size}B")


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
    arguments = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(compose["services"]["gemm"]["build"]["args"]) <= set(arguments)


def test_what_the_image_keeps_of_self_tests_is_read_again(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text()
    cuda = text.partition(" AS cuda\n")[2]
    (cache,) = re.findall(r"\bGEMM_CACHE=(\S+)", cuda)
    (mode, data) = re.findall(r"install -d -o 10001 -g 0 -m (\d+) (\S+)", text)[0]
    assert Path(cache).parent == Path(data)
    volume = tmp_path / "data"
    volume.mkdir()
    volume.chmod(int(mode, 8))
    kept = DeviceFile(volume / Path(cache).name, "selftest", "device", "build")
    kept.update(lambda known: {**known, "step9": "passed"})
    assert kept.read() == {"step9": "passed"}


def test_torch_s_own_index_is_asked_beside_the_one_of_all_else() -> None:
    for name in ("Dockerfile", "deploy/README.md"):
        (option,) = re.findall(r'TORCH_ARGS="(\S+) INDEX"', (ROOT / name).read_text())
        assert option == "--extra-index-url", name


#: What KServe's v1beta1 CRD adds to a Pod's spec in `predictor`, as far as it is used here.
PREDICTOR = {"minReplicas": int, "maxReplicas": int, "timeout": int, "autoScaling": dict}


def test_the_inference_service_is_a_valid_pod_with_kserves_own_fields() -> None:
    document = load(ROOT / "deploy/kserve/inferenceservice.yaml")
    assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert set(document["spec"]) == {"predictor"}
    predictor = document["spec"]["predictor"]
    own = {name: predictor.pop(name) for name in PREDICTOR}
    assert all(isinstance(value, PREDICTOR[name]) for name, value in own.items())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gemm"}, "spec": predictor}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    (container,) = predictor["containers"]
    # The names by which KServe finds the container and its HTTP port.
    assert (container["name"], container["ports"][0]["name"]) == ("kserve-container", "http1")
    (metric,) = own["autoScaling"]["metrics"]
    keda = load(ROOT / "deploy/keda/scaledobject.yaml")["spec"]["triggers"][0]["metadata"]
    assert metric["external"]["metric"]["query"] == keda["query"]
    assert metric["external"]["target"]["averageValue"] == keda["threshold"]
    for variable in container["env"]:
        assert variable["name"].removeprefix(PREFIX).lower() in Settings.model_fields


def test_the_inference_service_s_probes_are_open_routes_of_the_protocol() -> None:
    (container,) = load(ROOT / "deploy/kserve/inferenceservice.yaml")["spec"]["predictor"]["containers"]
    routes = (ROOT / "service/routes/inference.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        assert path.startswith("/v2/health/")  # without a key
        assert f'"{path.removeprefix("/v2")}"' in routes
