"""Tensor files: receives bytes in memory, hands on synced safetensors files, and reads them back into memory.

The functions block; `FolderFiles` calls them in the store's pool. A file is written beside its place, synced,
renamed, and its folder synced: under its final name a file is whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from kernels.problem import DType
from service.folder import sync_folder
from service.store.effects import Effects

SUFFIX = ".safetensors"
HALF_WRITTEN = ".part"
_ALIGN = 64  # of the data within the file
_NAMES = {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "fp64": "F64"}


def extent(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a compact tensor."""
    return math.prod(shape) * DType(dtype).itemsize


@lru_cache(maxsize=4096)
def header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What stands before the data: length and JSON, padded so that the data begins aligned."""
    entry = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, extent(dtype, shape)]}
    text = json.dumps({"tensor": entry}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def digest(dtype: str, shape: tuple[int, ...], data: memoryview) -> str:
    """The content's hash: over dtype, shape and bytes. 128 bits of SHA-256, which processors have built in."""
    hasher = hashlib.sha256(f"{dtype}{list(shape)}".encode())
    hasher.update(data)
    return hasher.hexdigest()[:32]


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def write(path: Path, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
    """Write and sync the file `path`. What fails leaves nothing behind."""
    part = path.with_suffix(HALF_WRITTEN)
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, memoryview(header(dtype, shape)))
            _write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_into(path: Path, start: int, view: memoryview) -> None:
    """Fill `view` with the file's bytes from `start` on; EOFError where the file is too short."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while view:
            n = os.preadv(fd, [view], start)
            if n == 0:
                raise EOFError(f"{path} ends {len(view)} bytes early")
            view, start = view[n:], start + n
    finally:
        os.close(fd)


def read(path: Path, start: int, nbytes: int) -> bytearray:
    """`nbytes` of the file from `start` on."""
    data = bytearray(nbytes)
    read_into(path, start, memoryview(data))
    return data


class Files(Protocol):
    """Where contents are kept, each a safetensors file by its id. What fails raises OSError or ServiceError."""

    @property
    def writable(self) -> bool: ...
    async def write(self, id_: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Keep a tensor; durable on return, and whole or not there at all."""

    async def read_into(self, id_: str, start: int, view: memoryview) -> None:
        """Fill `view` with bytes from `start` of the file on; FileNotFoundError, EOFError."""

    async def remove(self, id_: str) -> None:
        """Let it go if it is there."""


class FolderFiles:
    """Files of a folder."""

    def __init__(self, folder: Path, effects: Effects) -> None:
        self.folder = folder
        self.effects = effects
        self.writable = True

    async def write(self, id_: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Write and sync the file."""
        await self.effects.in_pool(write, self._path(id_), dtype, shape, data)

    async def read_into(self, id_: str, start: int, view: memoryview) -> None:
        """Read from it."""
        await self.effects.in_pool(read_into, self._path(id_), start, view)

    async def remove(self, id_: str) -> None:
        """Unlink it."""
        await self.effects.in_pool(remove, self._path(id_))

    def _path(self, id_: str) -> Path:
        return self.folder / (id_ + SUFFIX)


def remove(path: Path) -> None:
    """Unlink it if it is there."""
    path.unlink(missing_ok=True)


def reclaim(folder: Path, known: set[str]) -> tuple[int, set[str]]:
    """Delete half-written files and those no row names; returns the bytes reclaimed and the ids found."""
    reclaimed = 0
    whole: set[str] = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, suffix = os.path.splitext(entry.name)
            if suffix not in {SUFFIX, HALF_WRITTEN}:
                continue
            if suffix == SUFFIX and stem in known:
                whole.add(stem)
                continue
            reclaimed += entry.stat().st_size
            os.unlink(entry.path)
    sync_folder(folder)
    return reclaimed, whole


def present(folder: Path, known: set[str]) -> set[str]:
    """The ids among `known` whose file is there; deletes nothing."""
    return {stem for stem in known if (folder / (stem + SUFFIX)).exists()}
