"""Measured times for the selector: receives shapes and a device, hands on a table kept by device, driver and build.

    python -m kernels tune [--device auto] [--shape 4096x4096x4096 …] [--dtype fp16] [--layout nt] [--fast]

Each variant that takes a shape is timed on inputs from a normal distribution, several sets in turn so that no
cache holds them; the variants take turns, and the median counts. On a GPU a round is a replayed graph, since
queueing a kernel takes longer than many a kernel. The table overrides the selector's estimates on this very
device; a second run tells what the choice by the first one's times loses.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import cublas, reference
from kernels.device import Device, describe_cpu
from kernels.device_file import DeviceFile, default_folder
from kernels.problem import DType, Problem
from kernels.selector import Variant, choose, table_key

if TYPE_CHECKING:
    from rich.table import Table

    from kernels.runtime import Runtime

GPU_SHAPES = (
    "512x512x512", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192",
    "16384x4096x4096", "4096x14336x4096", "4096x4096x14336", "8192x28672x8192",
    "1x8192x8192", "16x8192x8192", "64x8192x8192", "128x8192x8192", "256x8192x8192",
    "4095x4097x4100", "1000x3000x500", "64*512x512x512",
)  # fmt: skip
CPU_SHAPES = ("64x64x64", "256x256x256", "1024x1024x1024", "1x1024x1024", "16x1024x1024", "8*128x128x128")
ROUNDS = 7
ROUND_SECONDS = 0.02  # of one variant in one round
SETS_BYTES = 256 << 20  # operands in turn: more than any L2 holds

MOST = 1000  # products in a round

Run = Callable[[Variant, int], None]
Round = Callable[[Variant], float]  # seconds a product; the first of a variant warms up


@dataclass(frozen=True, slots=True)
class Timed:
    """What was measured for one problem: seconds by variant, fastest first, and what the estimate would choose."""

    problem: Problem
    seconds: Mapping[str, float]
    estimated: str

    @property
    def best(self) -> str:
        """The fastest variant."""
        return next(iter(self.seconds))

    @property
    def loss(self) -> float:
        """Time of the estimate's choice over that of the best: 1 where it chose the best."""
        return self.seconds[self.estimated] / self.seconds[self.best]


class Times:
    """Table of measured seconds on disk, for one device, driver and build."""

    def __init__(self, device: Device, build: str, folder: Path | None = None) -> None:
        self._file = DeviceFile(folder or default_folder(), "times", device.key, build)
        self.path = self._file.path

    def read(self) -> dict[str, float]:
        """Seconds by `selector.table_key`; nothing where nothing was measured here."""
        return {key: float(value) for key, value in self._file.read().items()}

    def add(self, table: Mapping[str, float]) -> None:
        """Merge newer times in. Raises OSError."""
        self._file.update(lambda known: known | dict(table))


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """M, N, K and batch of "MxNxK" or "batch*MxNxK"."""
    batch, star, rest = text.rpartition("*")
    try:
        m, n, k = (int(part) for part in rest.split("x"))
        return m, n, k, int(batch) if star else 1
    except ValueError:
        raise argparse.ArgumentTypeError(f"a shape is MxNxK or batch*MxNxK, not {text!r}") from None


def problem_of(shape: str, dtype: DType, layout: str, *, invariant: bool) -> Problem:
    """A compact problem of a shape."""
    m, n, k, batch = parse_shape(shape)
    trans_a, trans_b = layout[0] == "t", layout[1] == "t"
    return Problem(m, n, k, batch, dtype, dtype, trans_a=trans_a, trans_b=trans_b, batch_invariant=invariant)


