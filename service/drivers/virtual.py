"""The virtual GPU as a device: receives batches, executes the compiled Step 9 kernels for B200 on the CPU.

For trying and proving, not for speed: a product takes about a second, so there is a limit on its size. What own
kernels don't compute (fp32, fp64, K = 0, alpha = 0) the CPU's reference does.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import device, family
from kernels.device import describe_cpu
from kernels.elementwise import as_tensor
from kernels.problem import DType, Problem, Unsupported
from kernels.selector import Choice, choose
from service.drivers.base import CannotStart, problem_of
from service.drivers.cpu import CpuDriver, _Tally
from service.memory import Memory
from service.messages import Item, ItemDone, Report

if TYPE_CHECKING:
    from kernels.virtual.runtime import VirtualRuntime

log = logging.getLogger("gemm.worker")

ARCH = "sm_100a"
SMS = 4
MOST_FLOPS = 2 * 512 * 512 * 1024  # a few seconds on two cores


class VirtualDriver(CpuDriver):
    """See service.drivers.base.Driver. `backend` is the CPU reference's, for what own kernels don't compute."""

    def __init__(self, memory: Memory, backend: str) -> None:
        super().__init__(memory, backend)
        self.device = replace(device.virtual(ARCH), sms=SMS)
        self._runtime: VirtualRuntime

    def start(self, report: Callable[[Report], None]) -> None:
        """Verify a product on the reference, open what is built for the chip."""
        missing = [name for name in ("torch", "tvm_ffi") if importlib.util.find_spec(name) is None]
        if missing:
            raise CannotStart(f"the virtual GPU needs {' and '.join(missing)}", needs_person=True)
        super().start(report)
        # Requests are executed one by one: a stack of them would only take longer to be cut off.
        self.stacking = False
        from kernels.virtual.runtime import VirtualRuntime

        self._runtime = VirtualRuntime(ARCH, sms=SMS)
        functions = self._runtime.libraries.manifest.functions
        if not functions:
            raise CannotStart(
                f"no kernels are built for the virtual GPU: python -m kernels build --arch {ARCH}",
                needs_person=True,
            )
        log.info("virtual %s: %d functions are built", ARCH, len(functions))

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """As the CPU's, with the chip's own variants before its references."""
        answer = super().ask(what, args)
        if what == "variants":
            own = [
                {"name": each.name, "step": each.step, "state": "admitted", "detail": "executed from its PTX"}
                for each in family.own(ARCH)
            ]
            return answer | {"device": asdict(self.device), "variants": [*own, *answer["variants"]]}
        return answer

    def _choose_now(self, problem: Problem, variant: str) -> Choice:
        if not _own(problem) or variant.startswith("reference"):
            return choose(problem, describe_cpu(), variants=self._variants, variant=variant)
        if problem.flops > MOST_FLOPS:
            raise Unsupported(
                f"the virtual GPU takes at most {MOST_FLOPS:,} FLOPs a product, such as 512×512×1024; "
                f"this one has {problem.flops:,}"
            )
        return self._runtime.choose(problem, variant)

    def _run_one(self, item: Item, tally: _Tally) -> ItemDone:
        problem = problem_of(item)
        if not _own(problem) or item.params.variant.startswith("reference"):
            return super()._run_one(item, tally)

        def run(choice: Choice) -> None:
            from kernels.operands import Operands

            a, b, d = (_layers(self._array(x)) for x in (item.a, item.b, item.out))
            c = None if item.c is None else _layers(self._array(item.c))
            bias = None if item.bias is None else _tensor(self._array(item.bias))
            a = a.transpose(1, 2) if problem.trans_a else a
            b = b.transpose(1, 2) if problem.trans_b else b
            self._runtime.run(problem, Operands(a, b, d, c, bias), choice.variant)

        return self._guarded([item], [problem], run, tally)[0]


def _own(problem: Problem) -> bool:
    """Whether an own kernel computes such a problem."""
    halves = problem.dtype in (DType.FP16, DType.BF16) and problem.out_dtype is not DType.FP64
    some = min(problem.m, problem.n, problem.k, problem.batch) > 0
    return halves and some and problem.epilogue.reads_ab


def _layers(x: np.ndarray[Any, Any]) -> Any:
    """[batch, rows, columns] tensor of an array's memory."""
    tensor = _tensor(x)
    return tensor if tensor.dim() == 3 else tensor[None]


def _tensor(x: np.ndarray[Any, Any]) -> Any:
    import torch

    if x.dtype.itemsize == 2 and x.dtype != np.float16:
        return as_tensor(x.view(np.uint16)).view(torch.bfloat16)
    return as_tensor(x)
