"""The demo: right on the real service, and not content with a wrong answer."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from service import demo


def test_demo_runs_and_every_check_holds(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 0
    out = capfd.readouterr().out
    assert "All results are right." in out
    # JSON, safetensors, stored weight, and eight steps of a job.
    assert out.count("  right: ") == 11
    assert "gemm_flops_total" in out
    assert out.count("reason '") >= 4


def test_a_worker_that_stays_down_ends_the_demo_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMM_KERNELS", str(tmp_path))  # where nothing is built
    began = time.monotonic()
    with pytest.raises(SystemExit, match=r"stays down: the device needs a person: .*virtual GPU"):
        demo.main(["--device", "virtual"])
    assert time.monotonic() - began < 40


def test_a_wrong_result_ends_the_demo() -> None:
    a, b = demo.normal(8, 9), demo.normal(9, 7)
    demo.check("product", a @ b, a, b)
    wrong = a @ b
    wrong[3, 3] += 1e-3
    with pytest.raises(SystemExit, match="WRONG: product"):
        demo.check("product", wrong, a, b)
    with pytest.raises(SystemExit, match="WRONG: product has shape"):
        demo.check("product", wrong[:1], a, b)
    wrong[3, 3] = np.nan
    with pytest.raises(SystemExit, match="WRONG"):
        demo.check("product", wrong, a, b)
