"""The build: real compiles of a small module, its cache, several builds at once, and failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kernels import build as builder
from kernels.build import BuildError, Built, build, sources_of
from kernels.compile import dynamic_smem_bytes
from kernels.libraries import Libraries, read_manifest
from kernels.targets import Function

SAMPLE = "tests.kernels.samples.add"


@dataclass
class Made:
    """A folder, what each build of it handed on, and the libraries that were compiled for it."""

    root: Path
    built: list[Built] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The sample, built twice at once, under a careless umask."""
    pytest.importorskip("cutlass")
    made = Made(tmp_path_factory.mktemp("kernels") / "built")
    real = builder._subprocess

    def counted(arch: str, dump: Path, *arguments: str) -> None:
        if arguments[0] == "library":
            made.compiled.append(arguments[2])
        real(arch, dump, *arguments)

    def one() -> None:
        made.built.extend(build("sm_90a", modules=[SAMPLE], root=made.root))

    threads = [threading.Thread(target=one) for _ in range(2)]
    before = os.umask(0o002)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(builder, "_subprocess", counted)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        os.umask(before)
    return made


@pytest.fixture(scope="module")
def root(made: Made) -> Path:
    """The folder with the sample in it."""
    return made.root


def test_two_builds_at_once_compile_once(made: Made) -> None:
    assert made.compiled == ["add"], "flock holds between open files, so threads stand for processes here"
    functions = ("add_1", "add_2")
    found = sorted((each.library, each.functions, each.cached) for each in made.built)
    assert found == [("add", functions, False), ("add", functions, True)]
    assert set(read_manifest(made.root, "sm_90a").functions) == {*functions}
    assert not list((made.root / "sm_90a").glob("new-*"))


def test_manifest_holds_the_facts(root: Path) -> None:
    manifest = read_manifest(root, "sm_90a")
    assert set(manifest.functions) == {"add_1", "add_2"}
    info = manifest.functions["add_2"]
    assert (info.threads, info.smem_bytes, info.stack_bytes, dict(info.config)) == (
        128,
        4000,
        0,
        {"summand": 2},
    )
    assert 0 < info.registers < 64
    assert "nvidia-cutlass-dsl" in manifest.compiler
    assert manifest.library_bytes["add"] == Libraries("sm_90a", root).path("add_1").stat().st_size


def test_each_function_keeps_its_own_ptx(root: Path) -> None:
    libraries = Libraries("sm_90a", root)
    one, two = (libraries.path(name, "ptx").read_text() for name in ("add_1", "add_2"))
    assert "0f3F800000" in one  # 1.0
    assert "0f40000000" in two  # 2.0
    assert ".target sm_90a" in one
    assert "samples/add.py" in one, "source lines for the virtual GPU"
    assert libraries.path("add_1", "cubin").read_bytes() != libraries.path("add_2", "cubin").read_bytes()


def test_second_build_reads_the_cache_and_starts_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a cached build starts no subprocess")

    monkeypatch.setattr(builder, "_subprocess", refuse)
    assert build("sm_90a", modules=[SAMPLE], root=root) == [Built("add", ("add_1", "add_2"), True, 0.0)]


def test_library_loads_without_the_compiler(root: Path) -> None:
    code = (
        "import sys; sys.modules['cutlass'] = sys.modules['torch'] = None\n"
        "from kernels.libraries import Libraries; from pathlib import Path\n"
        f"f = Libraries('sm_90a', Path({str(root)!r})).load('add_1'); print(type(f).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Function"), done.stderr


def test_changed_compiler_rebuilds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(builder, "compiler_version", lambda: "another")
    monkeypatch.setattr(builder, "_subprocess", lambda *a: started.append(a[2]) or _stop())
    with pytest.raises(BuildError):
        build("sm_90a", modules=[SAMPLE], root=root)
    assert started == ["list"]


def _stop() -> None:
    raise BuildError("stopped by the test")


def test_failure_names_the_library_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no_such_module"):
        build("sm_90a", modules=["tests.kernels.samples.no_such_module"], root=tmp_path)
    assert read_manifest(tmp_path, "sm_90a").functions == {}
    assert not list((tmp_path / "sm_90a").glob("list-*"))


def test_pattern_without_match_is_an_error(root: Path) -> None:
    with pytest.raises(BuildError, match="nothing of sm_90a matches 'step99'"):
        build("sm_90a", modules=[SAMPLE], root=root, only="step99")


def test_sources_are_transitive(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    (package / "hopper").mkdir(parents=True)
    for folder in (package, package / "hopper"):
        (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from kernels import unused\n")
    (package / "unused.py").write_text("")
    (package / "compile.py").write_text("")
    (package / "hopper" / "a.py").write_text("from kernels.hopper import b\nimport os\n")
    (package / "hopper" / "b.py").write_text("def f():\n    from .c import g\n")
    (package / "hopper" / "c.py").write_text("")
    (package / "hopper" / "unused.py").write_text("")
    names = {str(p.relative_to(package)) for p in sources_of("kernels.hopper.a", tmp_path)}
    assert names == {
        "compile.py",
        "hopper/__init__.py",
        "hopper/a.py",
        "hopper/b.py",
        "hopper/c.py",
    }


def test_function_names_are_symbols_and_file_names() -> None:
    with pytest.raises(ValueError, match="lower-case"):
        Function("../x", "sm_90a", lambda: None)
    with pytest.raises(ValueError, match="lower-case"):
        Function("x", "sm_90a", lambda: None, library="a/b")


def test_smem_is_read_from_the_launch() -> None:
    struct = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
    text = (
        "%8 = llvm.mlir.constant(80000 : i64) : i64\n"
        f"%25 = llvm.getelementptr %19[0, 2] : (!llvm.ptr) -> !llvm.ptr, {struct}\n"
        "llvm.store %8, %25 : i64, !llvm.ptr\n"
    )
    assert dynamic_smem_bytes(text) == 80000
    with pytest.raises(RuntimeError, match="not a constant"):
        dynamic_smem_bytes(text.replace("llvm.mlir.constant", "llvm.load"))


def test_manifest_is_json_in_order(root: Path) -> None:
    text = (root / "sm_90a" / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True)
