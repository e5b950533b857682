"""The ladder against cuBLAS: receives a GPU and built libraries, hands on ladder.json and a table.

    python -m benchmarks.ladder [--sustained] [--dtype fp16] [--machine h200] [--rounds 40]

Verifies first: each step on ragged shapes, integer inputs bit for bit and normal ones within the error bound
of the API, in a subprocess with a time limit; a step that is wrong or hangs isn't timed, and the exit status
is 1. Steps from 3 on are timed at 4096³, Steps 1 and 2 at their own sizes, each interleaved with cuBLAS.
Needs torch and tvm_ffi; no compiler.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, add_places, section, short_name, spread, write
from kernels.ladder import LADDER, Step
from kernels.problem import DType, Problem
from kernels.timing import (
    ARCH,
    LADDER_SIZE,
    LAUNCHES,
    SIZE,
    Clock,
    Contender,
    Timer,
    cublas,
    launcher,
    operand_sets,
    problem_of,
)

README = Path(__file__).parents[1] / "kernels" / "README.md"
MACHINE = {"sm_90a": "h200", "sm_100a": "b200"}
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
SLOW_SECONDS, SLOW_ROUNDS = 2e-3, 5  # what takes so long is told by so few


# Verification, in a subprocess


def verify(arch: str, number: int, dtype: DType, ctas: int) -> float:
    """Check one step on every shape in its reach; returns the largest relative error, raises if wrong."""
    import torch

    step = LADDER[arch][number - 1]
    kind = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype.value])
    generator = torch.Generator("cuda").manual_seed(number)
    worst = 0.0
    for m, n, k in SHAPES:
        problem = problem_of(m, n, k, dtype)
        if number < 9 and step.unsupported(problem):
            continue
        if number == 9 and (m % 8 or n % 8 or k % 8):
            continue  # these go through packing, which the suite covers
        launch = launcher(arch, step, problem, ctas)
        whole = [
            torch.randint(-2, 3, s, device="cuda", generator=generator).to(kind) for s in ((m, k), (n, k))
        ]
        normal = [torch.randn(s, device="cuda", generator=generator).to(kind) for s in ((m, k), (n, k))]
        for exact, (a, b) in ((True, whole), (False, normal)):
            outs = [torch.full((m, n), float("nan"), device="cuda", dtype=kind) for _ in range(3)]
            for out in outs:
                launch(a, b, out)
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


class Ladder:
    """Measures the steps that were found right."""

    def __init__(self, arch: str, dtype: DType, errors: dict[Step, float], ctas: int, rounds: int) -> None:
        import torch

        self.arch, self.dtype, self.errors, self.ctas, self.rounds = arch, dtype, errors, ctas, rounds
        self.kind = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[dtype.value])
        self.l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.timer = Timer(Clock())

    def _sets(self, problem: Problem) -> list[tuple[Any, Any, Any]]:
        return operand_sets(problem.m, problem.n, problem.k, self.kind, self.l2_bytes)

    def _contender(self, step: Step, problem: Problem, sets: list[tuple[Any, Any, Any]]) -> Contender:
        return Contender(step.name, launcher(self.arch, step, problem, self.ctas), sets)

    def _more(self, step: Step, timing: str) -> dict[str, Any]:
        return {"timing": timing, "sm_clock_mhz": self.timer.mhz, "error": self.errors[step]}

    def single(self) -> list[dict[str, Any]]:
        """Steps 1 and 2, at the size of one tile."""
        rows = []
        for step in self.errors:
            if step.timed:
                continue
            problem = problem_of(*SIZE[step.number], self.dtype)
            sets = self._sets(problem)
            ours, theirs = self._contender(step, problem, sets), cublas(sets)
            pairs = [(self.timer.graph(ours), self.timer.graph(theirs)) for _ in range(self.rounds)]
            times, reference = zip(*pairs, strict=True)
            rows.append(row(step, problem, times, reference, **self._more(step, "graph")))
        return rows

    def square(self, sustained: bool) -> list[dict[str, Any]]:
        """Steps from 3 on, at the ladder's size."""
        problem = problem_of(*LADDER_SIZE, self.dtype)
        sets = self._sets(problem)
        reference = cublas(sets)
        kernels = {s: self._contender(s, problem, sets) for s in self.errors if s.timed}
        ours: dict[Step, list[float]] = {step: [] for step in kernels}
        more: dict[Step, dict[str, Any]] = {}
        theirs: list[float] = []
        for _ in range(self.rounds):
            theirs.append(self.timer.burst(reference, LAUNCHES))
            for step, kernel in kernels.items():
                slow = bool(ours[step]) and ours[step][0] > SLOW_SECONDS
                if slow and len(ours[step]) >= SLOW_ROUNDS:
                    continue
                ours[step].append(self.timer.burst(kernel, 1 if slow else LAUNCHES))
                more[step] = self._more(step, "burst")
        rows = [row(step, problem, times, theirs, **more[step]) for step, times in ours.items()]
        for step, kernel in kernels.items() if sustained else ():
            times, beside = self._blocks(
                kernel, spread(ours[step])["median"], reference, spread(theirs)["median"]
            )
            rows.append(row(step, problem, times, beside, **self._more(step, "sustained")))
        return rows

    def _blocks(
        self, kernel: Contender, estimate: float, reference: Contender, its_estimate: float
    ) -> tuple[list[float], list[float]]:
        """Blocks in the order A B B A, twice, each at its own power; the clock kept is the kernel's."""
        ours, theirs = [], []
        for turn in range(4):
            if turn % 2:
                theirs.append(self.timer.block(reference, its_estimate))
            ours.append(self.timer.block(kernel, estimate))
            mhz = self.timer.mhz
            if not turn % 2:
                theirs.append(self.timer.block(reference, its_estimate))
        self.timer.mhz = mhz
        return ours, theirs


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


