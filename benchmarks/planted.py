"""Planted faults: receives Steps 7 and 9, hands on what the virtual GPU and a real one make of each mistake.

    python -m benchmarks.planted --virtual                    # here; writes benchmarks/results/cpu/planted.json
    python -m benchmarks.planted --machine h200 [--racecheck] # on a GPU; writes benchmarks/results/h200/planted.json
    python -m benchmarks.planted --readme                     # both halves as a table in kernels/README.md

A fault is one changed instruction of the compiled PTX (kernels/virtual/mutants.py). On a GPU the driver compiles the
changed text, and the function's own host code launches it: the virtual GPU's stub stands in for the CUDA runtime and
hands launches on to the driver. Each fault runs in a process of its own with a time limit, hundreds of times on
inputs whose product is exact: it hangs, faults, is wrong so many times, or nothing shows. With --racecheck those that
come back run once more under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, add_places, gpu_machine, section, write
from kernels.build import build
from kernels.call import Code
from kernels.libraries import Libraries
from kernels.virtual import mutants
from kernels.virtual.host import Host

ARCH = "sm_90a"
README = Path(__file__).parents[1] / "kernels" / "README.md"
BEGIN = "<!-- planted: python -m benchmarks.planted --readme -->\n"
REPEATS = 400
START_SECONDS = 60.0  # torch, and the driver's compilation of the sound kernel
LIMIT_SECONDS = 8.0  # the repeats take well under a second
RACE_SECONDS = 60.0
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@dataclass(frozen=True, slots=True)
class Fault:
    """The `number`-th mutant of a kind (mutants.OPERATORS) of a step's function."""

    name: str
    step: int
    kind: str
    number: int


FAULTS = (
    Fault("consumer doesn't wait for the loads", 7, "wait left out", 1),
    Fault("producer doesn't wait for the consumer", 7, "wait left out", 0),
    Fault("consumer waits for the other phase", 7, "wait for the other phase", 1),
    Fault("half the bytes expected", 7, "half the bytes expected", 0),
    Fault("one arrival too many awaited", 7, "one arrival more", 6),
    Fault("stage released before wgmma has read it", 7, "wgmma wait left out", 0),
    Fault("no proxy fence before the store", 7, "proxy fence left out", 0),
    Fault("store's read of the staging not awaited", 7, "wait of a store left out", 0),
    Fault("no barrier between staging and store", 7, "named barrier left out", 2),
    Fault("producer doesn't wait for its cluster", 9, "wait left out", 0),
    Fault("one arrival of eight not awaited", 9, "one arrival fewer", 1),
    Fault("a release left out", 9, "arrival left out", 1),
)


def planted(fault: Fault, root: Path | None) -> tuple[Any, mutants.Mutant]:
    """The case that is broken, and the broken text."""
    case = mutants.case_of(ARCH, fault.step)
    text = Libraries(ARCH, root).path(case.function, "ptx").read_text()
    found = [each for each in mutants.mutants(text) if each.kind == fault.kind]
    return case, found[fault.number]


def on_virtual(fault: Fault, root: Path | None) -> dict[str, Any]:
    """What the virtual GPU says."""
    from kernels.virtual.subject import Subject

    case, mutant = planted(fault, root)
    fate = mutants.fate(Subject(ARCH, root), case, mutant)
    said = f"{fate.schedule} schedule" if fate.killed_by else "nothing in any schedule"
    return _row(fault, case, mutant) | {"outcome": fate.killed_by or "survived", "detail": said}


