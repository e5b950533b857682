"""Own kernels against cuBLAS and cuBLASLt: receives a GPU and libraries, hands on suite.json and a table.

    python -m benchmarks.suite [--dtype fp16] [--layout nn] [--only TEXT] [--all] [--profile] [--machine h200]
    python -m benchmarks.suite --layouts    # nt, tn and tt at 4096³ and 8192³
    python -m benchmarks.suite --rows       # so many rows as no tile has, by the weights of a linear layer

Each shape: the selector (no table) names a variant; its D is checked element by element by the API's error
bound against fp64, NaN before the launch; then all are timed. A contender is a CUDA graph of some launches
over sets of normal inputs that together exceed L2. Burst: after a pause one replay each, in turn. Sustained:
blocks of a fifth of a second, forth and back twice (A B C C B A, B C A A C B), which is what counts; each begins
after as long of the same work. A ratio is the faster reference's median over ours. What TMA can't
address is packed within the timed graph. With --all every own variant is timed in short blocks as well, which
tells how far the selector was from the best (selector.json). With --profile what bounds each shape below its goal
is read from NVML and ncu (benchmarks/profile.py).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kernels.operands
from benchmarks.record import RESULTS, add_places, gpu_machine, section, short_name, spread, write
from kernels.device import Device, describe_cuda
from kernels.hopper.variants import Step9, variants
from kernels.operands import as_packed
from kernels.problem import DType, Problem
from kernels.runtime import Runtime
from kernels.selector import choose

SHAPES = (  # batch, m, n, k
    (1, 512, 512, 512),
    (1, 1024, 1024, 1024),
    (1, 2048, 2048, 2048),
    (1, 4096, 4096, 4096),
    (1, 8192, 8192, 8192),
    (1, 16384, 4096, 4096),
    (1, 4096, 14336, 4096),
    (1, 4096, 4096, 14336),
    (1, 8192, 28672, 8192),
    (1, 1, 8192, 8192),
    (1, 16, 8192, 8192),
    (1, 64, 8192, 8192),
    (1, 128, 8192, 8192),
    (1, 256, 8192, 8192),
    (1, 4095, 4097, 4100),
    (1, 1000, 3000, 500),
    (64, 512, 512, 512),
)
LAYOUT_SHAPES = ((1, 4096, 4096, 4096), (1, 8192, 8192, 8192))  # timed with transposed operands too
ROWS = (24, 40, 72, 100, 129, 150, 180, 200, 240, 300)  # M, before N = K = 8192
README = Path(__file__).parents[1] / "kernels" / "README.md"
BEGIN = "<!-- suite: python -m benchmarks.suite --readme -->\n"
BEGIN_ROWS = "<!-- rows: python -m benchmarks.suite --readme -->\n"
LIBRARIES = {"cuBLAS": "cublas", "cuBLASLt": "cublaslt"}
BLOCK_SECONDS = 0.2
SUSTAINED_TURNS = 4
NEAR = 1.3  # times the fastest burst: what takes longer is timed once
WARM_SECONDS = 1.2  # before sustained blocks: the power cap acts on about a second's mean
PAUSE_SECONDS = 0.01
GRAPH_SECONDS = 2e-3  # about what a graph holds, so that gaps between replays don't count
Operands = tuple[Any, Any, Any]


@dataclass
class Contender:
    """A graph of `launches` products, replayed as a whole."""

    name: str
    graph: Any
    launches: int
    burst: list[float]
    sustained: list[float]
    clocks: list[int]

    def replay_seconds(self) -> float:
        """Seconds a launch of one replay."""
        begin, end = _events()
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / self.launches

    def warm(self, seconds: float) -> None:
        """Keep the chip busy, and look at nothing."""
        import torch

        for _ in range(self._replays(seconds)):
            self.graph.replay()
        torch.cuda.synchronize()

    def block(self, seconds: float, clock: Callable[[], int]) -> None:
        """One sustained block, after as much that isn't timed; the clock is read in its second half."""
        count = self._replays(seconds)
        begin, end = _events()
        started = time.perf_counter()
        for _ in range(count):
            self.graph.replay()
        begin.record()
        for _ in range(count):
            self.graph.replay()
        end.record()
        time.sleep(
            max(0.0, started + 1.7 * seconds - time.perf_counter())
        )  # a full queue has held replays up
        self.clocks.append(clock())
        end.synchronize()
        self.sustained.append(float(begin.elapsed_time(end)) / 1e3 / self.launches / count)

    def _replays(self, seconds: float) -> int:
        """How many take about so long."""
        return max(2, round(seconds / (statistics.median(self.burst) * self.launches)))


