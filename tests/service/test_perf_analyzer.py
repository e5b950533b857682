"""NVIDIA's perf_analyzer against a real service: every way that it knows to hand tensors over.

It is a C++ client, which reads replies more strictly than tritonclient does in Python. `make perf-analyzer` installs
it; where it isn't, or can't run, these tests are skipped.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.real import ROOT, Service, running

FOLDER = ROOT / ".perf"
PROGRAM = shutil.which("perf_analyzer") or str(FOLDER / "bin" / "perf_analyzer")
#: The runtime of CUDA that it is linked with, GPU or none.
ENVIRON = {**os.environ, "LD_LIBRARY_PATH": str(FOLDER / "nvidia" / "cuda_runtime" / "lib")}
#: Few requests, and never called unstable.
SHORT = [
    "--measurement-mode",
    "count_windows",
    "--measurement-request-count",
    "20",
    "-s",
    "999",
    "--concurrency-range",
    "3",
    "-v",
]


def runs() -> bool:
    try:
        return not subprocess.run(
            [PROGRAM, "--version"], env=ENVIRON, capture_output=True, check=False
        ).returncode
    except OSError:
        return False


pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not runs(), reason="needs perf_analyzer (make perf-analyzer)"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    shared = (
        "--shared-memory",
        "--shared-memory-keys",
        "*",
        "--grpc-port",
        "0",
    )  # it names its regions itself
    with running(tmp_path_factory.mktemp("perf"), *shared, "--log-level", "warning") as one:
        yield one.ready()


def written(folder: Path, m: int, k: int, n: int) -> Path:
    """A file of A and B; C and bias are left out. What D is it can't be told for outputs of any shape."""
    path = folder / "data.json"
    tensors = {
        name: {"shape": list(shape), "content": [1.5] * (shape[0] * shape[1])}
        for name, shape in (("A", (m, k)), ("B", (k, n)))
    }
    path.write_text(json.dumps({"data": [tensors]}))
    return path


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("", "fp32"),
        ("--async", "fp64"),
        # Not fp64: for it the client allocates half of what it writes of a reply's numbers.
        ("--input-tensor-format json --output-tensor-format json", "fp32"),
        ("--shared-memory system --output-shared-memory-size 4096", "fp64"),
        ("-i grpc", "fp64"),
        ("-i grpc --async", "fp32"),
        ("-i grpc --streaming", "fp64"),
        ("-i grpc --shared-memory system --output-shared-memory-size 4096", "fp32"),
    ],
)
def test_each_way_is_answered(service: Service, tmp_path: Path, way: str, dtype: str) -> None:
    model = f"gemm_{dtype}"

    def counted(part: str) -> int:
        document = service.http.get(f"/v2/models/{model}/stats").json()
        count: int = document["model_stats"][0]["inference_stats"][part]["count"]
        return count

    told = re.search(r"speaks gRPC on port (\d+)", service.output)
    assert told, service.output
    address = f"127.0.0.1:{told[1]}" if "grpc" in way else service.url.removeprefix("http://")
    if "shared-memory" in way:  # it then leaves nothing out
        inputs = [word for shape in ("A:6,5", "B:5,4", "C:6,4", "bias:4") for word in ("--shape", shape)]
    else:
        # Of numbers in JSON it sends the first row only, so there A and B have no other.
        inputs = ["--input-data", str(written(tmp_path, *((1, 1, 4) if "json" in way else (6, 5, 4))))]
    report = tmp_path / "report.csv"
    arguments = ["-m", model, "-u", address, "-f", str(report), *inputs, *SHORT, *way.split()]
    before = counted("success")
    ran = subprocess.run(
        [PROGRAM, *arguments], env=ENVIRON, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    with report.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["Inferences/Second"]) > 0
    assert counted("success") >= before + 60  # three windows of 20
    assert counted("fail") == 0