def cpu_build() -> str:
    """What a CPU's times depend on beside the machine: the libraries' versions."""
    found = []
    for package in ("numpy", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def tune_cpu(problems: Sequence[Problem]) -> Iterator[Timed]:
    """Time the CPU's references."""
    device = describe_cpu()
    variants = reference.variants()
    for problem in problems:
        sets = list(_cpu_sets(problem))

        def run(variant: Variant, turn: int, sets: Any = sets, problem: Problem = problem) -> None:
            a, b, out = sets[turn % len(sets)]
            assert isinstance(variant, reference.Reference)
            reference.compute(problem, a, b, out, backend=variant.backend)

        yield _timed(problem, variants, device, _Loops(run))


def _cpu_sets(problem: Problem) -> Iterator[tuple[Any, Any, Any]]:
    import numpy as np

    from kernels.elementwise import NUMPY

    random = np.random.default_rng(5)
    kind = NUMPY[problem.dtype]
    shapes = _stored(problem)
    for _ in range(_sets(problem, 8)):
        a, b = (random.standard_normal(shape, np.float32).astype(kind) for shape in shapes[:2])
        yield a, b, np.empty(shapes[2], NUMPY[problem.out_dtype])


def _stored(problem: Problem) -> tuple[tuple[int, ...], ...]:
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    a = (k, m) if problem.trans_a else (m, k)
    b = (n, k) if problem.trans_b else (k, n)
    return (batch, *a), (batch, *b), (batch, m, n)


def _sets(problem: Problem, most: int) -> int:
    """How many sets of operands to take in turn."""
    moved = max(problem.bytes_read + problem.bytes_written, 1)
    return max(2, min(most, SETS_BYTES // moved))


def usable(runtime: Runtime) -> list[Variant]:
    """The variants that may run on a GPU."""
    return [each for each in runtime.variants if each.name not in runtime.barred]


def tune_gpu(runtime: Runtime, problems: Sequence[Problem]) -> Iterator[Timed]:
    """Time every variant that may run on a GPU."""
    from kernels.operands import as_packed

    for problem in problems:
        sets = list(_gpu_sets(problem, runtime.place))
        fitting = as_packed(problem)
        able = [v for v in usable(runtime) if v.unsupported(fitting, runtime.device) is None]
        able = [v for v in able if runtime.has(v, fitting)]

        def run(variant: Variant, turn: int, sets: Any = sets, problem: Problem = problem) -> None:
            operands = sets[turn % len(sets)]
            if variant.name == cublas.NAME:
                cublas.compute(problem, operands.a, operands.b, operands.d)
            else:
                runtime.launch(variant, problem, operands)

        yield _timed(fitting, able, runtime.device, _Graphs(run))


def _gpu_sets(problem: Problem, place: str) -> Iterator[Any]:
    import torch

    from kernels.operands import Operands

    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    shapes = _stored(problem)
    for _ in range(_sets(problem, 64)):
        a, b = (torch.randn(shape, device=place).to(kinds[problem.dtype]) for shape in shapes[:2])
        a = a.transpose(1, 2) if problem.trans_a else a
        b = b.transpose(1, 2) if problem.trans_b else b
        yield Operands(a, b, torch.empty(shapes[2], dtype=kinds[problem.out_dtype], device=place))


def _timed(problem: Problem, variants: Sequence[Variant], device: Device, seconds: Round) -> Timed:
    """Rounds in which each variant has its turn; the median over rounds."""
    for each in variants:
        seconds(each)
    rounds = [{each.name: seconds(each) for each in variants} for _ in range(ROUNDS)]
    medians = {each.name: statistics.median(turn[each.name] for turn in rounds) for each in variants}
    estimated = choose(problem, device, variants=variants).variant
    if problem.batch_invariant:
        # only what may run counts as best
        allowed = {
            c.variant for c in choose(problem, device, variants=variants).candidates if c.because is None
        }
        medians = {name: seconds for name, seconds in medians.items() if name in allowed} or medians
    return Timed(problem, dict(sorted(medians.items(), key=lambda item: item[1])), estimated)


def _repeats(once: float) -> int:
    """How many products of that many seconds make a round."""
    return max(1, min(MOST, math.ceil(ROUND_SECONDS / max(once, 1e-7))))


class _Loops:
    """Rounds on a CPU: products one after the other."""

    def __init__(self, run: Run) -> None:
        self._run, self._counts = run, dict[str, int]()

    def __call__(self, variant: Variant) -> float:
        """Seconds a product."""
        count = self._counts.get(variant.name)
        if count is None:
            self._run(variant, 0)
            once = self._seconds(variant, 1)
            count = self._counts[variant.name] = _repeats(once)
        return self._seconds(variant, count)

    def _seconds(self, variant: Variant, count: int) -> float:
        start = time.perf_counter()
        for turn in range(count):
            self._run(variant, turn)
        return (time.perf_counter() - start) / count


class _Graphs:
    """Rounds on a GPU: replays of a graph of products, between events."""

    def __init__(self, run: Run) -> None:
        self._run, self._graphs = run, dict[str, tuple[Any, int]]()

    def __call__(self, variant: Variant) -> float:
        """Seconds a product."""
        import torch

        found = self._graphs.get(variant.name)
        if found is None:
            found = self._graphs[variant.name] = self._captured(variant)
        graph, count = found
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    def _captured(self, variant: Variant) -> tuple[Any, int]:
        import torch

        self._run(variant, 0)  # loads its code
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._run(variant, 1)
        torch.cuda.synchronize()
        count = _repeats(time.perf_counter() - start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(count):
                self._run(variant, turn)
        return graph, count


def loss_by_table(
    timed: Sequence[Timed], known: Mapping[str, float], device: Device, variants: Sequence[Variant]
) -> float | None:
    """What the choice by an earlier run's times loses against the fastest of this one, in the geometric mean.

    Over the problems that the earlier run measured; None where there are none.
    """
    losses = []
    for each in timed:
        if any(table_key(name, each.problem) in known for name in each.seconds):
            choice = choose(each.problem, device, known, variants=variants).variant
            losses.append(each.seconds[choice] / each.seconds[each.best])
    return math.exp(statistics.fmean(map(math.log, losses))) if losses else None


def table_of(timed: Sequence[Timed]) -> Table:
    """What was measured, for people."""
    from rich.table import Table

    table = Table("problem", "fastest", "time", "TFLOP/s", "estimate chose", "loses")
    for each in timed:
        p = each.problem
        shape = f"{p.batch}*" * (p.batch > 1) + f"{p.m}x{p.n}x{p.k}"
        seconds = each.seconds[each.best]
        table.add_row(
            shape,
            each.best,
            f"{seconds * 1e6:,.1f} µs",
            f"{p.flops / seconds / 1e12:,.2f}",
            each.estimated,
            f"{(each.loss - 1) * 100:.1f} %",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    from rich.console import Console
    from rich.progress import track

    parser = argparse.ArgumentParser(
        prog="python -m kernels tune", description="Measure variants on this device."
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or the number of a GPU")
    parser.add_argument("--shape", action="append", help="MxNxK or batch*MxNxK; may be given again")
    parser.add_argument(
        "--dtype", type=DType, default=None, choices=list(DType), help="default: fp16, fp32 on a CPU"
    )
    parser.add_argument(
        "--layout", default="nn", choices=["nn", "nt", "tn", "tt"], help="t: stored transposed"
    )
    parser.add_argument("--fast", action="store_true", help="without batch_invariant")
    parser.add_argument(
        "--folder", type=Path, help="where the table is kept (default: $GEMM_CACHE or the cache)"
    )
    options = parser.parse_args(argv)
    index = gpu_index(options.device)
    shapes = options.shape or (CPU_SHAPES if index is None else GPU_SHAPES)
    dtype = options.dtype or (DType.FP32 if index is None else DType.FP16)
    problems = [problem_of(shape, dtype, options.layout, invariant=not options.fast) for shape in shapes]
    variants: Sequence[Variant]
    if index is None:
        device, build, measured = describe_cpu(), cpu_build(), tune_cpu(problems)
        variants = reference.variants()
    else:
        from kernels.runtime import runtime

        gpu = runtime(index)
        device, build, measured = gpu.device, gpu.build_hash, tune_gpu(gpu, problems)
        variants = usable(gpu)
    console = Console(stderr=True)
    timed = list(track(measured, total=len(problems), description=device.name, console=console))
    times = Times(device, build, options.folder)
    known = times.read()
    times.add({table_key(name, each.problem): s for each in timed for name, s in each.seconds.items()})
    Console().print(table_of(timed))
    loss = math.exp(statistics.fmean(math.log(each.loss) for each in timed))
    print(f"the estimate's choice takes {loss:.3f} × the fastest, in the geometric mean; table: {times.path}")
    kept = loss_by_table(timed, known, device, variants)
    if kept is not None:
        print(f"the choice by the times of an earlier run takes {kept:.3f} × the fastest of this one")
    return 0


def gpu_index(device: str) -> int | None:
    """Number of the GPU that is meant, None for the CPU. "auto": GPU 0 where torch sees one."""
    if device == "cpu":
        return None
    if device != "auto":
        return int(device)
    if not reference.has_torch():
        return None
    import torch

    return 0 if torch.cuda.is_available() else None
