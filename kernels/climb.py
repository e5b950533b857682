"""Climbs the ladder on the device at hand: receives an architecture, hands on a table and a picture of the nine steps.

    python -m kernels ladder [--device auto|virtual|0] [--arch sm_90a] [--steps 1-9] [--out ladder.svg] [--list]

On a GPU each step's product is checked, then timed in bursts beside cuBLAS (benchmarks/ladder.py does so at length),
and the times are kept for this device, where the service's page finds them. On a virtual GPU each step computes a
small product instruction by instruction; the times are those of the model (kernels/predict.py), and labelled so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import predict, results
from kernels.device_file import default_folder
from kernels.ladder import LADDER, Step
from kernels.libraries import NotBuilt
from kernels.problem import DType, Problem
from kernels.schedules import CHIP_OF
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
from kernels.tune import gpu_index

ROUNDS = 10
SMALL_PRODUCT = {
    1: (128, 128, 64),
    2: (128, 128, 192),
}  # for the virtual GPU; the others: two tiles and edges
OTHER_PRODUCT = (264, 264, 136)
TOLERANCE = 1e-3  # relative error of fp16 results


@dataclass(frozen=True, slots=True)
class Rung:
    """What became of one step. `seconds` of a product of `size`, None where it wasn't timed."""

    step: Step
    size: tuple[int, int, int]
    right: bool
    detail: str
    seconds: float | None = None
    reference_seconds: float | None = None

    @property
    def rate(self) -> float | None:
        """FLOP/s."""
        m, n, k = self.size
        return None if self.seconds is None else 2.0 * m * n * k / self.seconds


def on_gpu(arch: str, steps: Sequence[Step], rounds: int = ROUNDS) -> Iterator[Rung]:
    """Check and time each step on GPU 0, its cuBLAS beside it in the same rounds."""
    import torch

    device = torch.cuda.get_device_properties(0)
    timer = Timer(Clock())
    for step in steps:
        size = SIZE.get(step.number, LADDER_SIZE)
        problem = problem_of(*size, DType.FP16)
        sets = operand_sets(*size, torch.float16, device.L2_cache_size)
        try:
            ours = Contender(step.name, launcher(arch, step, problem, device.multi_processor_count), sets)
        except NotBuilt as reason:
            yield Rung(step, size, False, str(reason))
            continue
        a, b, d = sets[0]
        ours.launch(1)
        torch.cuda.synchronize()
        reference = a.double() @ b.double().T
        error = float((d.double() - reference).norm() / reference.norm())
        if not error < TOLERANCE:
            yield Rung(step, size, False, f"relative error {error:.1e}")
            continue
        times = [_both(timer, step, ours, cublas(sets)) for _ in range(rounds)]
        mine, theirs = (statistics.median(each) for each in zip(*times, strict=True))
        yield Rung(step, size, True, f"relative error {error:.1e}", mine, theirs)


def _both(timer: Timer, step: Step, ours: Contender, theirs: Contender) -> tuple[float, float]:
    if not step.timed:
        return timer.graph(ours), timer.graph(theirs)
    return timer.burst(ours, LAUNCHES), timer.burst(theirs, LAUNCHES)


