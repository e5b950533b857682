"""Schemathesis asks a real service what its OpenAPI document allows; the answers must be as the document says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.real import running

CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("paths", "checks"),
    [
        ("^/(gemm|tensors|jobs|variants|limits|health|metrics)(?!.*events)", f"{CHECKS},not_a_server_error"),
        ("^/v2", CHECKS),  # here 501 and 503 are right answers: shared memory is off, models may be unloaded
    ],
)
def test_the_service_is_as_its_document_says(tmp_path: Path, paths: str, checks: str) -> None:
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", "--seed", "1", "--max-examples", "8"]
    command += ["--phases", "examples,fuzzing", "--checks", checks, "--include-path-regex", paths]
    with running(tmp_path / "data") as service:
        service.ready()
        ran = subprocess.run(
            [*command, f"{service.url}/openapi.json"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-1000:]
        service.ready()
