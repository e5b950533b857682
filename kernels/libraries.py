"""Compiled kernels on disk: receives a folder that the build filled, hands on callables and their facts.

Needs no compiler and no torch: libcute_dsl_runtime.so, tvm_ffi and the libraries are all. A library runs with
our rights, so it is loaded only from folders that no other user can write.

    <root>/libcute_dsl_runtime.so
    <root>/<arch>/manifest.json
    <root>/<arch>/<library>-<key>/<library>.so, and <function>.ptx and <function>.cubin beside it
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

RUNTIME = "libcute_dsl_runtime.so"
MANIFEST = "manifest.json"


class UntrustedFolder(PermissionError):
    """A folder or file of kernels that another user could have changed."""


class NotBuilt(LookupError):
    """A function that the manifest doesn't hold."""


@dataclass(frozen=True, slots=True)
class FunctionInfo:
    """Facts of one compiled function. Bytes and counts are per CTA, as the compiler reports them.

    `kernels` are the names of its device kernels; where there are several, each figure is the largest.
    """

    name: str
    arch: str
    module: str
    library: str
    folder: str
    kernels: tuple[str, ...]
    threads: int
    registers: int
    stack_bytes: int
    smem_bytes: int
    seconds: float
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the build left for one architecture. `build_hash` changes when any library does."""

    arch: str
    compiler: str
    functions: Mapping[str, FunctionInfo]
    build_hash: str
    library_bytes: Mapping[str, int]


def default_root() -> Path:
    """Folder of compiled kernels: $GEMM_KERNELS, else .kernels beside the package."""
    return Path(os.environ.get("GEMM_KERNELS") or Path(__file__).resolve().parent.parent / ".kernels")


def check_private(path: Path) -> Path:
    """Raise UntrustedFolder unless only we, root or the owner of this code could have written `path`.

    Looks at every folder above it too, and above what a link leads to: who can rename a parent can put another in its
    place (a sticky folder, such as /tmp, forbids that). Returns the path without links, to open what was looked at.
    """
    trusted = {0, os.geteuid(), Path(__file__).stat().st_uid}
    named, path = path.absolute(), path.resolve()
    for place in dict.fromkeys((path, *path.parents, *named.parents)):
        info = place.stat()
        if info.st_uid not in trusted:
            raise UntrustedFolder(
                f"{place} belongs to user {info.st_uid}, so kernels under it are not loaded"
            )
        shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX and place != path
        if shared and not sticky:
            raise UntrustedFolder(
                f"other users can write {place}, so kernels under it are not loaded (chmod go-w {place})"
            )
    return path


def read_json(root: Path, arch: str) -> dict[str, Any]:
    """The manifest as written; empty where there is none yet."""
    try:
        text = (root / arch / MANIFEST).read_text()
    except FileNotFoundError:
        return {"arch": arch, "compiler": "", "modules": {}}
    data: dict[str, Any] = json.loads(text)
    return data


def read_manifest(root: Path, arch: str) -> Manifest:
    """Facts of everything built for `arch` under `root`; no function where nothing is built."""
    data = read_json(root, arch)
    functions: dict[str, FunctionInfo] = {}
    sizes: dict[str, int] = {}
    digest = hashlib.sha256(f"{arch} {data['compiler']}".encode())
    for module, entry in sorted(data["modules"].items()):
        for library, built in sorted(entry["libraries"].items()):
            digest.update(f"{library} {entry['key']}\n".encode())
            sizes[library] = built["bytes"]
            for each in built["functions"]:
                functions[each["name"]] = FunctionInfo(
                    arch=arch,
                    module=module,
                    library=library,
                    folder=built["folder"],
                    **{**each, "kernels": tuple(each["kernels"])},
                )
    return Manifest(arch, data["compiler"], functions, digest.hexdigest()[:16], sizes)


class Libraries:
    """Loads functions of one architecture by name, each library once a process. Safe for threads.

    Load before a CUDA graph is captured: the first call of a function uploads its code. `stand_in` is a library
    whose symbols come before those of libcute_dsl_runtime.so: the virtual GPU answers for CUDA that way, in a
    process that has not loaded kernels otherwise.
    """

    def __init__(self, arch: str, root: Path | None = None, stand_in: Path | None = None) -> None:
        self.root = root or default_root()
        self.manifest = read_manifest(self.root, arch)
        self._stand_in = stand_in
        self._modules: dict[str, Any] = {}
        self._lock = threading.Lock()

    def info(self, name: str) -> FunctionInfo:
        """Facts of the function `name`."""
        try:
            return self.manifest.functions[name]
        except KeyError:
            arch = self.manifest.arch
            raise NotBuilt(
                f"{name} is not built for {arch} under {self.root}: python -m kernels build --arch {arch}"
            ) from None

    def path(self, name: str, suffix: str = "so") -> Path:
        """File of a function: "so", "ptx" or "cubin"."""
        info = self.info(name)
        stem = info.library if suffix == "so" else name
        return self.root / self.manifest.arch / info.folder / f"{stem}.{suffix}"

    @cached_property
    def driver(self) -> Path:
        """The library that answers for CUDA: the compiler's run-time library, or its stand-in."""
        return check_private(self._stand_in or self.root / RUNTIME)

    def load(self, name: str) -> Callable[..., Any]:
        """The callable `name`, its library opened if it isn't yet."""
        library = self.path(name)
        with self._lock:
            module = self._modules.get(library.stem)
            if module is None:
                module = self._modules[library.stem] = open_library(
                    library, self.root / RUNTIME, self._stand_in
                )
        function: Callable[..., Any] = module[name]
        return function


def open_library(library: Path, runtime: Path, stand_in: Path | None = None) -> Any:
    """A tvm_ffi module of `library`.

    `runtime` is made global first, so that the library's symbols resolve. With a `stand_in` that one is global,
    and `runtime` is loaded for its name alone: the global scope is searched before a library's own.
    """
    import tvm_ffi

    library, runtime = check_private(library), check_private(runtime)
    if stand_in:
        stand_in = check_private(stand_in)
        ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_LOCAL if stand_in else ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(library))
