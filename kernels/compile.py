"""Compiles one library, in a subprocess: receives a module and a library's name, hands on a filled folder.

    python -m kernels.compile list OUT.json MODULE…
    python -m kernels.compile library MODULE LIBRARY FOLDER

The build starts it with CUTE_DSL_ARCH, CUTE_DSL_KEEP and a CUTE_DSL_DUMP_DIR of its own. Whatever this file
does to the outcome belongs to the cache key.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernels.machine_code import entries, usage
from kernels.targets import Function

# dynamicSmemBytes is field 2 of the launch configuration; the compiler tells it nowhere else.
_CONFIG = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
_SMEM_FIELD = re.compile(rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : [^\n]*{_CONFIG}")


def main(argv: list[str]) -> int:
    """Entry of the subprocess."""
    match argv:
        case ["list", out, *modules]:
            Path(out).write_text(json.dumps({module: libraries(module) for module in modules}))
        case ["library", module, library, folder]:
            wanted = [f for f in targets(module) if f.file == library]
            compile_library(wanted, library, Path(folder))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def targets(module: str) -> list[Function]:
    """Functions of a module for the architecture of this process."""
    arch = os.environ["CUTE_DSL_ARCH"]
    found = [f for f in importlib.import_module(module).functions() if f.arch == arch]
    names = [f.name for f in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{module} lists {', '.join(sorted(twice))} more than once")
    return found


def libraries(module: str) -> dict[str, list[str]]:
    """Names of its functions by library."""
    listed: dict[str, list[str]] = {}
    for each in targets(module):
        listed.setdefault(each.file, []).append(each.name)
    return listed


def compile_library(functions: list[Function], library: str, folder: Path) -> None:
    """Fill `folder` with the library, PTX and cubin of each function, and facts.json."""
    objects, facts = [], []
    for function in functions:
        started = time.perf_counter()
        compiled = function.compile()
        facts.append(
            _write(compiled, function, folder) | {"seconds": round(time.perf_counter() - started, 3)}
        )
        objects.append(folder / f"{function.name}.o")
    _link(objects, folder / f"{library}.so")
    for each in objects:
        each.unlink()
    (folder / "facts.json").write_text(json.dumps(facts))


def _write(compiled: Any, function: Function, folder: Path) -> dict[str, Any]:
    # The compiler read both files back at once, so a later function that dumps to the same name does no harm.
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if not isinstance(cubin, bytes):
        raise RuntimeError(
            f"{function.name}: the compiler kept no cubin in {os.environ['CUTE_DSL_DUMP_DIR']}"
        )
    (folder / f"{function.name}.ptx").write_text(ptx)
    cubin_path = folder / f"{function.name}.cubin"
    cubin_path.write_bytes(cubin)
    compiled.export_to_c(
        str(folder / f"{function.name}.o"), function_name=function.name, export_only_tvm_ffi_symbols=True
    )
    used = usage(cubin_path)
    threads = entries(ptx)
    return {
        "name": function.name,
        "kernels": sorted(threads),
        "threads": max(threads.values()),
        "registers": max(u.registers for u in used),
        "stack_bytes": max(u.stack for u in used),
        "smem_bytes": dynamic_smem_bytes(str(compiled.ir_module)) + max(u.shared for u in used),
        "config": dict(function.config),
    }


def dynamic_smem_bytes(ir: str) -> int:
    """Largest dynamic shared memory of the launches in a lowered host module."""
    sizes = [0]
    for field in _SMEM_FIELD.finditer(ir):
        stored = re.search(rf"llvm\.store (%\w+), {field[1]} :", ir[field.end() :])
        if stored is None:
            raise RuntimeError("the compiler's launch configuration has changed its shape")
        constants = re.findall(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", ir[: field.start()])
        if not constants:
            raise RuntimeError("the shared memory of a launch is not a constant")
        sizes.append(int(constants[-1]))
    return max(sizes)


def _link(objects: list[Path], library: Path) -> None:
    from cutlass.cute.export.aot_config import get_lib_paths

    command = ["gcc", "-shared", "-o", str(library), *map(str, objects), *get_lib_paths(enable_tvm_ffi=True)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
