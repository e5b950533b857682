"""The direction of imports: kernels knows no service, the front knows no torch, and nothing goes in circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from vulture import Vulture

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("service/**/*.py"), *ROOT.glob("kernels/**/*.py")])
#: Modules of the worker process; all else in service/ is the front's, the client's or shared.
WORKER = ("service.worker", "service.drivers")
HEAVY = {"torch", "cutlass", "cuda", "cupy", "tvm_ffi", "pynvml"}
#: What libraries look for by its name, or take from what is set on their objects.
CALLED_BY_NAME = {
    *("__getattr__", "__signature__", "model_config"),  # Python, pydantic
    *("route_class", "build_middleware_stack"),  # FastAPI
    *("get_buffer", "buffer_updated", "sizehint", "on_headers_complete"),  # asyncio, httptools
    *(
        "should_exit",
        "force_exit",
        "total_requests",
        "timeout_graceful_shutdown",
        "_should_upgrade",
    ),  # uvicorn
    *("check_health", "numMetrics", "*_param"),  # Ray Serve, NVML, protobuf
    *("encode_response", "resp_mime_type", "forward", "serialize"),  # LitServe, mosec
}
#: Fields that are only read as a whole, by who writes them down.
WRITTEN_DOWN = {"memory_bytes", "tile_k"}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in FILES}


def imports(path: Path, *, everywhere: bool) -> set[str]:
    """Modules that a file imports: at import time, or anywhere in it; TYPE_CHECKING blocks don't count."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def of(names: set[str], *roots: str) -> set[str]:
    return {name for name in names if name.partition(".")[0] in roots or name in roots}


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(ROOT / "kernels")], ids=module)
def test_kernels_never_import_service(path: Path) -> None:
    assert not of(imports(path, everywhere=True), "service")


@pytest.mark.parametrize("path", [p for p in FILES if p.is_relative_to(ROOT / "service")], ids=module)
def test_only_the_worker_knows_kernels_and_devices(path: Path) -> None:
    if module(path).startswith(WORKER):
        return
    found = imports(path, everywhere=True)
    assert of(found, "kernels") <= {"kernels.problem"}
    lazy = {"service.client"}  # its tensors may be torch's, when the caller has imported torch
    if not any(module(path).startswith(name) for name in lazy):
        assert not of(found, *HEAVY)
    assert not of(imports(path, everywhere=False), *HEAVY)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_what_is_installed_imports_nothing_that_is_not(path: Path) -> None:
    assert not of(imports(path, everywhere=True), "benchmarks", "tests")


def test_nothing_imports_in_circles() -> None:
    graph = {module(path): imports(path, everywhere=False) & MODULES - {module(path)} for path in FILES}
    TopologicalSorter(graph).prepare()


def test_the_leaves_import_nothing_above_them() -> None:
    leaves = (
        "errors",
        "logs",
        "messages",
        "aside",
        "histogram",
        "metrics",
        "settings",
        "arena",
        "link",
        "batch",
        "admit",
    )
    allowed = {f"service.{leaf}" for leaf in leaves}
    for leaf in leaves:
        path = ROOT / "service" / f"{leaf}.py"
        assert of(imports(path, everywhere=True), "service") <= allowed, leaf


def test_the_app_starts_without_torch_cuda_or_compiler() -> None:
    code = f"import sys, service.app, service.protocol; print(sorted(set(sys.modules) & {HEAVY!r}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_everything_is_used() -> None:
    """By the package, its benchmarks or a test. Code that kernels/virtual writes calls what is there by name."""
    found = Vulture(
        ignore_names=[*CALLED_BY_NAME, *WRITTEN_DOWN],
        ignore_decorators=["@router.*", "@app.get", "@drill", "@field_validator", "@model_validator"],
    )
    found.scavenge([str(ROOT / name) for name in ("service", "kernels", "benchmarks", "tests")], ["*_pb2.py"])
    unused = [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno}: {item.typ} {item.name}"
        for item in found.get_unused_code(min_confidence=60)
        if not item.filename.is_relative_to(ROOT / "kernels/virtual")
        and not item.filename.is_relative_to(ROOT / "tests")
    ]
    assert unused == []