def _events() -> tuple[Any, Any]:
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def contender(
    name: str, launch: Callable[[Operands], None], sets: Sequence[Operands], estimate: float
) -> Contender:
    """Capture launches over all sets, as many rounds as make a graph long enough."""
    import torch

    rounds = max(1, math.ceil(GRAPH_SECONDS / (estimate * len(sets))))
    launch(sets[0])  # loads the code
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for each in sets:
                launch(each)
    made = Contender(name, graph, rounds * len(sets), [], [], [])
    made.replay_seconds()
    return made


class Clock:
    """SM clock in MHz, 0 where NVML's bindings aren't installed."""

    def __init__(self) -> None:
        self._read: Callable[[], int] = lambda: 0
        try:
            import pynvml
        except ImportError:
            return
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._read = lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

    def __call__(self) -> int:
        """Now."""
        return self._read()


class Ours:
    """Launches own variants through the runtime, which packs A and B where their rows aren't TMA's."""

    def __init__(self, device: Device, family: Sequence[Step9] | None = None) -> None:
        self.device, self.runtime = device, Runtime(device, variants=family or variants())

    def launcher(
        self, variant: Step9, problem: Problem, blocks: int | None = None
    ) -> Callable[[Operands], None]:
        """Function of a set of operands as they lie. blocks: as in `Runtime.launch`."""

        def launch(operands: Operands) -> None:
            a, b, d = operands
            self.runtime.launch(variant, problem, kernels.operands.Operands(a, b, d), blocks=blocks)

        return launch


def operand_sets(problem: Problem, l2_bytes: int) -> list[Operands]:
    """Normal inputs and room for D, in as many sets as exceed twice the L2."""
    import torch

    kind = torch_type(problem.dtype)
    size = problem.bytes_read + problem.bytes_written
    count = max(2, min(16, math.ceil(2 * l2_bytes / size) + 1))

    def matrix(rows: int, columns: int, transposed: bool) -> Any:
        shape = (problem.batch, *((columns, rows) if transposed else (rows, columns)))
        stored = torch.empty(shape, device="cuda", dtype=kind).normal_()
        return stored.transpose(1, 2) if transposed else stored

    return [
        (
            matrix(problem.m, problem.k, problem.trans_a),
            matrix(problem.k, problem.n, problem.trans_b),
            torch.empty((problem.batch, problem.m, problem.n), device="cuda", dtype=kind),
        )
        for _ in range(count)
    ]


def torch_type(dtype: DType) -> Any:
    """torch's dtype of that name."""
    import torch

    return {DType.FP16: torch.float16, DType.BF16: torch.bfloat16, DType.FP32: torch.float32}[dtype]


def checked(launch: Callable[[Operands], None], operands: Operands) -> float:
    """Relative error of D; raises where an element is beyond the API's bound, or wasn't written."""
    import torch

    a, b, d = operands
    d.fill_(math.nan)
    launch(operands)
    torch.cuda.synchronize()
    wrong, gap, norm = 0, 0.0, 0.0
    info = torch.finfo(d.dtype)
    for layer in range(d.shape[0]):
        left, right = a[layer].double(), b[layer].double()
        reference = left @ right
        bound = left.abs() @ right.abs()
        bound *= 2.0**-22 * (a.shape[2] / 16 + 4)
        ulp = torch.exp2(torch.frexp(reference.abs().clamp(min=info.smallest_normal))[1] - 1.0) * info.eps
        bound += ulp / 2
        error = (d[layer].double() - reference).abs_()
        wrong += int((~(error <= bound)).sum())
        gap, norm = gap + float(error.square().sum()), norm + float(reference.square().sum())
    if wrong:
        raise AssertionError(f"{wrong} of {d.numel()} elements are wrong")
    return math.sqrt(gap / norm)


