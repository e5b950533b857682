"""Drill: today's service takes over data folders that earlier versions left, killed in the middle of a job."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from benchmarks.drills.frame import check, drill
from tests.service import test_upgrade
from tests.service.real import running


@drill("upgrade-data-folder", seconds=120)
def upgrade() -> str:
    """Tensors and finished jobs are there, the interrupted job ends right, and the folder goes on being used."""
    check(test_upgrade.FOLDERS, "there is no data folder of an earlier version")
    told = []
    for archive in test_upgrade.FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            with running(Path(folder) / "data", *test_upgrade.KEEP) as service:
                test_upgrade.check(service.ready())
                jobs = service.http.get("/jobs").json()["jobs"]
                tensors = service.http.get("/tensors").json()["tensors"]
        told.append(
            f"folder of commit {archive.name.partition('.')[0]}: {len(jobs)} jobs, one of which the kill had cut off, "
            f"and {len(tensors)} tensors are right"
        )
    return "; ".join(told)
