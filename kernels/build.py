"""Ahead-of-time build: receives kernel modules and an architecture, hands on shared libraries and a manifest.

Needs no GPU. Each library is compiled in a subprocess of its own (the compiler holds the GIL, so threads gain
nothing, and its architecture is a process-wide setting). The cache key of a module is a hash over its source,
every file of this package that it imports, directly or not, and the compiler's version; a module whose key is
in the manifest is neither imported nor compiled. The command holds the machine code of every library against the
gates (gates.py), once: what breaks one is kept out of the manifest, and the build fails. Several builds may run
at once: a lock file a library, and files appear by atomic rename.

    python -m kernels build --arch sm_90a [--only 'step9*'] [--jobs 2] [--root DIR]
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.gates import check, code_in
from kernels.libraries import MANIFEST, RUNTIME, default_root, read_json
from kernels.targets import Function

__all__ = ["BuildError", "Built", "Function", "build", "main", "modules_of", "sources_of"]

PACKAGE = Path(__file__).resolve().parent
FOLDERS = {"sm_90a": "hopper", "sm_100a": "blackwell", "sm_103a": "blackwell"}
STALE_SECONDS = 3600.0  # a folder that the manifest no longer names stays this long for whoever is loading it


class BuildError(RuntimeError):
    """A library that didn't compile; the text ends with what the compiler said."""


@dataclass(frozen=True, slots=True)
class Built:
    """Outcome for one library: compiled now, or already there."""

    library: str
    functions: tuple[str, ...]
    cached: bool
    seconds: float


def modules_of(arch: str) -> list[str]:
    """Kernel modules of an architecture: those in its folder that define functions()."""
    if arch not in FOLDERS:
        raise ValueError(f"no kernels for {arch!r}; there are {', '.join(FOLDERS)}")
    files = sorted((PACKAGE / FOLDERS[arch]).glob("*.py"))
    return [_module_name(f) for f in files if "\ndef functions(" in f.read_text()]


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def sources_of(module: str, root: Path = PACKAGE.parent) -> list[Path]:
    """Files that a module's machine code depends on: itself, its imports from here, the compile step."""
    package = PACKAGE.name
    todo, seen = [module, f"{package}.compile"], {}
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        base = root / Path(*name.split("."))
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not path.is_file():
            continue  # a name inside a module, not a module
        if name == package:
            continue  # what the package offers at its top is no part of a kernel that lies in it
        seen[name] = path
        todo += [found for found in _imports(path, name) if found.split(".")[0] == package]
    return sorted(seen.values())


def _imports(path: Path, module: str) -> Iterator[str]:
    parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def compiler_version() -> str:
    """Versions that decide the machine code; needs them installed."""
    return " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("nvidia-cutlass-dsl", "apache-tvm-ffi"))


def key_of(module: str, arch: str, compiler: str) -> str:
    """Cache key of everything a module compiles to."""
    digest = hashlib.sha256(f"{arch} {compiler}\n".encode())
    for path in sources_of(module):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(PACKAGE.parent)} {content}\n".encode())
    return digest.hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class _Task:
    """One library to have: its module's key, and the functions it will hold."""

    module: str
    key: str
    library: str
    functions: tuple[str, ...]