def _row(fault: Fault, case: Any, mutant: mutants.Mutant) -> dict[str, Any]:
    place = mutant.source or f"PTX line {mutant.line}"
    return {"name": fault.name, "function": case.function, "fault": fault.kind, "place": place}


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Driver(Host):
    """The stub's host that launches `text`, compiled by the driver, on the real device."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.text = ""
        self._modules: dict[str, ctypes.c_void_p] = {}
        super().__init__()

    def _check(self, error: int, what: str) -> None:
        if error:
            name = ctypes.c_char_p()
            self.cuda.cuGetErrorName(error, ctypes.byref(name))
            raise RuntimeError(f"{what}: {(name.value or b'unknown').decode()}")

    def function(self, name: str) -> ctypes.c_void_p:
        """The kernel `name` of the text."""
        if self.text not in self._modules:
            module = ctypes.c_void_p()
            self._check(
                self.cuda.cuModuleLoadData(ctypes.byref(module), self.text.encode() + b"\0"), "compile"
            )
            self._modules[self.text] = module
        found = ctypes.c_void_p()
        error = self.cuda.cuModuleGetFunction(ctypes.byref(found), self._modules[self.text], name.encode())
        self._check(error, "find the kernel")
        return found

    def _launch(self, how: Any, kernel: int, arguments: Any) -> int:
        given = how.contents
        try:
            function = self.function(self.names[kernel - 1])
            self._check(
                self.cuda.cuFuncSetAttribute(function, MAX_SHARED, int(given.shared)), "shared memory"
            )
        except RuntimeError as error:
            print(json.dumps({"outcome": "refused", "detail": str(error)}), flush=True)
            return 1
        config = _Configuration(
            given.grid, given.block, int(given.shared), given.stream,
            ctypes.cast(given.attributes, ctypes.c_void_p), given.count,
        )  # fmt: skip
        return int(self.cuda.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None))

    def _map(
        self, out: int, kind: int, rank: int, address: int, dims: Any, strides: Any, box: Any, steps: Any,
        interleave: int, swizzle: int,
    ) -> int:  # fmt: skip
        promotion, fill = 2, 0  # 128 bytes of L2; zeros outside
        return int(
            self.cuda.cuTensorMapEncodeTiled(
                ctypes.c_void_p(out), kind, rank, ctypes.c_void_p(address), dims, strides, box, steps,
                interleave, swizzle, promotion, fill,
            )
        )  # fmt: skip


def child(number: int, root: Path | None, repeats: int) -> int:
    """One fault on the device: "ready" once the sound text was right by the same way, then how the broken one did."""
    import torch

    torch.zeros(1, device="cuda")
    driver = Driver()
    fault = FAULTS[number]
    case, mutant = planted(fault, root)
    libraries = Libraries(ARCH, root, stand_in=Path(driver.path))
    function = libraries.load(case.function)
    p = case.problem
    a, b = (torch.randint(-2, 3, (1, rows, p.k), device="cuda").half() for rows in (p.m, p.n))
    d = torch.empty(1, p.m, p.n, device="cuda", dtype=torch.float16)
    want = (a[0].double() @ b[0].double().T).half()

    def wrong(ctas: int) -> bool:
        d.fill_(torch.nan)
        if case.variant is None:
            function(a[0], b[0], d[0], ctas)
        else:
            code = Code().pack()
            function(
                a, b.transpose(1, 2), d.data_ptr(), *d.stride(), 0, 0, 0, 0, 0, 1.0, 0.0, code, 1, ctas, 8
            )
        return bool((d[0] != want).any())

    driver.text = libraries.path(case.function, "ptx").read_text()
    if any(wrong(ctas) for ctas in (2, 132)):
        print(
            json.dumps({"outcome": "not run", "detail": "the sound kernel is wrong by this way"}), flush=True
        )
        return 1
    driver.text = mutant.text
    driver.function(case_kernel(mutant.text))  # compiles, which takes longer than the runs
    print("ready", flush=True)
    count = sum(wrong((2, 8, 132)[turn % 3]) for turn in range(repeats))
    outcome = {"outcome": "wrong" if count else "right", "detail": f"{count} of {repeats} runs wrong"}
    print(json.dumps(outcome), flush=True)
    return 0


def case_kernel(text: str) -> str:
    """Name of the entry of a PTX text."""
    return text.partition(".entry")[2].partition("(")[0].strip()


def on_device(number: int, root: Path | None) -> dict[str, Any]:
    """How a fault ended on the device: hang, fault, wrong, right."""
    fault = FAULTS[number]
    begin = time.perf_counter()
    with subprocess.Popen(
        _command(number, root, REPEATS), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        found = _outcome(run)
        run.kill()
    case, mutant = planted(fault, root)
    return _row(fault, case, mutant) | found | {"seconds": round(time.perf_counter() - begin, 1)}


def _command(number: int, root: Path | None, repeats: int) -> list[str]:
    where = ["--root", str(root)] if root else []
    command = [sys.executable, "-m", "benchmarks.planted", "--child", str(number), "--repeats", str(repeats)]
    return [*command, *where]


def _outcome(run: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert run.stdout is not None
    assert run.stderr is not None
    limit = START_SECONDS
    while True:
        ready, _, _ = select.select([run.stdout], [], [], limit)
        if not ready:
            late = f"no answer within {limit:.0f} s"
            return {"outcome": "hang" if limit == LIMIT_SECONDS else "not run", "detail": late}
        line = run.stdout.readline().decode().strip()
        if line == "ready":
            limit = LIMIT_SECONDS
            continue
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        said = run.stderr.read().decode(errors="replace").strip().splitlines()
        named = [text for text in said if "error" in text.lower()] or said or [f"status {run.wait()}"]
        return {"outcome": "fault", "detail": named[-1][:200]}


def races(number: int, root: Path | None) -> str:
    """What racecheck reports of a few runs: how many hazards, "nothing", or why it didn't tell."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "not installed"
    command = [program, "--tool", "racecheck", "--print-limit", "3", *_command(number, root, 3)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RACE_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {RACE_SECONDS:.0f} s"
    summary = [line for line in done.stdout.splitlines() if "RACECHECK SUMMARY" in line]
    if not summary:
        return "no summary"
    text = summary[-1].partition("SUMMARY:")[2].strip()
    return "nothing" if text.startswith("0 hazards") else text


def table(virtual: Sequence[dict[str, Any]], device: Sequence[dict[str, Any]]) -> str:
    """Both halves side by side, as Markdown."""
    lines = ["| planted in | mistake | virtual GPU | H200 | racecheck there |", "|---|---|---|---|---|"]
    there = {row["name"]: row for row in device}
    for row in virtual:
        step = row["function"].partition("_")[0].replace("step", "Step ")
        seen = there.get(row["name"])
        how = "not run yet" if seen is None else seen["outcome"]
        if seen is not None and seen["outcome"] in ("wrong", "right"):
            how = f"{seen['outcome']}: {seen['detail']}"
        raced = (seen or {}).get("racecheck", "")
        lines.append(f"| {step} | {row['name']} | {row['outcome']} ({row['detail']}) | {how} | {raced} |")
    return "\n".join(lines)


def readme(text: str, results: Path) -> str:
    """kernels/README.md with the table made anew from the results."""
    halves = [
        json.loads(path.read_text())["rows"] if path.is_file() else []
        for path in (results / "cpu" / "planted.json", results / "h200" / "planted.json")
    ]
    return section(text, BEGIN, f"{table(*halves)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where the virtual GPU missed a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="the half that needs no GPU")
    parser.add_argument("--racecheck", action="store_true", help="those that come back under racecheck too")
    parser.add_argument("--readme", action="store_true", help="only write kernels/README.md from the results")
    add_places(parser, "h200")
    parser.add_argument("--root", type=Path, help="folder of compiled kernels")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        return child(options.child, options.root, options.repeats)
    if options.readme:
        README.write_text(readme(README.read_text(), RESULTS))
        return 0
    if options.virtual:
        for step in sorted({fault.step for fault in FAULTS}):
            build(ARCH, only=mutants.case_of(ARCH, step).function, root=options.root)
        rows = [on_virtual(fault, options.root) for fault in FAULTS]
        machine, details = "cpu", {"cores": len(os.sched_getaffinity(0))}
    else:
        from kernels.device import describe_cuda

        rows = []
        for number in range(len(FAULTS)):
            row = on_device(number, options.root)
            if options.racecheck and row["outcome"] in ("wrong", "right"):
                row["racecheck"] = races(number, options.root)
            print(f"{row['name']}: {row['outcome']}: {row['detail']} {row.get('racecheck', '')}", flush=True)
            rows.append(row)
        machine, details = options.machine, gpu_machine(describe_cuda())
    packages = ["numpy", "torch", "apache-tvm-ffi"]
    print(write(machine, "planted", rows, details=details, packages=packages, folder=options.out))
    return int(any(row["outcome"] in ("survived", "not run", "refused") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
