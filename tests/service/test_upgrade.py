"""An upgrade: today's service on a data folder that an earlier version left, killed in the middle of a job."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.service.real import Service, result, running
from tests.service.upgrade.make import STEPS, matrix, turn

pytestmark = pytest.mark.ci
FOLDERS = sorted((Path(__file__).parent / "upgrade").glob("*.tar.xz"))
#: The folders are old: what they hold of jobs hasn't expired.
KEEP = ("--result-ttl-seconds", "1e10")
ACCEPT = {"accept": "application/octet-stream"}


def tensor(service: Service, name: str) -> np.ndarray:
    return result(service.http.get(f"/tensors/{name}", headers=ACCEPT))


def check(service: Service) -> None:
    """Everything that was durable is there; the interrupted job ends right; the rest works."""
    listed = [entry["name"] for entry in service.http.get("/tensors").json()["tensors"]]
    assert set(listed) - {"end"} == {"made", "product", "replaced", "turn", "weight"}
    np.testing.assert_array_equal(tensor(service, "weight"), matrix(1))
    np.testing.assert_array_equal(tensor(service, "replaced"), matrix(3))
    np.testing.assert_array_equal(tensor(service, "product"), matrix(5) @ matrix(1))
    np.testing.assert_array_equal(tensor(service, "made"), matrix(6) @ matrix(1))
    assert service.http.get("/tensors/gone").status_code == 404

    jobs = service.http.get("/jobs").json()["jobs"]
    assert len(jobs) == 2
    for job in jobs:
        told = service.until(
            lambda id_=job["id"]: (
                (d := service.http.get(f"/jobs/{id_}?wait=5").json())["state"] == "done" and d
            ),
            30,
        )
        assert all(step["state"] == "done" for step in told["steps"])
    np.testing.assert_array_equal(tensor(service, "end"), matrix(7) @ np.linalg.matrix_power(turn(), STEPS))

    assert service.put("new", matrix(9)).status_code == 201
    np.testing.assert_array_equal(result(service.gemm(matrix(8), "weight")), matrix(8) @ matrix(1))


@pytest.mark.parametrize("archive", FOLDERS, ids=lambda path: path.name.partition(".")[0])
def test_a_folder_of_an_earlier_version_is_taken_over(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    data = tmp_path / "data"
    with running(data, *KEEP) as service:
        check(service.ready())
    with running(data, *KEEP) as service:  # and what today's version leaves is taken over again
        service.ready()
        np.testing.assert_array_equal(
            tensor(service, "end"), matrix(7) @ np.linalg.matrix_power(turn(), STEPS)
        )
    shutil.rmtree(data)


def test_there_is_such_a_folder() -> None:
    assert FOLDERS
