"""A kernel of this project on the virtual GPU: receives a function's name and a problem, hands on a `Report`.

The function comes from the ahead-of-time libraries, as the service loads it, with the stub in the place of the
CUDA runtime; the PTX beside each library is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from kernels import device
from kernels.call import Compiled, code_of
from kernels.elementwise import NUMPY, Array
from kernels.libraries import Libraries
from kernels.problem import Activation, BiasDim, Epilogue, Problem
from kernels.verify import Verdict, check
from kernels.virtual.host import host, on_device, run
from kernels.virtual.launch import Options, Schedule
from kernels.virtual.report import Finding, Report


@dataclass(frozen=True, slots=True)
class Case:
    """One function and one problem for it. `variant` is None for Steps 1 to 8."""

    step: int
    function: str
    problem: Problem
    variant: Any = None

    def __str__(self) -> str:
        p = self.problem
        layers = f"{p.batch}×" if p.batch > 1 else ""
        kind = [f"to {p.out_dtype}"] if "plain" in self.function else []
        return " ".join([f"{self.function} {layers}{p.m}×{p.n}×{p.k}", *kind, *_told(p.epilogue)])


def _told(tail: Epilogue) -> Iterator[str]:
    """What follows the product, where anything does."""
    if tail.alpha != 1.0:
        yield f"alpha {tail.alpha:g}"
    if tail.reads_c:
        yield f"beta {tail.beta:g}"
    if tail.bias is not None:
        yield f"bias {tail.bias}"
    if tail.activation is not Activation.NONE:
        yield str(tail.activation)


@dataclass(slots=True)
class Outcome:
    """What a case came to."""

    case: Case
    report: Report
    verdict: Verdict
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No finding, and the right numbers."""
        return self.report.ok and self.verdict.ok

    def text(self) -> str:
        """What is wrong, or nothing."""
        lines = [str(f) for f in self.report.faults]
        if not self.verdict.ok:
            lines.append(f"wrong result: {self.verdict.detail}")
        return "\n".join(lines)


@dataclass(slots=True)
class Operands:
    """Host arrays of a problem, as stored. `d` starts as NaN."""

    a: Array
    b: Array
    d: Array
    c: Array | None = None
    bias: Array | None = None

    def buffers(self) -> dict[str, Array]:
        """Those that are there, by name."""
        found = {"a": self.a, "b": self.b, "c": self.c, "bias": self.bias, "d": self.d}
        return {name: array for name, array in found.items() if array is not None}


def operands(problem: Problem, *, seed: int = 7, whole: bool = False) -> Operands:
    """Normal draws, or small whole numbers (whose products are exact). Buffers start at 128 bytes."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        values = random.integers(-2, 3, shape) if whole else random.standard_normal(shape)
        out = aligned(shape, NUMPY[problem.dtype])
        out[...] = values.astype(np.float32).astype(out.dtype)
        return out

    p, tail = problem, problem.epilogue
    lead = (p.batch,) if p.batch > 1 else ()
    d = aligned((*lead, p.m, p.n), NUMPY[p.out_dtype])
    d[...] = np.nan
    return Operands(
        draw(*lead, p.k, p.m) if p.trans_a else draw(*lead, p.m, p.k),
        draw(*lead, p.n, p.k) if p.trans_b else draw(*lead, p.k, p.n),
        d,
        draw(*lead, p.m, p.n) if tail.c else None,
        draw(p.n if tail.bias is BiasDim.N else p.m) if tail.bias is not None else None,
    )


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array that starts at a multiple of 128 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out: Array = raw[start : start + size].view(dtype).reshape(shape)
    return out


@dataclass(slots=True)
class Subject:
    """The kernels of one architecture, as built under `root`."""

    arch: str
    root: Path | None = None
    libraries: Libraries = field(init=False)

    def __post_init__(self) -> None:
        self.libraries = Libraries(self.arch, self.root, stand_in=Path(host().path))

    def ptx(self, function: str) -> str:
        """PTX text of a function."""
        return self.libraries.path(function, "ptx").read_text()

    def run(
        self,
        case: Case,
        given: Operands,
        *,
        schedules: int | list[Schedule] = 3,
        options: Options | None = None,
    ) -> Report:
        """Launch a case on given operands."""
        options = options or Options()
        call = self.libraries.load(case.function)
        ctas = options.sms
        if case.variant is None:
            tensors = [on_device(x) for x in (given.a, given.b, given.d)]
            launch = lambda: call(*tensors, ctas)  # noqa: E731
        else:
            arguments = family_arguments(case, given, ctas)
            launch = lambda: call(*arguments)  # noqa: E731
        return run(launch, given.buffers(), self.ptx(case.function), schedules_=schedules, options=options)

    def verify(
        self,
        case: Case,
        *,
        schedules: int | list[Schedule] = 3,
        options: Options | None = None,
        seed: int = 7,
    ) -> Outcome:
        """Run a case on random operands and compare D with the reference."""
        given = operands(case.problem, seed=seed)
        report = self.run(case, given, schedules=schedules, options=options)
        verdict = check(case.problem, given.d, given.a, given.b, given.c, given.bias)
        if not verdict.ok and report.ok:
            report.findings.append(Finding("wrong result", verdict.detail))
        seconds = sum(r.seconds for r in report.runs)
        return Outcome(case, report, verdict, seconds)


def family_arguments(case: Case, given: Operands, ctas: int) -> list[Any]:
    """Arguments of a product function (kernels/call.py)."""
    p = case.problem
    variant = cast(Compiled, case.variant)
    layers = p.batch

    def view(x: Array, transposed: bool) -> Array:
        x = x if x.ndim == 3 else x[None]
        return x.transpose(0, 2, 1) if transposed else x

    d = view(given.d, False)
    c = view(given.c, False) if given.c is not None else None
    reads_c = c is not None and p.epilogue.reads_c
    chip = device.virtual("sm_90a" if "sm_90" in str(variant) else "sm_100a")
    return [
        on_device(view(given.a, p.trans_a)),
        on_device(view(given.b, p.trans_b)),
        d.ctypes.data,
        *(s // d.itemsize for s in d.strides),
        c.ctypes.data if c is not None and reads_c else 0,
        *((s // c.itemsize for s in c.strides) if c is not None and reads_c else (0, 0, 0)),
        given.bias.ctypes.data if given.bias is not None else 0,
        p.epilogue.alpha,
        p.epilogue.beta,
        code_of(p),
        layers,
        ctas,
        variant.raster(p, chip),
    ]


def have(arch: str, functions: Iterable[str], root: Path | None = None) -> None:
    """Build those functions that aren't there. Without the compiler, what is built has to do."""
    if find_spec("cutlass") is None:
        return
    from kernels.build import build, modules_of

    modules = modules_of(arch)
    for function in sorted(set(functions)):
        stem = function.partition("_")[0] + "_"  # a step's functions and its module begin alike
        own = [module for module in modules if module.rpartition(".")[2].startswith(stem)]
        build(arch, only=function, root=root, modules=own or modules)