class _Folder:
    """Folder of one architecture, and what may be done to it by several processes at once."""

    def __init__(self, root: Path, arch: str, compiler: str) -> None:
        self.root, self.arch, self.compiler = root, arch, compiler
        self.path = root / arch
        self.locks = self.path / "locks"
        for place in (root, self.path, self.locks):
            if not place.is_dir():
                place.mkdir(parents=True, exist_ok=True)
                place.chmod(0o755)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock file `name`; the kernel drops it if we die."""
        with (self.locks / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def entry(self, module: str, key: str) -> dict[str, Any] | None:
        """What the manifest holds of a module, if it's of these very sources and this compiler."""
        data = read_json(self.root, self.arch)
        entry: dict[str, Any] | None = data["modules"].get(module)
        if data["compiler"] != self.compiler or entry is None or entry["key"] != key:
            return None
        return entry

    def has(self, task: _Task) -> bool:
        """Whether the task's library is built and there."""
        entry = self.entry(task.module, task.key)
        built = entry["libraries"].get(task.library) if entry else None
        return built is not None and (self.path / built["folder"] / f"{task.library}.so").is_file()

    def update(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Read, change and replace the manifest."""
        with self.locked("manifest"):
            data = read_json(self.root, self.arch)
            if data["compiler"] != self.compiler:
                data = {"arch": self.arch, "compiler": self.compiler, "modules": {}}
            change(data)
            _replace(self.path / MANIFEST, json.dumps(data, indent=1, sort_keys=True).encode())
        self._drop_stale(data)

    def _drop_stale(self, data: dict[str, Any]) -> None:
        named = {b["folder"] for e in data["modules"].values() for b in e["libraries"].values()}
        for folder in self.path.iterdir():
            if folder.name in named or folder == self.locks or not folder.is_dir():
                continue
            try:
                if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            except FileNotFoundError:
                continue  # another build was quicker


def _private(folder: Path) -> None:
    """Whatever the umask: readable by all, written by none but us."""
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)


def _replace(path: Path, data: bytes) -> None:
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.chmod(name, 0o644)
    os.replace(name, path)


def _environment(arch: str, dump: Path) -> dict[str, str]:
    return os.environ | {
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": str(dump),
        "CUTE_DSL_LINEINFO": "1",  # the virtual GPU and profilers name source lines; the code is the same
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def _subprocess(arch: str, dump: Path, *arguments: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "kernels.compile", *arguments]
    done = subprocess.run(
        command, env=_environment(arch, dump), capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-4000:]
        raise BuildError(f"{' '.join(arguments[:3])} ended with {done.returncode}:\n{said}")


def _list(folder: _Folder, keys: Mapping[str, str]) -> list[_Task]:
    """Libraries of modules (their keys by name), from the manifest or by importing those that aren't in it."""
    entries = {module: folder.entry(module, key) for module, key in keys.items()}
    found = {module: entry["listed"] for module, entry in entries.items() if entry is not None}
    if missing := [module for module in keys if module not in found]:
        with tempfile.TemporaryDirectory(dir=folder.path, prefix="list-") as scratch:
            out = Path(scratch) / "list.json"
            # One subprocess for all: most of its time goes into the compiler's import.
            _subprocess(folder.arch, Path(scratch), "list", str(out), *missing)
            listed: dict[str, dict[str, list[str]]] = json.loads(out.read_text())

        def put(data: dict[str, Any]) -> None:
            for module, libraries in listed.items():
                old = data["modules"].get(module)
                if old is None or old["key"] != keys[module]:
                    data["modules"][module] = {"key": keys[module], "listed": libraries, "libraries": {}}

        folder.update(put)
        found |= listed
    return [
        _Task(module, keys[module], library, tuple(names))
        for module in keys
        for library, names in found[module].items()
    ]


def _hold(arch: str, place: Path, facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise BuildError where the machine code of a library's functions breaks a gate."""
    failed = []
    for each in facts:
        name = each["name"]
        broken = check(arch, code_in(place, name, each["smem_bytes"], each["threads"]))
        failed += [f"{name}: {text}" for text in broken]
    if failed:
        raise BuildError("\n".join(["machine code that breaks a gate:", *failed]))


def _hold_built(folder: _Folder, task: _Task) -> None:
    """The same for a library that an earlier build has left without looking."""
    entry = folder.entry(task.module, task.key)
    built: dict[str, Any] | None = entry["libraries"].get(task.library) if entry else None
    if built is None or built.get("held"):
        return
    _hold(folder.arch, folder.path / built["folder"], built["functions"])

    def put(data: dict[str, Any]) -> None:
        data["modules"][task.module]["libraries"][task.library]["held"] = True

    folder.update(put)


def _build_one(folder: _Folder, task: _Task, gated: bool) -> Built:
    started = time.perf_counter()
    with folder.locked(task.library):
        if folder.has(task):
            if gated:
                _hold_built(folder, task)
            return Built(task.library, task.functions, True, 0.0)
        made = Path(tempfile.mkdtemp(dir=folder.path, prefix=f"new-{task.library}-"))
        try:
            dump = made / "dump"
            dump.mkdir()
            _subprocess(folder.arch, dump, "library", task.module, task.library, str(made))
            shutil.rmtree(dump)
            facts = json.loads((made / "facts.json").read_text())
            if gated:
                _hold(folder.arch, made, facts)
            final = folder.path / f"{task.library}-{task.key[:12]}"
            shutil.rmtree(final, ignore_errors=True)  # a broken one: has() said that it isn't usable
            _private(made)
            made.rename(final)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        built = {
            "folder": final.name,
            "bytes": (final / f"{task.library}.so").stat().st_size,
            "functions": facts,
            "held": gated,
        }

        def put(data: dict[str, Any]) -> None:
            entry = data["modules"].get(task.module)
            if entry is not None and entry["key"] == task.key:
                entry["libraries"][task.library] = built

        folder.update(put)
    return Built(task.library, task.functions, False, time.perf_counter() - started)


def _wanted(task: _Task, pattern: str) -> bool:
    names = (task.module.rsplit(".", 1)[-1], task.library, *task.functions)
    return any(fnmatch.fnmatch(name, pattern) for name in names)


def _copy_runtime(root: Path) -> None:
    """Put the compiler's run-time library beside the kernels: a GPU node needs it and no compiler."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = spec.submodule_search_locations if spec else None
    found = [p for place in places or [] for p in Path(place).glob(f"cu*/lib/{RUNTIME}")]
    if not found:
        raise BuildError(f"{RUNTIME} is missing: pip install nvidia-cutlass-dsl")
    target = root / RUNTIME
    if not target.is_file() or target.stat().st_size != found[0].stat().st_size:
        _replace(target, found[0].read_bytes())


def build(
    arch: str,
    *,
    only: str = "*",
    root: Path | None = None,
    jobs: int | None = None,
    modules: Sequence[str] | None = None,
    gated: bool = False,
    report: Callable[[Built, int, int], None] | None = None,
) -> list[Built]:
    """Have every library of `arch` that matches `only` built; returns them all, compiled now or cached.

    `only` is a pattern over module, library and function names. `gated`: hold the machine code against gates.py.
    `report(built, done, total)` is called as each is there. Raises BuildError for those that failed, after the others
    are done.
    """
    root = root or default_root()
    folder = _Folder(root, arch, compiler_version())
    _copy_runtime(root)
    wanted = modules_of(arch) if modules is None else list(modules)
    outcomes: list[Built] = []
    failures: list[str] = []
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:  # the threads only wait for subprocesses
        listed = _list(folder, {module: key_of(module, arch, folder.compiler) for module in wanted})
        _check_unique(listed)
        tasks = [task for task in listed if _wanted(task, only)]
        if not tasks:
            raise BuildError(f"nothing of {arch} matches {only!r}")
        futures = [pool.submit(_build_one, folder, task, gated) for task in tasks]
        for done, future in enumerate(as_completed(futures), 1):
            try:
                outcomes.append(future.result())
            except (BuildError, FileNotFoundError) as error:  # or a tool that the gates need is missing
                failures.append(str(error))
                continue
            if report:
                report(outcomes[-1], done, len(tasks))
    if failures:
        raise BuildError("\n\n".join(failures))
    return outcomes


def _check_unique(tasks: Sequence[_Task]) -> None:
    counts = Counter(name for task in tasks for name in (f"{task.library}.so", *task.functions))
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise BuildError(f"in two libraries or modules: {', '.join(twice)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(
        prog="python -m kernels build", description="Compile kernels ahead of time."
    )
    parser.add_argument("--arch", required=True, choices=sorted(FOLDERS), help="architecture to compile for")
    parser.add_argument("--only", default="*", help="pattern over module, library and function names")
    parser.add_argument(
        "--root", type=Path, help="folder of compiled kernels (default: $GEMM_KERNELS or .kernels)"
    )
    parser.add_argument("--jobs", type=int, help="subprocesses at once (default: one a core)")
    parser.add_argument("--no-gates", action="store_true", help="don't look at the machine code")
    options = parser.parse_args(argv)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("reading sources", total=None)

        def report(built: Built, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=built.library)

        try:
            outcomes = build(
                options.arch,
                only=options.only,
                root=options.root,
                jobs=options.jobs,
                gated=not options.no_gates,
                report=report,
            )
        except BuildError as error:
            progress.stop()
            console.print(str(error), markup=False, highlight=False, style="red")
            return 1
    fresh = [b for b in outcomes if not b.cached]
    functions = sum(len(b.functions) for b in outcomes)
    print(
        f"{options.arch}: {functions} functions in {len(outcomes)} libraries, {len(fresh)} compiled, "
        f"{len(outcomes) - len(fresh)} from the cache, {time.perf_counter() - started:.1f} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
