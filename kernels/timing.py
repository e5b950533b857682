"""Times of kernels on a GPU: receives launches and operands, hands on seconds in bursts, blocks and graphs.

Inputs are drawn from a normal distribution, in several sets that are used in turn, so that no cache holds them.
Needs torch and tvm_ffi; no compiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from kernels.ladder import Step, load
from kernels.libraries import Libraries
from kernels.problem import DType, Problem

ARCH = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
SIZE = {1: (128, 128, 64), 2: (128, 128, 4096)}
LADDER_SIZE = (4096, 4096, 4096)
BLOCK_SECONDS = 0.25
PAUSE_SECONDS = 0.02  # between bursts: the clock and the power cap recover
LAUNCHES = 4  # in a burst of one kernel
SMALL_LAUNCHES = 50  # in a graph, for what takes microseconds


def problem_of(m: int, n: int, k: int, dtype: DType) -> Problem:
    """A [M, K] times B [N, K] transposed, 16 bits in and out."""
    return Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_b=True, batch_invariant=False)


Launch = Callable[[Any, Any, Any], Any]  # (a, b, d) on the current stream


def launcher(arch: str, step: Step, problem: Problem, ctas: int) -> Launch:
    """How a step is launched; Step 9 is the variant of its family with the least estimated time."""
    if step.number < 9:
        function = load(Libraries(arch), step, problem.dtype)
        return lambda a, b, d: function(a, b, d, ctas)
    from kernels import family
    from kernels.operands import Operands
    from kernels.runtime import Runtime

    runtime = Runtime.of(0)
    usable = [
        variant
        for variant in family.own(arch)
        if variant.unsupported(problem, runtime.device) is None and runtime.has(variant, problem)
    ]
    best = min(usable, key=lambda variant: variant.seconds(problem, runtime.device))
    return lambda a, b, d: runtime.launch(best, problem, Operands(a[None], b.T[None], d[None]))


class Contender:
    """Something that computes one problem on rotating sets of operands."""

    def __init__(self, name: str, call: Launch, sets: Sequence[tuple[Any, Any, Any]]) -> None:
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


class Clock:
    """SM clock in MHz from NVML; None where it can't be read."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            self._read: Callable[[], int | None] = lambda: None
            return
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            self._read = lambda: None
            return
        self._read = lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))

    def mhz(self) -> int | None:
        """Now."""
        return self._read()


class Timer:
    """Seconds a launch, from events; keeps the SM clock that it saw while the kernel ran."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._graphs = clock, dict[Contender, Any]()
        self.mhz: int | None = None

    def burst(self, contender: Contender, launches: int) -> float:
        """A few launches after a pause."""
        time.sleep(PAUSE_SECONDS)
        contender.launch(1)
        return self._time(lambda: contender.launch(launches)) / launches

    def block(self, contender: Contender, estimate: float) -> float:
        """So many that clock and power settle."""
        count = max(4, round(BLOCK_SECONDS / estimate))
        return self._time(lambda: contender.launch(count)) / count

    def graph(self, contender: Contender) -> float:
        """A replayed graph: what takes microseconds is otherwise bound by the host."""
        import torch

        graph = self._graphs.get(contender)
        if graph is None:
            contender.launch(2)  # loads the code
            torch.cuda.synchronize()
            graph = self._graphs[contender] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                contender.launch(SMALL_LAUNCHES)
        graph.replay()
        return self._time(graph.replay) / SMALL_LAUNCHES

    def _time(self, run: Callable[[], Any]) -> float:
        import torch

        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        run()
        end.record()
        self.mhz = self._clock.mhz()  # the device is still at it
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def cublas(sets: list[tuple[Any, Any, Any]]) -> Contender:
    """The reference on the same operands."""
    import torch

    return Contender("cublas", lambda a, b, d: torch.mm(a, b.T, out=d), sets)
