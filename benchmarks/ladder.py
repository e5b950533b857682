"""The ladder against cuBLAS: receives a GPU and built libraries, hands on ladder.json and a table.

    python -m benchmarks.ladder [--sustained] [--dtype fp16] [--machine h200] [--rounds 40]

Verifies first: each step on ragged shapes, integer inputs bit for bit and normal ones within the error bound
of the API, in a subprocess with a time limit; a step that is wrong or hangs isn't timed, and the exit status
is 1. Steps from 3 on are timed at 4096³, Steps 1 and 2 at their own sizes, each interleaved with cuBLAS.
Needs torch and tvm_ffi; no compiler.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import spread, write
from kernels.ladder import LADDER, Step, load
from kernels.libraries import Libraries
from kernels.problem import DType, Problem

ARCH = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
SIZE = {1: (128, 128, 64), 2: (128, 128, 4096)}
LADDER_SIZE = (4096, 4096, 4096)
SHAPES = (  # edges in every dimension, more tiles than CTAs; Steps 1 to 3 also take rows that TMA can't
    (128, 128, 64),
    (8, 8, 8),
    (127, 65, 33),
    (72, 104, 40),
    (128, 128, 1000),
    (300, 77, 129),
    (256, 384, 512),
    (1000, 1160, 328),
    (2048, 2048, 2048),
)
VERIFY_SECONDS = 60.0  # for one step, start of the process included
BLOCK_SECONDS = 0.25
PAUSE_SECONDS = 0.02  # between bursts: the clock and the power cap recover
LAUNCHES = 4  # in a burst of one kernel
SMALL_LAUNCHES = 50  # in a graph, for what takes microseconds


def problem_of(m: int, n: int, k: int, dtype: DType) -> Problem:
    """A [M, K] times B [N, K] transposed, 16 bits in and out."""
    return Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_b=True)


# Verification, in a subprocess


def verify(arch: str, number: int, dtype: DType, ctas: int) -> float:
    """Check one step on every shape in its reach; returns the largest relative error, raises if wrong."""
    import torch

    step = LADDER[arch][number - 1]
    function = load(Libraries(arch), step, dtype)
    kind = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype.value])
    generator = torch.Generator("cuda").manual_seed(number)
    worst = 0.0
    for m, n, k in SHAPES:
        if step.unsupported(problem_of(m, n, k, dtype)):
            continue
        whole = [
            torch.randint(-2, 3, s, device="cuda", generator=generator).to(kind) for s in ((m, k), (n, k))
        ]
        normal = [torch.randn(s, device="cuda", generator=generator).to(kind) for s in ((m, k), (n, k))]
        for exact, (a, b) in ((True, whole), (False, normal)):
            outs = [torch.full((m, n), float("nan"), device="cuda", dtype=kind) for _ in range(3)]
            for out in outs:
                function(a, b, out, ctas)
            torch.cuda.synchronize()
            where = f"{step.name} {dtype} {m}×{n}×{k}"
            if not all(torch.equal(outs[0], out) for out in outs[1:]):
                raise AssertionError(f"{where}: repeats differ, or NaN")
            error = _error(outs[0], a, b, exact, where)
            worst = max(worst, error)
    return worst


def _error(out: Any, a: Any, b: Any, exact: bool, where: str) -> float:
    """Relative error of `out`; raises beyond the API's bound, or at any where inputs are whole numbers."""
    import torch

    reference = a.double() @ b.double().T
    rounded = reference.to(out.dtype)
    if exact:
        wrong = int((out != rounded).sum())
    else:
        info = torch.finfo(out.dtype)
        ulp = torch.exp2(torch.frexp(reference.abs().clamp(min=info.smallest_normal))[1] - 1.0) * info.eps
        bound = 2.0**-22 * (a.shape[1] / 16 + 4) * (a.double().abs() @ b.double().abs().T) + ulp / 2
        wrong = int((~((out.double() - reference).abs() <= bound)).sum())
    if wrong:
        raise AssertionError(
            f"{where}: {wrong} of {out.numel()} elements are wrong ({'whole' if exact else 'normal'})"
        )
    return float((out.double() - reference).norm() / reference.norm())


