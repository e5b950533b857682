"""cuBLAS: estimates against what was measured, without a GPU or torch; torch's settings of it are put back."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.cublas import Cublas
from kernels.device import H200
from kernels.problem import DType, Problem

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def _measured() -> dict[str, tuple[Problem, float]]:
    """Shapes of the suite, with the seconds of the faster library."""
    found = {}
    for name in ("suite.json", "suite-rows.json"):
        rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text())["rows"]
        for row in rows:
            p = row["problem"]
            problem = Problem(
                p["m"], p["n"], p["k"], p["batch"], trans_b=p["layout"] == "nt", batch_invariant=False
            )
            if row["timing"] == "sustained" and p["dtype"] == "fp16":
                found[f"{p['batch']}x{p['m']}x{p['n']}x{p['k']}"] = (
                    problem,
                    row["reference_seconds"]["median"],
                )
    return found


MEASURED = _measured()


@pytest.mark.parametrize("shape", MEASURED)
def test_an_estimate_is_near_what_was_measured(shape: str) -> None:
    problem, seconds = MEASURED[shape]
    ratio = Cublas().seconds(problem, H200) / seconds
    # 512³ is hardly more than a launch, and 4100 columns start at no 16 bytes.
    loose = problem.m == 512 or problem.k == 4100
    assert 0.9 < ratio < (1.4 if loose else 1.2)


def test_a_long_k_is_divided_where_tiles_are_few() -> None:
    rows = json.loads((RESULTS / "ladder.json").read_text())["rows"]
    (step2,) = [row for row in rows if row["variant"].startswith("step2")]
    problem = Problem(128, 128, 4096, trans_b=True, batch_invariant=False)
    assert Cublas().seconds(problem, H200) == pytest.approx(step2["reference_seconds"]["median"], rel=0.15)
    longer = Cublas().seconds(replace(problem, k=65536), H200)
    assert longer < 16 * Cublas().seconds(problem, H200)


@pytest.mark.parametrize("batch", [1, 3])
def test_equal_bits_never_cost_less_than_none(batch: int) -> None:
    for m, n, k in itertools.product(
        (1, 64, 255, 256, 300, 4096), (8, 256, 1000, 8192), (8, 500, 8192, 65536)
    ):
        for out in (DType.FP16, DType.FP32):
            plain = Problem(m, n, k, batch, out_dtype=out, batch_invariant=False)
            assert Cublas().seconds(replace(plain, batch_invariant=True), H200) > Cublas().seconds(
                plain, H200
            )


FLAGS = """
import sys
import torch
from kernels.cublas import _REDUCTIONS, exact_flags

settings = torch.backends.cuda.matmul


def told(ask):
    try:
        return ask()
    except RuntimeError:
        return "torch refuses to say"


def state():
    return [
        settings.fp32_precision,
        torch.backends.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        told(lambda: settings.allow_tf32),
        told(torch.get_float32_matmul_precision),
        *(getattr(settings, name) for name in _REDUCTIONS),
        settings.allow_bf16_reduced_precision_reduction_split_k,
    ]


exec(sys.argv[1])
before = state()
for tf32 in (False, True):
    with exact_flags(tf32=tf32):
        assert (settings.fp32_precision == "tf32") == tf32
        assert not any(getattr(settings, name) for name in _REDUCTIONS)
    assert state() == before, (state(), before)
exec(sys.argv[2])
assert settings.fp32_precision != "tf32"
"""


@pytest.mark.parametrize(
    ("user", "off"),
    [
        ("", ""),
        ("torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
        ("torch.set_float32_matmul_precision('high')", "settings.allow_tf32 = False"),
        ("settings.allow_tf32 = True", "settings.allow_tf32 = False"),
        ("settings.fp32_precision = 'tf32'", "settings.fp32_precision = 'ieee'"),
        ("torch.backends.fp32_precision = 'tf32'", "torch.backends.fp32_precision = 'ieee'"),
        ("settings.allow_bf16_reduced_precision_reduction = (False, False)", ""),
    ],
)
def test_flags_are_put_back_however_they_were_set(user: str, off: str) -> None:
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", FLAGS, user, off], check=True)
