"""The Prometheus operator's object with the rules and alerts of deploy/prometheus: `make rules` writes it again.

Kustomize can't make it: it reads no file above a component's folder, and makes no object of one that isn't Kubernetes'.
"""

from __future__ import annotations

from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
FILE = DEPLOY / "kubernetes/components/monitoring/rules.yaml"
_HEADER = (
    "# Rules and alerts of deploy/prometheus for its operator, word for word: `make rules` writes this.\n"
)


def text() -> str:
    """What FILE is to hold."""
    groups = [
        group | {"name": f"{group['name']}-{name}"}
        for name in ("rules", "alerts")
        for group in yaml.safe_load((DEPLOY / "prometheus" / f"{name}.yml").read_text())["groups"]
    ]
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "gemm"},
        "spec": {"groups": groups},
    }
    return _HEADER + yaml.safe_dump(rule, sort_keys=False, allow_unicode=True, width=110)


if __name__ == "__main__":
    FILE.write_text(text())
