"""A GPU made of CPU memory: the real CudaDriver over what it asks of torch.cuda and of the kernels' runtime.

`folder` makes a folder for PYTHONPATH whose sitecustomize gives workers that are started with `--device cuda` this
driver. A product whose alpha is HANGS never ends; one whose alpha is DIES takes the worker along.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import cublas, probe
from kernels.device import describe_cpu
from kernels.device_file import default_folder
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.runtime import Repeated
from kernels.selector import Choice, Reason
from kernels.together import Group, Host
from service import ipc
from service.arena import Arena
from service.drivers import cuda
from service.messages import Batch, BatchDone, Item, Operand, Report

if TYPE_CHECKING:  # workers import this too
    import pytest

HANGS, DIES = 77.0, 78.0
#: Bytes of its memory for stored tensors.
BUDGET = 1 << 20
#: How long its products take.
KERNEL_SECONDS = float(os.environ.get("STAND_IN_KERNEL_SECONDS", "0"))
#: Its one own variant.
OWN = "step9-stand-in"

#: Its kernel for unlike products, which takes those of at most so many rows.
TOGETHER, FEW = "step9-grouped-stand-in", 32

SITE = """
import sys
if "service.worker" in sys.orig_argv:
    from service.drivers import cuda
    from tests.service.cuda_stand_in import StandIn
    cuda.CudaDriver = StandIn
elif "service" in sys.orig_argv:
    from service.store import contents
    contents.WRITE_BACK_SECONDS = {write_back}
"""


def folder(tmp: Path, write_back: float = 3.0) -> str:
    """A folder for PYTHONPATH, and the repository's. Results stay on the device for `write_back` seconds."""
    (tmp / "sitecustomize.py").write_text(SITE.format(write_back=write_back))
    return f"{tmp}{os.pathsep}{Path(__file__).resolve().parents[2]}"


class Stream:
    """Results are there when work is queued, but its end is told when it is due; after a hang, never."""

    hung = False
    #: When the work that is queued ends, on a GPU that does one thing at a time.
    free = 0.0

    @staticmethod
    def work(seconds: float) -> None:
        """Queue work that takes so long."""
        Stream.free = max(Stream.free, time.perf_counter()) + seconds

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None:
        if Stream.hung:
            threading.Event().wait()
        while time.perf_counter() < Stream.free:
            pass


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0
        self.hung = True

    def record(self, stream: Any = None) -> None:
        self.at = max(Stream.free, time.perf_counter())
        self.hung = Stream.hung

    def query(self) -> bool:
        return not self.hung and time.perf_counter() >= self.at

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Ipc:
    """Allocations by address, which is also their handle; what is freed is zeroed."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes)
        self._memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, pointer: int) -> None:
        ctypes.memset(pointer, 0, len(self._memory[pointer]))

    def export(self, pointer: int) -> ipc.Exported:
        return ipc.Exported(pointer.to_bytes(64, "little"), len(self._memory[pointer]), 0)


class Torch:
    """torch, its device the CPU."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        self.cuda = SimpleNamespace(
            Event=Event,
            set_stream=lambda stream: None,
            Stream=lambda place: Stream(),
            stream=lambda stream: nullcontext(),
            device=lambda place: nullcontext(),
            synchronize=lambda place: None,
            empty_cache=lambda: None,
            memory_reserved=lambda place: 0,
            mem_get_info=lambda place: (2 * BUDGET, 2 * BUDGET),
            cudart=lambda: cudart,
        )

    def as_tensor(self, source: ipc.Pointer, device: Any) -> Any:
        pointer, nbytes = (
            source.__cuda_array_interface__["data"][0],
            source.__cuda_array_interface__["shape"][0],
        )
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
        return self._torch.frombuffer(memory, dtype=self._torch.uint8)

    def device(self, kind: str, index: int) -> Any:
        return self._torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Runtime:
    """Multiplies, by a variant that is own unless the reference is asked for."""

    def __init__(self) -> None:
        self.device = replace(
            describe_cpu(), arch="sm_90a", name="stand-in", uuid="stand-in-0", memory_bytes=2 * BUDGET
        )
        self.build_hash = "none"
        self.variants = [SimpleNamespace(name=OWN, step=9), SimpleNamespace(name=cublas.NAME, step=0)]
        self.grouped = (SimpleNamespace(name=TOGETHER, step=9),)
        self.barred: dict[str, str] = {}

    def bar(self, variant: str, because: str) -> None:
        self.barred[variant] = because

    def choose(self, problem: Problem, variant: str = "auto") -> Choice:
        own = variant == "auto" and OWN not in self.barred
        return Choice(OWN if own else cublas.NAME, Reason.ONLY, "a test", 0.0)

    def run(
        self, problem: Problem, operands: Operands, variant: str, *, before: Callable[[], object]
    ) -> Choice:
        choice = self.choose(problem, variant)
        before()
        alpha = problem.epilogue.alpha
        if choice.variant == OWN and alpha in (HANGS, DIES):
            if alpha == DIES:
                os._exit(9)
            Stream.hung = True
        _multiply(problem, operands)
        Stream.work(KERNEL_SECONDS)
        return choice

    def repeat(self, product: Repeated, *, before: Callable[[], object]) -> Choice:
        return self.run(product.problem, product.operands, product.variant, before=before)

    def groups(self, problems: Sequence[Problem], host: Host) -> list[Group]:
        few = tuple(n for n, problem in enumerate(problems) if problem.m <= FEW)
        choice = Choice(TOGETHER, Reason.ESTIMATE, f"one launch for {len(few)} products", 0.0)
        return [Group(self.grouped[0], few, choice)] if len(few) > 1 else []  # type: ignore[arg-type]

    def launch_group(
        self, variant: Any, items: Sequence[tuple[Problem, Operands]], *, before: Callable[[], object]
    ) -> None:
        before()
        for problem, operands in items:
            _multiply(problem, operands)
        Stream.work(KERNEL_SECONDS)


