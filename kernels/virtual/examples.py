"""Runs third-party examples: receives a folder of CuTe DSL scripts, hands on a table of which run right.

    python -m kernels.virtual.examples FOLDER [--match tcgen05] [--json FILE]

Each script runs in a process of its own: torch's CUDA is the CPU there, launches go to the virtual GPU under three
schedules with the detector, and the script's own comparison with a reference decides. Arguments, smaller problems and
scripts with a fault of their own are in third_party.py; a script is "flawed" if what is found is what is known there,
and it passes without that fault. Nothing of the folder is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kernels import results
from kernels.virtual.third_party import arguments_of, changed, flaw_of, smaller

_TIMEOUT = 400
_WRAPPED = "_tvm_ffi_tensor"  # attribute of what cute.runtime.from_dlpack makes
_DETAIL = 400  # characters of what went wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels.virtual.examples", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="", help="only paths that hold this")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at once")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--inside", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--corrected", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside:
        return run_inside(options.inside, corrected=options.corrected)
    scripts = [p for p in sorted(options.folder.rglob("*.py")) if options.match in str(p) and _is_script(p)]
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:  # the threads only wait for processes
        for row in pool.map(lambda path: _run(path, str(path.relative_to(options.folder))), scripts):
            rows.append(row)
            print(f"{row['outcome']:6} {row['seconds']:6.1f} s  {row['name']}  {row['detail']}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(f"{counts['pass']} of {len(rows)} pass, {counts['flawed']} have a fault of their own")
    if options.json:
        what = "third-party CuTe DSL examples on the virtual GPU"
        results.write(options.json, what, rows, key="name" if options.match else "")
    return 0


def _is_script(path: Path) -> bool:
    return path.name[0].isdigit() or "__main__" in path.read_text()  # numbered ones run from the top


def _run(path: Path, name: str) -> dict[str, Any]:
    """A row: what became of a script and, where it is known to have a fault, of the script without it."""
    row = _once(path, name)
    if small := smaller(path):
        row["changed"] = "; ".join(f"line {c.line}: {c.new} for {c.old}" for c in small)
    flaw = flaw_of(path)
    if flaw is not None:
        right = _once(path, name, "--corrected")
        if row["detail"].startswith(f"Fault: {flaw.kind}:") and right["outcome"] == "pass":
            row["outcome"] = "flawed"
        row |= {"reason": flaw.why, "without it": f"{right['outcome']}: {right['detail']}"}
        row["seconds"] = round(row["seconds"] + right["seconds"], 1)
    return row


def _once(path: Path, name: str, *flags: str) -> dict[str, Any]:
    begin = time.perf_counter()
    arch = "sm_90a" if "hopper" in name else "sm_100a"
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": dump, "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_ENABLE_TVM_FFI": "1",
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "kernels.virtual.examples", ".", "--inside", str(path), *flags]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
            code, text = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, text = 124, f"longer than {_TIMEOUT} s"
    detail = next((x.strip() for x in reversed(text.splitlines()) if x.startswith("launches:")), "")
    if code:
        lines = [x.strip() for x in text.splitlines() if x.strip()]
        errors = [
            x for x in lines if re.match(r"[\w.]*(Error|Unknown|Fault|Exception)\b|unknown instruction", x)
        ]
        detail = (errors or lines or ["no output"])[-1][:_DETAIL]
    elif not detail:
        code, detail = 1, "launched nothing"
    return {
        "name": name,
        "outcome": "fail" if code else "pass",
        "detail": detail,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def run_inside(path: Path, *, corrected: bool) -> int:
    """Run one script in this process."""
    from kernels.virtual import host as hosts

    hosts.prepare()
    _fake_cuda()
    _fake_driver()
    _Everything().install(hosts.host())
    sys.argv = [str(path), *arguments_of(path)]
    sys.path.insert(0, str(path.parent))
    _wrap_compile()
    runpy.run_path(str(_changed_copy(path, corrected=corrected)), run_name="__main__")
    print(f"launches: {_Everything.launches}, warp instructions: {_Everything.instructions}")
    return 0


def _changed_copy(path: Path, *, corrected: bool) -> Path:
    """The script itself, or a copy with changes that goes when the run is over."""
    flaw = flaw_of(path) if corrected else None
    changes = smaller(path) + (flaw.changes if flaw is not None else ())
    if not changes:
        return path
    copy = Path(os.environ["CUTE_DSL_DUMP_DIR"], path.name)
    copy.write_text(changed(path.read_text(), changes))
    return copy


class _Everything:
    """Takes every launch of the process: PTX by kernel name from the dump folder, all live tensors as buffers."""

    launches = 0
    instructions = 0

    def install(self, owner: Any) -> None:
        """Stand in for the host's own handling."""
        owner._run = self.launch
        owner.context = _NoContext()

    def launch(self, context: Any, how: Any, name: str, arguments: Any) -> None:
        """One launch under three schedules from the same bytes; the last one's results stay."""
        from kernels.virtual.host import Host, _Context
        from kernels.virtual.launch import Options, schedules
        from kernels.virtual.report import Fault

        buffers = _live_tensors()
        before = [ctypes.string_at(address, size) for _, address, size in buffers]
        after: list[bytes] | None = None
        for number, schedule in enumerate(schedules(3)):
            if number:
                for (_, address, _), data in zip(buffers, before, strict=True):
                    ctypes.memmove(address, data, len(data))
            one = _Context(_ptx_of(name), buffers, replace(Options(sms=8), schedule=schedule), [])
            Host._run(None, one, how, name, arguments)  # type: ignore[arg-type]
            if one.runs[0].findings:
                raise Fault(one.runs[0].findings[0].kind, "\n".join(map(str, one.runs[0].findings)))
            now = [ctypes.string_at(address, size) for _, address, size in buffers]
            if after is not None and now != after:
                raise Fault("disagreement", f"{schedule} leaves other bytes")
            after = now
            _Everything.instructions += one.runs[0].instructions
        _Everything.launches += 1