def on_virtual(arch: str, steps: Sequence[Step], root: Path | None = None) -> Iterator[Rung]:
    """Run each step on the virtual GPU, and say what the model expects of it on the chip."""
    from kernels.virtual.launch import Options
    from kernels.virtual.mutants import case_of
    from kernels.virtual.subject import Case, Subject, have

    told = {row["step"]: row["seconds"] for row in predict.table(CHIP_OF[arch])}
    for step in steps:
        size = SMALL_PRODUCT.get(step.number, OTHER_PRODUCT)
        case = case_of(arch, step.number)
        problem = Problem(*size, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
        case = Case(case.step, case.function, problem, case.variant)
        have(arch, [case.function], root)
        outcome = Subject(arch, root).verify(case, schedules=1, options=Options(detect=False))
        detail = f"{'×'.join(map(str, size))} computed" if outcome.ok else outcome.text()
        yield Rung(
            step,
            SIZE.get(step.number, LADDER_SIZE),
            outcome.ok,
            detail,
            told[step.number] if outcome.ok else None,
        )


# What is kept of a GPU


def kept_at(key: str) -> Path:
    """File of the times that were measured on a device."""
    return default_folder() / f"ladder-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"


def keep(rungs: Sequence[Rung], key: str, device: str) -> Path:
    """Write the measured times of a device, as a results file has them."""
    rows = [
        {
            "step": rung.step.number,
            "variant": rung.step.name,
            "problem": dict(zip("mnk", rung.size, strict=True)),
            "timing": "burst" if rung.step.timed else "graph",
            "seconds": {"median": rung.seconds},
            "reference_seconds": {"median": rung.reference_seconds},
            "ratio": rung.reference_seconds / rung.seconds,
            "sm_clock_mhz": None,
        }
        for rung in rungs
        if rung.seconds and rung.reference_seconds
    ]
    path = kept_at(key)
    results.write(path, "ladder", rows, machine={"name": "here", "device": device, "key": key})
    return path


def kept(key: str) -> dict[str, Any] | None:
    """What `keep` wrote for this device; None where the ladder never ran here."""
    try:
        found: dict[str, Any] = json.loads(kept_at(key).read_text())
    except FileNotFoundError:
        return None
    return found


# Table and picture


def show(rungs: Sequence[Rung], title: str, measured: bool) -> None:
    """The steps as a table."""
    from rich.console import Console
    from rich.table import Table

    time = "measured µs" if measured else "model's µs"
    out = Table("step", "the one idea", "right", "size", title=title, title_justify="left")
    for name in (time, "TFLOP/s", *(("× cuBLAS",) if measured else ())):
        out.add_column(name, justify="right")
    for rung in rungs:
        cells = [rung.step.name, rung.step.idea, f"{'yes' if rung.right else 'NO'}: {rung.detail}"]
        cells += ["×".join(map(str, rung.size))]
        cells += [
            "–" if x is None else f"{x:,.1f}" for x in (_scaled(rung.seconds, 1e6), _scaled(rung.rate, 1e-12))
        ]
        if measured:
            cells.append(
                f"{rung.reference_seconds / rung.seconds:.3f}"
                if rung.seconds and rung.reference_seconds
                else "–"
            )
        out.add_row(*cells, style=None if rung.right else "red")
    Console(width=None if sys.stdout.isatty() else 140).print(out)


def _scaled(x: float | None, by: float) -> float | None:
    return None if x is None else x * by


def picture(rungs: Sequence[Rung], title: str, out: Path, measured: bool) -> None:
    """The steps' rates as bars on a logarithmic scale, cuBLAS as a mark where it was measured beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    timed = [rung for rung in rungs if rung.rate is not None]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(timed) + 1.4), layout="constrained")
    names = [f"{rung.step.number} {' '.join(rung.step.name.split('_')[1:])}" for rung in timed]
    rates = [_scaled(rung.rate, 1e-12) or 0.0 for rung in timed]
    bars = axes.barh(names, rates, color="#b04c12" if measured else "#7a3fc0", height=0.6)
    axes.bar_label(bars, [f"{x:,.3g}" for x in rates], padding=4)
    for at, rung in enumerate(timed):
        if rung.reference_seconds and rung.seconds and rung.rate:
            theirs = rung.rate * rung.seconds / rung.reference_seconds * 1e-12
            label = "cuBLAS, same size" if not at else None
            axes.plot([theirs], [at], marker="|", markersize=18, color="#131820", linestyle="", label=label)
    axes.set(xscale="log", xlabel="TFLOP/s", title=title)
    axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlim(10 ** math.floor(math.log10(min(rates))), max(rates) * 3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the status is 1 where a step is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kernels ladder", description=__doc__)
    parser.add_argument("--device", default="auto", help="auto (a GPU, else virtual), virtual, or 0")
    parser.add_argument("--arch", choices=sorted(LADDER), help="of the virtual GPU (default sm_90a)")
    parser.add_argument("--steps", default="1-9", help="which, such as 3-8 or 5")
    parser.add_argument(
        "--out", type=Path, default=Path("ladder.svg"), help="the picture: .svg, .png or .pdf"
    )
    parser.add_argument("--root", type=Path, help="folder of built kernels")
    parser.add_argument("--list", action="store_true", help="only name the steps and the one idea of each")
    options = parser.parse_args(argv)
    index = None if options.device == "virtual" or options.list else gpu_index(options.device)
    arch, name, key = options.arch or "sm_90a", "", ""
    if index is not None:
        from kernels.device import describe_cuda

        device = describe_cuda(index)
        arch, name, key = ARCH[_capability(index)], device.name, device.key
    first, _, last = options.steps.partition("-")
    steps = LADDER[arch][int(first) - 1 : int(last or first)]
    if options.list:
        show([Rung(step, SIZE.get(step.number, LADDER_SIZE), True, "not run") for step in steps], arch, False)
        return 0
    if index is None:
        title = f"{CHIP_OF[arch].upper()}: a model's times, not measured (fp16)"
        rungs = list(on_virtual(arch, steps, options.root))
    else:
        title = f"{name}: measured here (fp16, bursts)"
        rungs = list(on_gpu(arch, steps))
        print(f"kept for the service's page: {keep(rungs, key, name)}")
    show(rungs, title, index is not None)
    try:
        picture(rungs, title, options.out, index is not None)
        print(options.out)
    except ImportError:
        print("no picture: it needs matplotlib (pip install 'gemm-service[plot]')", file=sys.stderr)
    return 0 if all(rung.right for rung in rungs) else 1


def _capability(index: int) -> tuple[int, int]:
    import torch

    seen = torch.cuda.get_device_properties(index)
    return seen.major, seen.minor