# Its place in the README


def markdown(arch: str, rows: Sequence[dict[str, Any]]) -> str:
    """The ladder as a table in Markdown; `rows` of a results file, none where nothing was measured."""
    measured = bool(rows)
    head = ["step", "the one idea", "file"]
    if measured:
        head += ["µs", "TFLOP/s", "× cuBLAS, bursts", "× cuBLAS, sustained"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 3 + "---:|" * (len(head) - 3)]
    for step in LADDER[arch]:
        path = step.module(arch).removeprefix("kernels.").replace(".", "/") + ".py"
        cells = [str(step.number), step.idea, f"[{path}]({path})"]
        if measured:
            found = {r["timing"]: r for r in rows if r["step"] == step.number}
            first = found.get("burst") or found.get("graph")
            cells += (
                [f"{first['seconds']['median'] * 1e6:,.1f}", f"{first['tflops']:.1f}"] if first else ["", ""]
            )
            cells += [f"{r['ratio']:.3f}" if (r := each) else "" for each in (first, found.get("sustained"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def caption(document: dict[str, Any]) -> str:
    """Where and when the figures of a results file were taken."""
    machine, versions = document["machine"], document["versions"]
    return (
        f"Measured on one {machine['device']} on {document['date'][:10]} with torch {versions['torch']} by "
        f"`{document['command']}` (benchmarks/results/{machine['name']}/{document['what']}.json): medians; fp16, "
        f"normal inputs, sets rotated past L2, interleaved with cuBLAS. Above 1 is faster than cuBLAS."
    )


def readme(text: str, results: Path) -> str:
    """The README with its tables made anew from the results."""
    for arch, machine in MACHINE.items():
        file = results / machine / "ladder.json"
        document = json.loads(file.read_text()) if file.is_file() else {"rows": []}
        told = markdown(arch, document["rows"])
        if document["rows"]:
            told += f"\n\n{caption(document)}"
        text = section(text, f"<!-- ladder {arch}: python -m benchmarks.ladder --readme -->\n", f"{told}\n")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description="Time the ladder.")
    parser.add_argument("--dtype", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--steps", default="1-9", help="which, such as 3-8 or 5 (default 1-9)")
    parser.add_argument("--rounds", type=int, default=40, help="bursts of each kernel")
    parser.add_argument(
        "--sustained", action="store_true", help="also in blocks of a quarter second, A B B A"
    )
    add_places(parser, None)
    parser.add_argument("--verify", help=argparse.SUPPRESS)
    parser.add_argument("--arch", help=argparse.SUPPRESS)
    parser.add_argument("--ctas", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--readme", action="store_true", help="only write kernels/README.md from the results")
    options = parser.parse_args(argv)
    if options.readme:
        README.write_text(readme(README.read_text(), RESULTS))
        return 0
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
    ladder = Ladder(arch, dtype, errors, ctas, options.rounds)
    rows = ladder.square(options.sustained)
    print(table(rows))  # before anything else can go wrong
    rows = ladder.single() + rows
    print(table(rows))
    details = {
        "device": device.name,
        "sms": device.multi_processor_count,
        "arch": arch,
        "cuda": torch.version.cuda,
    }
    machine = options.machine or short_name(device.name)
    what = "ladder" if dtype is DType.FP16 else f"ladder-{dtype.value}"
    path = write(
        machine, what, rows, details=details, packages=["torch", "apache-tvm-ffi"], folder=options.out
    )
    print(path)
    return 0 if len(errors) == len(wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