class _NoContext:
    """Keeps the error of a launch so that the script ends with it."""

    def __setattr__(self, name: str, value: Any) -> None:
        print(f"{type(value).__name__}: {value}", file=sys.stderr, flush=True)
        os._exit(1)


def _ptx_of(name: str) -> str:
    files = sorted(Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.ptx"), key=lambda p: -p.stat().st_mtime)
    for path in files:
        text = path.read_text()
        if re.search(rf"\.entry {re.escape(name)}\b", text):
            return text
    raise LookupError(f"no PTX of {name}")


def _live_tensors() -> list[tuple[str, int, int]]:
    import torch

    found = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu" and thing.numel():
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return [(f"tensor {n}", address, size) for n, (address, size) in enumerate(sorted(found.items()))]


def _fake_cuda() -> None:
    """Make torch's CUDA device the CPU."""
    import torch

    cuda: Any = torch.cuda
    capability = (10, 0) if "100" in os.environ["CUTE_DSL_ARCH"] else (9, 0)
    cuda.is_available = lambda: True
    cuda.synchronize = lambda *_, **__: None
    cuda.get_device_capability = lambda *_, **__: capability
    cuda.get_device_name = lambda *_, **__: "virtual GPU"
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="virtual GPU", major=capability[0], minor=capability[1], multi_processor_count=8
    )
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *_: None
    stream = type("Stream", (), {"cuda_stream": 0, "synchronize": lambda self: None})
    cuda.Stream = stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream()
    cuda.init = lambda: None
    cuda.CUDAGraph = type("CUDAGraph", (), {"replay": lambda self: None})
    cuda.graph = lambda *_, **__: nullcontext()  # what would be captured runs at once
    tensor: Any = torch.Tensor
    plain_to = tensor.to
    tensor.to = lambda self, *a, **k: plain_to(
        self, *map(_on_cpu, a), **{n: _on_cpu(v) for n, v in k.items()}
    )
    tensor.cuda = lambda self, *_, **__: self
    names = (
        "empty zeros ones randn rand randint full tensor arange empty_strided zeros_like empty_like ones_like"
    )
    for name in [*names.split(), "eye", "linspace", "randperm", "full_like", "randn_like"]:
        setattr(torch, name, _without_cuda(getattr(torch, name)))


