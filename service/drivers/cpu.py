"""The CPU as a device: receives batches, computes them in place in the arena with numpy's BLAS or torch.

No lanes: operands are where the library reads them and D where it writes, so nothing is copied in or out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from kernels import predict, reference
from kernels.device import Device, describe_cpu
from kernels.problem import Activation, DType, Epilogue, Problem, Unsupported
from kernels.selector import Choice, choose
from kernels.verify import check
from service.drivers.base import CannotStart, late, problem_asked, problem_of
from service.memory import Memory, operands_of, unmapped
from service.messages import Batch, BatchDone, Item, ItemDone, Map, Operand, Report

log = logging.getLogger("gemm.worker")

_NUMPY: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
#: Chosen for each problem shape; small and pure, so it is kept.
_CHOICES = 4096


@dataclass
class _Tally:
    """Seconds, FLOPs and busy seconds of one batch."""

    flops: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)

    def add(self, variant: str, flops: float, seconds: float) -> None:
        self.flops[variant] = self.flops.get(variant, 0.0) + flops
        self.busy[variant] = self.busy.get(variant, 0.0) + seconds


class CpuDriver:
    """See service.drivers.base.Driver. `backend`: "auto" (torch where it is installed), "numpy" or "torch"."""

    def __init__(self, memory: Memory, backend: str) -> None:
        self._memory = memory
        self._variants = [v for v in reference.variants() if backend in ("auto", v.backend)]
        if not self._variants:
            raise CannotStart(f"backend {backend!r} isn't installed", needs_person=True)
        # Unless one is asked for by name, one library serves: the class of equal bits must not change with M.
        self.backend: reference.Backend = self._variants[0].backend
        self.device: Device = describe_cpu()
        self.stacking = True
        self._kept = reference.Converted()
        self._choose = lru_cache(_CHOICES)(self._choose_now)

    def start(self, report: Callable[[Report], None]) -> None:
        """Load the library and verify a product."""
        random = np.random.default_rng(1)
        # With gelu, so that the first request that asks for it doesn't wait for scipy's import.
        tail = Epilogue(activation=Activation.GELU)
        problem = Problem(m=33, n=40, k=65, dtype=DType.FP32, out_dtype=DType.FP32, epilogue=tail)
        a, b = (random.standard_normal(s).astype(np.float32) for s in ((33, 65), (65, 40)))
        out = np.full((33, 40), np.nan, np.float32)
        reference.compute(problem, a, b, out, backend=self.backend)
        if not check(problem, out, a, b).ok:
            raise CannotStart(f"{self.backend} computes wrong products on this machine", needs_person=True)
        test = reference.self_test(self.backend)
        self.stacking = test.stacking
        log.info("self-test of %s: %s", self.backend, test.detail)
        report(Report())

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Compute now, on this thread."""
        started = time.perf_counter()
        tally = _Tally()
        ended: dict[int, ItemDone] = {}
        due: list[Item] = []
        for item in batch.items:
            refusal = late(item) or self._missing(item)
            if refusal is None:
                due.append(item)
            else:
                ended[item.id] = refusal
        if batch.stacked and len(due) > 1:
            for result in self._run_stack(due, tally):
                ended[result.id] = result
        else:
            for item in due:
                ended[item.id] = late(item) or self._run_one(item, tally)
        seconds = {"kernel": time.perf_counter() - started}
        done(
            BatchDone(
                batch.id, tuple(ended[item.id] for item in batch.items), seconds, tally.flops, tally.busy
            )
        )

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """ "variants", "choose", and what the model of the GPUs says: "predict", "trace"."""
        if what in ("predict", "trace"):
            return predict.answer(what, args)
        if what == "variants":
            return {"device": asdict(self.device), "variants": [self._describe(v) for v in self._variants]}
        if what == "choose":
            return asdict(self._choose(problem_asked(args), args.get("variant", "auto")))
        if what.startswith("region_"):
            raise Unsupported("CUDA shared memory isn't available: this service computes on a CPU")
        raise ValueError(f"the CPU can't answer {what!r}")

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop converted forms of these tensors."""
        self._kept.forget(tensors)

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """Results are written to the arena: there is nothing that only this device has."""
        fetched("a CPU keeps no results")

    def settled(self, tensors: Sequence[str]) -> None:
        """Nothing was kept."""

    def hung(self) -> None:
        """The libraries of a CPU are not on trial."""

    def close(self) -> None:
        """Nothing is under way: `submit` returns when it is done."""

    def map(self, message: Map, descriptor: int) -> None:
        """Map it; a device's memory can't be."""
        if message.handle:
            raise ValueError("a CPU has no device memory")
        self._memory.map(message, descriptor)

    def unmap(self, region: int) -> None:
        """Let it go."""
        self._memory.unmap(region)

    def _missing(self, item: Item) -> ItemDone | None:
        if all(self._memory.holds(operand.region) for operand in operands_of(item)):
            return None
        return unmapped(item)

    def _describe(self, variant: reference.Reference) -> dict[str, Any]:
        test = reference.self_test(variant.backend)
        return {"name": variant.name, "step": variant.step, "state": "admitted", "detail": test.detail}

    def _choose_now(self, problem: Problem, variant: str) -> Choice:
        return choose(problem, self.device, variants=self._variants, variant=variant)

    def _run_one(self, item: Item, tally: _Tally) -> ItemDone:
        problem = problem_of(item)

        def run(choice: Choice) -> None:
            reference.compute(
                problem,
                self._array(item.a),
                self._array(item.b),
                self._array(item.out),
                self._maybe(item.c),
                self._maybe(item.bias),
                backend=_backend_of(choice),
                tensor=item.b.tensor,
                kept=self._kept,
            )

        return self._guarded([item], [problem], run, tally)[0]

    def _run_stack(self, items: Sequence[Item], tally: _Tally) -> list[ItemDone]:
        problems = [problem_of(item) for item in items]

        def run(choice: Choice) -> None:
            reference.compute_stacked(
                problems,
                [self._array(item.a) for item in items],
                self._array(items[0].b),
                [self._array(item.out) for item in items],
                [self._maybe(item.c) for item in items],
                [self._maybe(item.bias) for item in items],
                backend=_backend_of(choice),
                tensor=items[0].b.tensor,
                kept=self._kept,
            )

        return self._guarded(items, problems, run, tally)

    def _guarded(
        self, items: Sequence[Item], problems: Sequence[Problem], run: Callable[[Choice], None], tally: _Tally
    ) -> list[ItemDone]:
        """Choose, run and time; a failure is the items' outcome, not the worker's end."""
        try:
            choice = self._choose(problems[0], items[0].params.variant)
            started = time.perf_counter()
            run(choice)
        except Unsupported as reason:
            return [ItemDone(item.id, "unsupported", reason.because) for item in items]
        except MemoryError:
            return [
                ItemDone(item.id, "no_room", "the worker has no memory for this product") for item in items
            ]
        except Exception:
            # Whatever a library raises for one request must not cost the others their worker.
            log.exception("a product failed: %s", problems[0])
            return [
                ItemDone(item.id, "internal", "the product failed; the worker's log says why")
                for item in items
            ]
        tally.add(choice.variant, sum(p.flops for p in problems), time.perf_counter() - started)
        return [ItemDone(item.id, "", "", choice.variant, str(choice.reason), choice.why) for item in items]

    def _array(self, operand: Operand) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._memory.view(operand), _NUMPY[operand.dtype]).reshape(operand.shape)

    def _maybe(self, operand: Operand | None) -> np.ndarray[Any, Any] | None:
        return None if operand is None else self._array(operand)


def _backend_of(choice: Choice) -> reference.Backend:
    return "torch" if choice.variant == "reference-torch" else "numpy"
