"""What a build makes: receives an architecture, hands on build.json with functions, bytes and seconds.

    python -m benchmarks.build [--arch sm_90a --arch sm_100a …] [--root DIR [--as-built]]
    python -m benchmarks.build --readme

Builds into a fresh folder, so that everything is compiled; with --root, takes what lies there from the cache, and
with --as-built compiles nothing: each function's own seconds, which the manifest keeps, are added up.
With --readme only writes kernels/README.md anew from the results.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, add_places, section, write_here
from kernels.build import build
from kernels.libraries import read_manifest

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
README = Path(__file__).parents[1] / "kernels" / "README.md"
BEGIN = "<!-- build: python -m benchmarks.build --readme -->\n"


def measure(arch: str, root: Path, *, as_built: bool = False) -> dict[str, Any]:
    """Build an architecture and add up what came of it."""
    started = time.perf_counter()
    outcomes = [] if as_built else build(arch, root=root)
    wall = None if as_built else round(time.perf_counter() - started, 1)
    manifest = read_manifest(root, arch)
    functions = manifest.functions.values()
    return {
        "name": arch,
        "functions": len(functions),
        "libraries": len(manifest.library_bytes),
        "library_bytes": sum(manifest.library_bytes.values()),
        "compiled": sum(not built.cached for built in outcomes),
        "wall_seconds": wall,
        "core_seconds": round(sum(info.seconds for info in functions), 1),
        "cores": len(os.sched_getaffinity(0)),
        "compiler": manifest.compiler,
    }


def readme(text: str, results: Path) -> str:
    """The README with what the results say of the build."""
    file = results / "cpu" / "build.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    lines = [
        f"- {row['name']}: {row['functions']} functions in {row['libraries']} libraries, "
        f"{row['library_bytes'] / 1e6:.1f} MB; {_took(row)}.\n"
        for row in rows
    ]
    return section(text, BEGIN, "".join(lines))


def _took(row: dict[str, Any]) -> str:
    if row["wall_seconds"] is None:
        return f"{row['core_seconds'] / 60:.0f} core minutes to compile them all"
    return f"{row['wall_seconds']:.0f} s to compile them all on {row['cores']} cores"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.build", description="Measure the build.")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--root", type=Path, help="take what is there from the cache")
    add_places(parser)
    parser.add_argument("--as-built", action="store_true", help="compile nothing")
    parser.add_argument("--readme", action="store_true", help="only write kernels/README.md from the results")
    options = parser.parse_args(argv)
    if options.readme:
        README.write_text(readme(README.read_text(), RESULTS))
        return 0
    with tempfile.TemporaryDirectory(prefix="kernels-") as fresh:
        root = options.root or Path(fresh)
        rows = [measure(arch, root, as_built=options.as_built) for arch in options.arch or ARCHITECTURES]
    for row in rows:
        print(
            f"{row['name']}: {row['functions']} functions in {row['libraries']} libraries, "
            f"{row['library_bytes'] / 1e6:.1f} MB, {row['core_seconds']:.0f} core seconds"
        )
    packages = ["nvidia-cutlass-dsl", "apache-tvm-ffi"]
    print(write_here(options, "build", rows, packages, key="name"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
