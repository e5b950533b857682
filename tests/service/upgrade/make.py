"""`python -m tests.service.upgrade.make CHECKOUT ARCHIVE`: runs an older checkout's service, hands on its data folder.

The folder has tensors, results and jobs; then the service is killed (-9) in the middle of a job, so that the
database's log and half-done work are there too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.service.real import raw, raw_tensor

#: Steps of the job that the kill interrupts.
STEPS = 40


def matrix(seed: int, rows: int = 16, columns: int = 16) -> np.ndarray:
    """Small whole numbers: products are exact in fp32."""
    return np.random.default_rng(seed).integers(-4, 5, (rows, columns)).astype(np.float32)


def chain() -> dict[str, Any]:
    """A job whose steps follow on one another: each multiplies by a permutation, so numbers stay small."""
    first = {"id": "s0", "a": matrix(7).tolist(), "b": {"handle": "turn"}}
    later = [{"id": f"s{n}", "a": {"step": f"s{n - 1}"}, "b": {"handle": "turn"}} for n in range(1, STEPS)]
    later[-1]["out"] = {"handle": "end"}
    return {"steps": [first, *later]}


def turn() -> np.ndarray:
    """A cyclic permutation."""
    return np.roll(np.eye(16, dtype=np.float32), 1, axis=1)


def fill(http: httpx.Client) -> None:
    """What the folder is to hold."""
    for name, value in (
        ("weight", matrix(1)),
        ("replaced", matrix(2)),
        ("replaced", matrix(3)),
        ("turn", turn()),
    ):
        http.put(f"/tensors/{name}", **raw_tensor(value)).raise_for_status()
    http.put("/tensors/gone", **raw_tensor(matrix(4))).raise_for_status()
    http.delete("/tensors/gone").raise_for_status()
    http.post("/gemm", **raw(matrix(5), "weight", out="handle:product", durable="true")).raise_for_status()
    steps = [{"id": "one", "a": matrix(6).tolist(), "b": {"handle": "weight"}, "out": {"handle": "made"}}]
    job = (
        http.post("/jobs", json={"steps": steps}, headers={"idempotency-key": "done"})
        .raise_for_status()
        .json()
    )
    assert http.get(f"/jobs/{job['id']}?wait=20").json()["state"] == "done"
    http.post("/jobs", json=chain(), headers={"idempotency-key": "cut"}).raise_for_status()


def main(checkout: Path, archive: Path) -> None:
    """Run, fill, kill, pack."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve", "--port", "0", "--data", data, "--backend", "numpy"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        url = next(
            found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        with httpx.Client(base_url=url, timeout=30) as http:
            while http.get("/health/ready").status_code != 200:
                time.sleep(0.1)
            fill(http)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with tarfile.open(archive, "w:xz") as packed:
            packed.add(data, "data", filter=_plain)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