def verified(
    arch: str, dtype: DType, ctas: int, steps: Sequence[Step]
) -> Iterator[tuple[Step, float | None]]:
    """Each step with its error, or None where it was wrong, died or ran over its time."""
    left = list(steps)
    while left:
        numbers = ",".join(str(step.number) for step in left)
        command = [sys.executable, "-m", "benchmarks.ladder", "--verify", numbers, "--dtype", dtype.value]
        with subprocess.Popen(
            [*command, "--arch", arch, "--ctas", str(ctas)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            while left:
                ready, _, _ = select.select([process.stdout], [], [], VERIFY_SECONDS)
                line = process.stdout.readline() if ready else ""
                step = left.pop(0)
                if not line:  # what it said is on stderr, or it hangs
                    process.kill()
                    yield step, None
                    break
                yield step, float(line)


# Timing


class Contender:
    """Something that computes one problem on rotating sets of operands."""

    def __init__(
        self, name: str, call: Callable[[Any, Any, Any], Any], sets: Sequence[tuple[Any, Any, Any]]
    ) -> None:
        self.name, self._call, self._sets, self._next = name, call, sets, 0

    def launch(self, count: int) -> None:
        """Start `count` products, each on the next set."""
        for _ in range(count):
            self._call(*self._sets[self._next])
            self._next = (self._next + 1) % len(self._sets)


def operand_sets(m: int, n: int, k: int, kind: Any, l2_bytes: int) -> list[tuple[Any, Any, Any]]:
    """Normal inputs and room for D, as many sets as it takes to go round past twice the L2."""
    import torch

    count = max(2, -(-2 * l2_bytes // (2 * (m * k + n * k + m * n)))) if m * n > 128 * 128 else 2
    return [
        (
            torch.randn((m, k), device="cuda").to(kind),
            torch.randn((n, k), device="cuda").to(kind),
            torch.empty((m, n), device="cuda", dtype=kind),
        )
        for _ in range(count)
    ]


def burst_seconds(contender: Contender, launches: int) -> float:
    """Seconds a launch, from events around a few launches after a pause."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    time.sleep(PAUSE_SECONDS)
    contender.launch(1)
    begin.record()
    contender.launch(launches)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / launches


def graph_seconds(contender: Contender, graphs: dict[str, Any]) -> float:
    """Seconds a launch by replay of a graph: what takes microseconds is otherwise bound by the host."""
    import torch

    if contender.name not in graphs:
        contender.launch(2)  # loads the code
        torch.cuda.synchronize()
        graphs[contender.name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[contender.name]):
            contender.launch(SMALL_LAUNCHES)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graphs[contender.name].replay()
    begin.record()
    graphs[contender.name].replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / SMALL_LAUNCHES


def block_seconds(contender: Contender, estimate: float) -> float:
    """Seconds a launch over a block that is long enough for clock and power to settle."""
    import torch

    count = max(4, round(BLOCK_SECONDS / estimate))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    contender.launch(count)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


class Clock:
    """SM clock in MHz from NVML; None where its bindings aren't installed."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            self._read: Callable[[], int | None] = lambda: None
            return
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._read = lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

    def mhz(self) -> int | None:
        """Now."""
        return self._read()


def row(
    step: Step, problem: Problem, times: Sequence[float], reference: Sequence[float], **more: Any
) -> dict[str, Any]:
    """A kernel row of a results file."""
    ours, theirs = spread(times), spread(reference)
    return {
        "problem": {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "batch": 1,
            "dtype": problem.dtype.value,
            "out_dtype": problem.out_dtype.value,
            "layout": "nt",
        },
        "step": step.number,
        "variant": step.name,
        "reason": "asked",
        "idea": step.idea,
        "seconds": ours,
        "reference": "cuBLAS (torch.mm)",
        "reference_seconds": theirs,
        "ratio": theirs["median"] / ours["median"],
        "tflops": problem.flops / ours["median"] / 1e12,
        **more,
    }


def measure(
    arch: str, dtype: DType, errors: dict[Step, float], ctas: int, rounds: int, sustained: bool
) -> list[dict[str, Any]]:
    """Rows of every step in `errors`."""
    import torch

    kind = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype.value])
    libraries, clock = Libraries(arch), Clock()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows: list[dict[str, Any]] = []

    def contender(step: Step, sets: Sequence[tuple[Any, Any, Any]]) -> Contender:
        function = load(libraries, step, dtype)
        return Contender(step.name, lambda a, b, d: function(a, b, d, ctas), sets)

    def cublas(sets: Sequence[tuple[Any, Any, Any]]) -> Contender:
        return Contender("cublas", lambda a, b, d: torch.mm(a, b.T, out=d), sets)

    for step, error in errors.items():
        if step.timed:
            continue
        size = SIZE[step.number]
        sets = operand_sets(*size, kind, l2_bytes)
        ours, theirs, graphs = contender(step, sets), cublas(sets), dict[str, Any]()
        pairs = [(graph_seconds(ours, graphs), graph_seconds(theirs, graphs)) for _ in range(rounds)]
        times, reference = zip(*pairs, strict=True)
        more = {"timing": "graph", "sm_clock_mhz": clock.mhz(), "error": error}
        rows.append(row(step, problem_of(*size, dtype), times, reference, **more))

    timed = [step for step in errors if step.timed]
    sets = operand_sets(*LADDER_SIZE, kind, l2_bytes)
    reference_kernel = cublas(sets)
    kernels = {step: contender(step, sets) for step in timed}
    problem = problem_of(*LADDER_SIZE, dtype)
    burst: dict[Any, list[float]] = {key: [] for key in (None, *timed)}
    for _ in range(rounds):
        burst[None].append(burst_seconds(reference_kernel, LAUNCHES))
        for step in timed:
            slow = bool(burst[step]) and burst[step][0] > 2e-3
            if slow and len(burst[step]) >= 5:
                continue  # milliseconds each: five tell enough
            burst[step].append(burst_seconds(kernels[step], 1 if slow else LAUNCHES))
    for step in timed:
        more = {"timing": "burst", "sm_clock_mhz": clock.mhz(), "error": errors[step]}
        rows.append(row(step, problem, burst[step], burst[None], **more))
    for step in timed if sustained else ():
        estimate, theirs = spread(burst[step])["median"], spread(burst[None])["median"]
        ours_blocks, reference_blocks = [], []
        for order in ("AB", "BA", "AB", "BA"):  # A B B A, twice
            for which in order:
                if which == "A":
                    ours_blocks.append(block_seconds(kernels[step], estimate))
                    mhz = clock.mhz()
                else:
                    reference_blocks.append(block_seconds(reference_kernel, theirs))
        more = {"timing": "sustained", "sm_clock_mhz": mhz, "error": errors[step]}
        rows.append(row(step, problem, ours_blocks, reference_blocks, **more))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'step':<26}{'timing':<11}{'M N K':<18}{'µs':>10}{'TFLOP/s':>9}{'× cuBLAS':>10}"]
    for r in rows:
        p = r["problem"]
        size = f"{p['m']} {p['n']} {p['k']}"
        micros = r["seconds"]["median"] * 1e6
        lines.append(
            f"{r['variant']:<26}{r['timing']:<11}{size:<18}{micros:>10.1f}{r['tflops']:>9.1f}{r['ratio']:>10.3f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description="Time the ladder.")
    parser.add_argument("--dtype", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--steps", default="1-8", help="which, such as 3-8 or 5 (default 1-8)")
    parser.add_argument("--rounds", type=int, default=40, help="bursts of each kernel")
    parser.add_argument(
        "--sustained", action="store_true", help="also in blocks of a quarter second, A B B A"
    )
    parser.add_argument("--machine", help="folder of the results (default: from the device's name)")
    parser.add_argument("--out", type=Path, help="write the results file into this folder instead")
    parser.add_argument("--verify", help=argparse.SUPPRESS)
    parser.add_argument("--arch", help=argparse.SUPPRESS)
    parser.add_argument("--ctas", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    dtype = DType(options.dtype)
    if options.verify:
        for number in options.verify.split(","):
            print(verify(options.arch, int(number), dtype, options.ctas), flush=True)
        return 0

    import torch

    device = torch.cuda.get_device_properties(0)
    arch = ARCH[device.major, device.minor]
    ctas = device.multi_processor_count
    first, _, last = options.steps.partition("-")
    wanted = LADDER[arch][int(first) - 1 : int(last or first)]
    errors: dict[Step, float] = {}
    for step, error in verified(arch, dtype, ctas, wanted):
        print(
            f"{step.name}: {'FAILED' if error is None else f'right, relative error {error:.2e}'}", flush=True
        )
        if error is not None:
            errors[step] = error
    rows = measure(arch, dtype, errors, ctas, options.rounds, options.sustained)
    print(table(rows))
    details = {
        "device": device.name,
        "sms": device.multi_processor_count,
        "arch": arch,
        "cuda": torch.version.cuda,
    }
    machine = options.machine or device.name.removeprefix("NVIDIA ").split()[0].lower()
    what = "ladder" if dtype is DType.FP16 else f"ladder-{dtype.value}"
    path = write(
        machine, what, rows, details=details, packages=["torch", "apache-tvm-ffi"], folder=options.out
    )
    print(path)
    return 0 if len(errors) == len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
