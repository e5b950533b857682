"""The benchmark of ways to hand operands over, in small: every way computes the product, and the picture is drawn."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from benchmarks import figures, record, transport
from benchmarks.load import free_port, served
from benchmarks.serving import ours


@pytest.mark.ci
def test_every_way_is_measured_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, run = free_port(), f"gemm-bench-{secrets.token_hex(6)}"
    flags = ("--shared-memory", "--shared-memory-keys", run)
    with served(ours(port, tmp_path / "data", *flags), f"http://127.0.0.1:{port}/health/ready"):
        rows = transport.measure(port, run, 4096, 2)
    assert [row["name"] for row in rows if "goal" not in row] == [
        transport.IN_PLACE,
        transport.COPIED,
        transport.HTTP,
        transport.TRITON_SHARED,
        transport.TRITON,
        transport.ALONE,
    ]
    assert [row["goal"] for row in rows if "goal" in row] == [8.0, 3.0, 4.0, 5.0]
    assert not (Path("/dev/shm") / run).exists()
    record.write("cpu", "transport", rows, details=record.cpu_machine(), packages=(), folder=tmp_path / "cpu")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    ((_, told, _),) = figures.transport()
    assert "the rate of tritonclient over HTTP" in told
    pytest.importorskip("matplotlib")
    transport.draw(rows, tmp_path / "transport.png")
    assert (tmp_path / "transport.png").stat().st_size > 1000