def _fake_driver() -> None:
    """Scripts ask the driver whether there is a device."""
    from cuda.bindings import driver

    fine = driver.CUresult.CUDA_SUCCESS
    driver.cuInit = lambda *_: (fine,)
    driver.cuDriverGetVersion = lambda: (fine, 13_000)
    driver.cuCtxCreate = lambda *_: (fine, driver.CUcontext(1))
    for name in ("cuCtxSetCurrent", "cuCtxSynchronize", "cuCtxDestroy", "cuStreamSynchronize"):
        setattr(driver, name, lambda *_: (fine,))
    driver.cuDeviceGetCount = lambda: (fine, 1)
    driver.cuDeviceGet = lambda n: (fine, n)


def _on_cpu(value: Any) -> Any:
    return "cpu" if str(value).startswith("cuda") and not callable(value) else value


def _without_cuda(make: Any) -> Any:
    return lambda *a, **k: _moved(make, a, k)


def _moved(make: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call it for the CPU; what was meant for the device starts at 256 bytes, as device memory does."""
    out = make(*map(_on_cpu, args), **{n: _on_cpu(v) for n, v in named.items()})
    meant = any(_on_cpu(v) is not v for v in (*args, *named.values()))
    if not meant or not out.is_contiguous() or not out.numel() or out.data_ptr() % 256 == 0:
        return out
    import torch

    size = out.numel() * out.element_size()
    raw = torch.ByteTensor(size + 256)
    start = -raw.data_ptr() % 256
    aligned = raw[start : start + size].view(out.dtype).view(out.shape)
    aligned.copy_(out)
    return aligned


def _wrap_compile() -> None:
    """Compiled functions take CPU tensors for those of a device."""
    import cutlass
    import torch
    from cutlass import cute

    from kernels.virtual.host import on_device

    class Wrapped:
        """`made_for`: what it was compiled with; tensors of the CPU among them make a function that takes such."""

        def __init__(self, function: Any, made_for: Iterable[Any]) -> None:
            self.function = function
            self.takes_cpu = any(hasattr(value, _WRAPPED) for value in made_for)

        def given(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return on_device(value.detach())
            if hasattr(value, _WRAPPED) and not self.takes_cpu:
                return on_device(getattr(value, _WRAPPED))
            return value

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(*map(self.given, args), **{n: self.given(v) for n, v in kwargs.items()})

        def __getattr__(self, name: str) -> Any:
            return getattr(self.function, name)

    original = cute.compile

    class Compile:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            tvm = "tvm" in type(compiled).__name__.lower()
            return Wrapped(compiled, [*args, *kwargs.values()]) if tvm else compiled

        def __getitem__(self, item: Any) -> Any:
            return lambda *a, **k: Wrapped(original[item](*a, **k), [*a, *k.values()])

    cute.compile = Compile()
    _no_timing()
    info = cutlass.utils.HardwareInfo
    info.__init__ = lambda self, *_, **__: None
    info.get_max_active_clusters = lambda self, size, *_, **__: 8 // size
    info.get_device_multiprocessor_count = lambda self: 8
    info.get_l2_cache_size_in_bytes = lambda self: 1 << 25


def _no_timing() -> None:
    """There is nothing to time here, but what is to be timed runs once: some scripts compare its result."""
    from importlib import import_module

    def once(function: Any, *_: Any, kernel_arguments: Any = None, **__: Any) -> float:
        if kernel_arguments is not None:
            function(*kernel_arguments.args, **kernel_arguments.kwargs)
        return 1.0

    for name in ("cutlass.testing", "cutlass.cute.testing"):
        module: Any = import_module(name)
        if hasattr(module, "benchmark"):
            module.benchmark = once


if __name__ == "__main__":
    raise SystemExit(main())
