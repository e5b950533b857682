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


LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000001)
  MIG 3g.71gb     Device  0: (UUID: MIG-22222222-aaaa-bbbb-cccc-000000000001)
  MIG 1g.18gb     Device  1: (UUID: MIG-22222222-aaaa-bbbb-cccc-000000000002)
GPU 1: NVIDIA H200 (UUID: GPU-11111111-aaaa-bbbb-cccc-000000000002)
"""
WHOLE = "\n".join(line for line in LISTING.splitlines() if "MIG" not in line)


def smi(folder: Path, script: str) -> dict[str, str]:
    """An environment whose nvidia-smi is `script`."""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:/bin:/usr/bin"}


def test_slices_that_nobody_named_each_get_a_worker(
    proc: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environ = smi(tmp_path_factory.mktemp("smi"), f"[ $1 = -L ] && cat <<'END'\n{LISTING}END")
    names = [
        "MIG-22222222-aaaa-bbbb-cccc-000000000001",
        "MIG-22222222-aaaa-bbbb-cccc-000000000002",
        "GPU-11111111-aaaa-bbbb-cccc-000000000002",
    ]
    assert visible(environ, proc) == names
    assert places(0, environ, proc) == [Place(0, (("CUDA_VISIBLE_DEVICES", name),)) for name in names]
    assert places(1, environ, proc) == [Place(0, (("CUDA_VISIBLE_DEVICES", names[0]),))]
    # What a container was given counts first.
    assert visible({**environ, "CUDA_VISIBLE_DEVICES": names[1]}, proc) == [names[1]]


def test_whole_gpus_keep_their_indices(proc: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environ = smi(tmp_path_factory.mktemp("smi"), f"cat <<'END'\n{WHOLE}\nEND")
    assert visible(environ, proc) == ["0", "1"]
    assert places(0, environ, proc) == [Place(0), Place(1)]


@pytest.mark.parametrize("script", ["exit 9", "echo 'Failed to initialize NVML'"])
def test_a_driver_that_does_not_answer_leaves_the_count(
    proc: Path, tmp_path_factory: pytest.TempPathFactory, script: str
) -> None:
    assert visible(smi(tmp_path_factory.mktemp("smi"), script), proc) == ["0", "1"]