def reference(batch: int, library: str) -> Callable[[Operands], None]:
    """torch's product by that library, without reduced-precision reductions."""
    import torch

    def launch(operands: Operands) -> None:
        a, b, d = operands
        torch.backends.cuda.preferred_blas_library(LIBRARIES[library])
        if batch == 1:
            torch.mm(a[0], b[0], out=d[0])
        else:
            torch.bmm(a, b, out=d)

    return launch


def exact_references() -> None:
    """Keep torch's products to fp32 sums and IEEE fp32."""
    import torch

    for flag in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_tf32",
    ):
        setattr(torch.backends.cuda.matmul, flag, False)


def problem_of(shape: tuple[int, int, int, int], dtype: DType, layout: str) -> Problem:
    """The suite's problem: 16-bit output, no epilogue, bits free to depend on M."""
    batch, m, n, k = shape
    return Problem(
        m, n, k, batch, dtype=dtype, out_dtype=dtype, trans_a=layout[0] == "t", trans_b=layout[1] == "t",
        batch_invariant=False,
    )  # fmt: skip


def measure(
    problem: Problem, ours: Ours, clock: Clock, rounds: int, everything: bool
) -> list[dict[str, Any]]:
    """Rows of one problem."""
    import torch

    device = ours.device
    family = {each.name: each for each in variants()}
    fits = as_packed(problem)
    choice = choose(fits, device, variants=tuple(family.values()))
    invariant = choose(replace(fits, batch_invariant=True), device, variants=tuple(family.values()))
    sets = operand_sets(problem, device.l2_bytes)
    estimate = choice.seconds
    launchers = {choice.variant: ours.launcher(family[choice.variant], problem)}
    launchers.setdefault(invariant.variant, ours.launcher(family[invariant.variant], problem))
    errors = {name: checked(launch, sets[0]) for name, launch in launchers.items()}
    launchers |= {name: reference(problem.batch, name) for name in LIBRARIES}
    found = race(launchers, sets, estimate, clock, rounds)
    rows = []
    for picked, invariance in ((choice, False), (invariant, True)):
        for timing in ("burst", "sustained"):
            mine = found[picked.variant]
            best = better(found, timing)
            times, theirs = getattr(mine, timing), getattr(best, timing)
            rows.append(
                {
                    "problem": described(problem),
                    "batch_invariant": invariance,
                    "variant": picked.variant,
                    "reason": picked.reason.value,
                    "seconds": spread(times),
                    "estimated_seconds": picked.seconds,
                    "reference": best.name,
                    "reference_seconds": spread(theirs),
                    "references": {name: spread(getattr(found[name], timing)) for name in LIBRARIES},
                    "timing": timing,
                    "sm_clock_mhz": mine.clocks,
                    "reference_sm_clock_mhz": best.clocks,
                    "ratio": statistics.median(theirs) / statistics.median(times),
                    "tflops": problem.flops / statistics.median(times) / 1e12,
                    "bytes_per_second": (problem.bytes_read + problem.bytes_written)
                    / statistics.median(times),
                    "error": errors[picked.variant],
                }
            )
    if everything:
        rows += _alternatives(
            fits, problem, ours, clock, sets, found, statistics.median(found[choice.variant].sustained)
        )
    del found
    torch.cuda.empty_cache()
    return rows


