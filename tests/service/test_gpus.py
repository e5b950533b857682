"""Places of workers, from CUDA_VISIBLE_DEVICES and the driver's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.gpus import Place, places, visible


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    for name in ("0000:1b:00.0", "0000:43:00.0"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_all_of_the_drivers_gpus_where_nothing_is_said(proc: Path) -> None:
    assert visible({}, proc) == ["0", "1"]
    assert places(0, {}, proc) == [Place(0), Place(1)]


def test_a_computer_without_gpus_has_one_worker(tmp_path: Path) -> None:
    assert visible({}, tmp_path / "absent") == []
    assert places(0, {}, tmp_path / "absent") == [Place(0)]
    assert places(3, {}, tmp_path / "absent") == [Place(0)] * 3


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("1", ["1"]),
        ("0, 1", ["0", "1"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
    ],
)
def test_cuda_visible_devices_is_respected(proc: Path, listed: str, names: list[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": listed}
    assert visible(environ, proc) == names
    assert len(places(0, environ, proc)) == max(len(names), 1)


def test_more_workers_than_gpus_share_them(proc: Path) -> None:
    assert places(3, {}, proc) == [Place(0), Place(1), Place(0)]


def test_each_mig_slice_is_all_that_its_worker_sees(proc: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert places(0, environ, proc) == [
        Place(0, (("CUDA_VISIBLE_DEVICES", "MIG-a"),)),
        Place(0, (("CUDA_VISIBLE_DEVICES", "MIG-b"),)),
    ]