def _multiply(problem: Problem, operands: Operands) -> None:
    operands.d.copy_((operands.a.double() @ operands.b.double()) * problem.epilogue.alpha)


class StandIn(cuda.CudaDriver):
    """The driver, opened on the CPU's memory."""

    def start(self, report: Callable[[Report], None]) -> None:
        self._tell = report
        self._torch = Torch()
        self._open()
        self._join()

    def _open(self) -> None:
        cuda.runtime = lambda index: self._made()  # type: ignore[assignment,return-value]
        stand_in = Ipc()
        for name in ("allocate", "free", "export"):
            setattr(ipc, name, getattr(stand_in, name))
        probe.admit = self._admit  # type: ignore[assignment]
        super()._open()

    def _admit(
        self,
        runtime: Any,
        index: int,
        *,
        on_outcome: Callable[[probe.Outcome], None],
        on_known: Callable[[], None],
    ) -> None:
        """In place of kernels.probe.admit: what is known joins; nothing is tested."""
        kept = probe.Kept(default_folder(), self.device.key, runtime.build_hash)
        for outcome in kept.read().values():
            probe.apply(runtime, outcome)
            on_outcome(outcome)
        on_known()

    def _made(self) -> Runtime:
        return Runtime()

    def close(self) -> None:
        self._probe = SimpleNamespace(stop=lambda: None)  # type: ignore[assignment]
        super().close()


def undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a StandIn that is opened in a test's own process puts in the driver's place is taken away again."""
    ours = (cuda, "runtime"), (probe, "admit"), (ipc, "allocate"), (ipc, "free"), (ipc, "export")
    for module, name in ours:
        monkeypatch.setattr(module, name, getattr(module, name))


class Arenas:
    """Operands and results of items, one after the other in an arena."""

    def __init__(self) -> None:
        self.arena = Arena.create(1 << 20)
        self._at = 0

    def put(self, value: np.ndarray[Any, Any], kind: str) -> Operand:
        operand = self.room(value.shape, kind, value.nbytes)
        self.arena.view(operand.offset, operand.nbytes)[:] = value.tobytes()
        return operand

    def room(self, shape: tuple[int, ...], kind: str, nbytes: int) -> Operand:
        at, self._at = self._at, self._at + -(-nbytes // 256) * 256
        return Operand(at, nbytes, kind, shape)

    def get(self, operand: Operand) -> np.ndarray[Any, Any]:
        return (
            np.frombuffer(self.arena.view(operand.offset, operand.nbytes), np.float16)
            .reshape(operand.shape)
            .copy()
        )


def run(driver: StandIn, items: list[Item]) -> BatchDone:
    """A batch through the driver, as the worker drives it."""
    ended: list[BatchDone] = []
    driver.submit(Batch(1, tuple(items)), ended.append)
    while driver.advance():
        pass
    (done,) = ended
    return done