def race(
    launchers: Mapping[str, Callable[[Operands], None]],
    sets: Sequence[Operands],
    estimate: float,
    clock: Callable[[], int],
    rounds: int,
) -> dict[str, Contender]:
    """Time launchers against each other, by name: bursts in turn, then sustained blocks forth and back, twice.

    Before these the chip is warm and its clock held down, or whoever comes first has it all; before each the clock
    settles on what the runner draws. Two blocks of a runner differ by up to 2 %.
    estimate: seconds of one launch, about.
    """
    runners = [contender(name, launch, sets, estimate) for name, launch in launchers.items()]
    for turn in range(rounds):
        time.sleep(PAUSE_SECONDS)
        first = turn % len(runners)  # each comes first as often: the clock falls within a burst
        for runner in runners[first:] + runners[:first]:
            runner.burst.append(runner.replay_seconds())
    runners[-1].warm(WARM_SECONDS)
    for turn in range(SUSTAINED_TURNS):
        first = turn // 2 % len(runners)
        order = runners[first:] + runners[:first]
        for runner in order if turn % 2 == 0 else order[::-1]:
            runner.block(BLOCK_SECONDS, clock)
    return {runner.name: runner for runner in runners}


def better(found: Mapping[str, Contender], timing: str) -> Contender:
    """The faster of cuBLAS and cuBLASLt, "burst" or "sustained"."""
    return min((found[name] for name in LIBRARIES), key=lambda r: statistics.median(getattr(r, timing)))


def _alternatives(
    fits: Problem,
    problem: Problem,
    ours: Ours,
    clock: Clock,
    sets: Sequence[Operands],
    found: dict[str, Any],
    chosen: float,
) -> list[dict[str, Any]]:
    """Short blocks of every own variant that takes the problem: in turn where bursts say that it may be the best."""
    runners: list[tuple[Step9, float, Contender]] = []
    for variant in variants():
        if variant.unsupported(fits, ours.device) or variant.seconds(fits, ours.device) > 3 * chosen:
            continue
        launch = ours.launcher(variant, problem)
        error = checked(launch, sets[0])
        runner = contender(variant.name, launch, sets, chosen)
        runner.burst += [runner.replay_seconds() for _ in range(3)]
        runners.append((variant, error, runner))
    fastest = min(min(runner.burst) for _, _, runner in runners)
    near = [runner for _, _, runner in runners if min(runner.burst) <= NEAR * fastest]
    for turn in range(SUSTAINED_TURNS):
        for runner in near if turn % 2 == 0 else near[::-1]:
            runner.block(BLOCK_SECONDS / 4, clock)
    for _, _, runner in runners:
        if runner not in near:
            runner.block(BLOCK_SECONDS / 4, clock)
    return [
        {
            "problem": described(problem),
            "variant": variant.name,
            "reason": "asked",
            "seconds": spread(runner.sustained),
            "estimated_seconds": variant.seconds(fits, ours.device),
            "timing": "short",
            "sm_clock_mhz": runner.clocks,
            "error": error,
        }
        for variant, error, runner in runners
    ]


def described(problem: Problem) -> dict[str, Any]:
    layout = ("t" if problem.trans_a else "n") + ("t" if problem.trans_b else "n")
    return {
        "m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch, "dtype": problem.dtype.value,
        "out_dtype": problem.out_dtype.value, "layout": layout,
    }  # fmt: skip


def reduction_bandwidth() -> float:
    """Bytes a second of a sum over 2 GiB: the ceiling of what only reads."""
    import torch

    data = torch.empty(1 << 29, device="cuda", dtype=torch.float32).normal_()
    times = []
    for _ in range(10):
        begin, end = _events()
        begin.record()
        data.sum()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return data.numel() * 4 / min(times)


