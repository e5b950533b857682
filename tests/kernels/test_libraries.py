"""Loading: only from folders that no other user can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernels.libraries import Libraries, NotBuilt, UntrustedFolder, check_private, open_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file in two private folders."""
    folder = tmp_path / "sm_90a" / "lib-1"
    folder.mkdir(parents=True)
    file = folder / "lib.so"
    file.write_bytes(b"")
    for place in (tmp_path, folder.parent, folder):
        place.chmod(0o755)
    file.chmod(0o644)
    return file


def test_private_folder_is_trusted(library: Path) -> None:
    check_private(library)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
@pytest.mark.parametrize("up", [0, 1])
def test_folder_that_others_write_is_refused(library: Path, mode: int, up: int) -> None:
    place = library.parents[up]
    place.chmod(mode)
    if mode & 0o1000:
        check_private(library)  # sticky: others can't replace what is ours
        return
    with pytest.raises(UntrustedFolder, match=f"chmod go-w {place}"):
        open_library(library, library)


def test_a_link_is_followed_once_and_its_own_folder_looked_at(library: Path) -> None:
    own = library.parents[2] / "links"
    own.mkdir(mode=0o755)
    link = own / "lib.so"
    link.symlink_to(library)
    assert check_private(link) == library.resolve()
    own.chmod(0o777)
    with pytest.raises(UntrustedFolder, match=f"chmod go-w {own}"):
        check_private(link)


def test_file_that_others_write_is_refused(library: Path) -> None:
    library.chmod(0o666)
    with pytest.raises(UntrustedFolder, match="other users can write"):
        check_private(library)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_file_of_another_user_is_refused(library: Path) -> None:
    os.chown(library, 12345, -1)
    with pytest.raises(UntrustedFolder, match="belongs to user 12345"):
        check_private(library)


def test_missing_function_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt, match="python -m kernels build --arch sm_90a"):
        Libraries("sm_90a", tmp_path).load("step1_tile")
