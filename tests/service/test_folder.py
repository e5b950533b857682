"""The data folder: its lock among processes, what the disk refuses in words."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from service.errors import ServiceError
from service.folder import DataFolder, FolderBroken, FolderTaken, refusal, refusing

ROOT = Path(__file__).parents[2]

#: Holds the folder, with a child that outlives it as a worker might, until it is killed.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from service.folder import DataFolder
folder = DataFolder(Path(sys.argv[1]))
folder.open()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(30)
"""


def test_lock_goes_with_the_process_whatever_its_children_do(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "data")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(FolderTaken, match=rf"process {holder.pid}\)") as refused:
                DataFolder(tmp_path / "data").open()
            assert "setting data" in str(refused.value)
            holder.kill()
            holder.wait()
            os.kill(child, 0)  # still there
            folder = DataFolder(tmp_path / "data")
            folder.open()
            assert folder.writable
            folder.close()
        finally:
            os.kill(child, signal.SIGKILL)
            holder.kill()


def test_closed_folder_can_be_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        folder = DataFolder(tmp_path / "deep" / "data")
        folder.open()
        folder.close()
        folder.close()


def test_folder_that_is_a_file_stops_start_up(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(FolderBroken, match="can't be the data folder: File exists"):
        DataFolder(tmp_path / "data").open()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "no_room"),
        (errno.EDQUOT, "no_room"),
        (errno.EFBIG, "no_room"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "read_only"),
        (errno.EIO, "read_only"),
    ],
)
def test_refusal_of_the_system(number: int, code: str) -> None:
    with pytest.raises(ServiceError) as error, refusing():
        raise OSError(number, os.strerror(number))
    assert error.value.code == code


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (sqlite3.SQLITE_FULL, "no_room"),
        (sqlite3.SQLITE_READONLY, "read_only"),
        (sqlite3.SQLITE_IOERR_WRITE, "read_only"),
    ],
)
def test_refusal_of_the_database(number: int, code: str) -> None:
    error = sqlite3.OperationalError("as told")
    error.sqlite_errorcode = number
    assert refusal(error).code == code