def machine_of(device: Device, bandwidth: float, ours: Ours) -> dict[str, Any]:
    """What a results file says of the machine."""
    import torch

    return gpu_machine(device) | {
        "cuda": torch.version.cuda,
        "reduction_bytes_per_second": bandwidth,
        "build": ours.runtime.build_hash,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, and the geometric means."""
    lines = [
        f"{'shape':<24}{'variant':<30}{'µs':>9}{'TFLOP/s':>9}{'TB/s':>6}{'MHz':>6}{'burst':>7}{'sustained':>10}"
    ]
    first = [r for r in rows if not r["batch_invariant"]]
    pairs = zip(
        (r for r in first if r["timing"] == "burst"),
        (r for r in first if r["timing"] == "sustained"),
        strict=True,
    )
    for burst, r in pairs:
        p = r["problem"]
        shape = "×".join(str(p[key]) for key in ("m", "n", "k"))
        shape = f"{p['batch']}×" * (p["batch"] > 1) + shape + f" {p.get('layout', 'nn')}"
        lines.append(
            f"{shape:<24}{r['variant']:<30}{r['seconds']['median'] * 1e6:>9.1f}{r['tflops']:>9.0f}"
            f"{r['bytes_per_second'] / 1e12:>6.2f}{max(r['sm_clock_mhz'], default=0):>6}"
            f"{burst['ratio']:>7.3f}{r['ratio']:>10.3f}"
        )
    for timing in ("burst", "sustained"):
        for invariance in (False, True):
            ratios = [
                r["ratio"] for r in rows if r["timing"] == timing and r["batch_invariant"] == invariance
            ]
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            lines.append(
                f"geometric mean, {timing}, batch_invariant={invariance}: {mean:.4f}, least {min(ratios):.3f}"
            )
    return "\n".join(lines)


def selector_table(rows: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> str:
    """How far the selector's choice is from the best own variant, by short blocks."""
    lines, losses = [], []
    for pick in chosen:
        same = {r["variant"]: r["seconds"]["median"] for r in rows if r["problem"] == pick["problem"]}
        best = min(same, key=same.__getitem__)
        losses.append(same[pick["variant"]] / same[best])
        order = sorted(same, key=same.__getitem__)[:5]
        p = pick["problem"]
        lines.append(
            f"{p['batch']}×{p['m']}×{p['n']}×{p['k']}: {pick['variant']} ({losses[-1]:.3f} × the best); "
            + ", ".join(f"{name.removeprefix('step9-')} {same[name] * 1e6:.1f}" for name in order)
        )
    lines.append(f"chosen over best, geometric mean: {math.exp(statistics.fmean(map(math.log, losses))):.4f}")
    return "\n".join(lines)


def markdown(documents: Sequence[dict[str, Any]]) -> str:
    """The sustained and burst ratios of results files, one a dtype, as a table in Markdown."""
    head = ["M×N×K"]
    for document in documents:
        dtype = document["rows"][0]["problem"]["dtype"]
        head += [f"{dtype}: variant", "µs", "sustained", "burst"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---|---:|---:|---:|" * len(documents)]
    tables = [_by_shape(document["rows"]) for document in documents]
    for shape in tables[0]:
        cells = [shape]
        for each in tables:
            burst, sustained = each[shape]["burst"], each[shape]["sustained"]
            cells += [
                sustained["variant"].removeprefix("step9-"),
                f"{sustained['seconds']['median'] * 1e6:,.1f}",
                f"{sustained['ratio']:.3f}",
                f"{burst['ratio']:.3f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    cells = ["geometric mean"]
    for each in tables:
        means = [
            math.exp(statistics.fmean(math.log(row[timing]["ratio"]) for row in each.values()))
            for timing in ("sustained", "burst")
        ]
        cells += ["", "", *(f"{mean:.3f}" for mean in means)]
    return "\n".join([*lines, "| " + " | ".join(cells) + " |"])


def _by_shape(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if not row["batch_invariant"]:
            p = row["problem"]
            shape = f"{p['batch']} × " * (p["batch"] > 1) + "×".join(str(p[key]) for key in ("m", "n", "k"))
            found.setdefault(shape, {})[row["timing"]] = row
    return found


def readme(text: str, results: Path) -> str:
    """kernels/README.md with the suite's tables made anew from the results."""
    files = [results / "h200" / f"suite{suffix}.json" for suffix in ("", "-bf16")]
    documents = [json.loads(file.read_text()) for file in files if file.is_file()]
    body = ""
    if documents:
        body = f"{markdown(documents)}\n\n{_measured(documents[0], 'suite.json, suite-bf16.json')}"
    text = section(text, BEGIN, body)
    rows = results / "h200" / "suite-rows.json"
    body = ""
    if rows.is_file():
        document = json.loads(rows.read_text())
        body = f"{markdown([document])}\n\n{_measured(document, rows.name)}"
    return section(text, BEGIN_ROWS, body)


def _measured(document: dict[str, Any], files: str) -> str:
    machine = document["machine"]
    return (
        f"Measured on one {machine['device']} on {document['date'][:10]} by `{document['command']}` "
        f"(benchmarks/results/h200/{files}); a reduction read "
        f"{machine['reduction_bytes_per_second'] / 1e12:.2f} TB/s in the same run.\n"
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description="Time the shape suite.")
    parser.add_argument("--dtype", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument(
        "--layout", default="nn", choices=["nn", "nt", "tn", "tt"], help="t: stored transposed"
    )
    parser.add_argument(
        "--layouts", action="store_true", help="time nt, tn and tt instead; writes suite-layouts"
    )
    parser.add_argument(
        "--rows", action="store_true", help="time M between the sizes of tiles instead; writes suite-rows"
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile shapes below goal; writes profile.json"
    )
    parser.add_argument("--only", default="", help="shapes whose MxNxK holds this text")
    parser.add_argument("--rounds", type=int, default=15, help="bursts of each contender")
    parser.add_argument("--all", action="store_true", help="time every own variant too")
    add_places(parser, None)
    parser.add_argument("--readme", action="store_true", help="only write kernels/README.md from the results")
    return parser.parse_args(argv)


def _problems(options: argparse.Namespace, dtype: DType) -> list[Problem]:
    """What is timed."""
    if options.layouts:
        return [problem_of(s, dtype, layout) for layout in ("nt", "tn", "tt") for s in LAYOUT_SHAPES]
    if options.rows:
        return [problem_of((1, m, 8192, 8192), dtype, "nt") for m in ROWS]
    return [problem_of(shape, dtype, options.layout) for shape in SHAPES]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where a result was wrong."""
    options = _options(argv)
    if options.readme:
        README.write_text(readme(README.read_text(), RESULTS))
        return 0

    import torch

    exact_references()
    torch.zeros(1, device="cuda")
    device = describe_cuda()
    ours, clock = Ours(device), Clock()
    bandwidth = reduction_bandwidth()
    print(f"{device.name}: a reduction reads {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    failed = 0
    dtype = DType(options.dtype)
    for problem in _problems(options, dtype):
        shape = (problem.batch, problem.m, problem.n, problem.k)
        if options.only not in "x".join(map(str, shape)):
            continue
        try:
            rows += measure(problem, ours, clock, options.rounds, options.all)
        except AssertionError as wrong:
            failed += 1
            print(f"{shape}: {wrong}", file=sys.stderr, flush=True)
    timed = [r for r in rows if r["timing"] != "short"]
    print(table(timed))
    machine = options.machine or short_name(device.name)
    details = machine_of(device, bandwidth, ours)
    layout = "layouts" if options.layouts else "rows" if options.rows else options.layout
    suffix = "".join(f"-{part}" for part in (options.dtype, layout) if part not in ("fp16", "nn"))
    packages = ["torch", "apache-tvm-ffi", "nvidia-cublas"]
    print(write(machine, f"suite{suffix}", timed, details=details, packages=packages, folder=options.out))
    if options.all:
        short = [r for r in rows if r["timing"] == "short"]
        chosen = [r for r in timed if r["timing"] == "sustained" and not r["batch_invariant"]]
        print(selector_table(short, chosen))
        print(
            write(machine, f"selector{suffix}", short, details=details, packages=packages, folder=options.out)
        )
    if options.profile:
        from benchmarks import profile

        found = profile.profile(timed, ours, clock, bandwidth)
        print(profile.table(found))
        print(
            write(machine, f"profile{suffix}", found, details=details, packages=packages, folder=options.out)
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
