"""The runtime of own kernels on the virtual GPU: receives CPU tensors, launches what is built, executes its PTX.

The same choosing, packing and calling as on a chip (kernels/runtime.py); only the device is another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels import device, family
from kernels.group import GroupVariant
from kernels.libraries import Libraries
from kernels.operands import Operands
from kernels.problem import Problem
from kernels.runtime import Check, Repeated, Runtime, _Launch, _Ready
from kernels.selector import Choice, Variant
from kernels.virtual.host import host, on_device, run
from kernels.virtual.launch import Options
from kernels.virtual.report import Report


class Misbehaved(RuntimeError):
    """A kernel raced, hung or broke a protocol; the text is the report."""


class VirtualRuntime(Runtime):
    """One virtual GPU of an architecture, with `sms` SMs. One launch at a time."""

    def __init__(
        self,
        arch: str,
        *,
        root: Path | None = None,
        sms: int = 4,
        schedules: int = 1,
        detect: bool = False,
        variants: Sequence[Variant] | None = None,
        check: Check | None = None,
    ) -> None:
        libraries = Libraries(arch, root, stand_in=Path(host().path))
        chip = replace(device.virtual(arch), sms=sms)
        super().__init__(
            chip, libraries=libraries, variants=variants or family.own(arch), check=check, place="cpu"
        )
        if variants is None:
            self.grouped = family.grouped(arch)
            self._by_name |= {each.name: each for each in self.grouped}
        self.reports: list[Report] = []
        self._options = Options(sms=sms, detect=detect)
        self._schedules = schedules
        self._tensors: dict[str, Any] = {}
        self._launching = threading.RLock()

    def _start(
        self,
        known: _Launch,
        problem: Problem,
        operands: Operands,
        *,
        blocks: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Execute one own variant. Raises Misbehaved."""
        with self._launching:
            self._tensors = self._named(operands)
            super()._start(known, problem, operands, blocks=blocks, before=before)

    def repeat(self, product: Repeated, *, before: Callable[[], object] = lambda: None) -> Choice:
        """`run`: each launch is told where its operands lie."""
        return self.run(product.problem, product.operands, product.variant, before=before)

    def launch_group(
        self,
        variant: GroupVariant,
        items: Sequence[tuple[Problem, Operands]],
        *,
        blocks: int | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Execute one launch for several products. Raises Misbehaved."""
        with self._launching:
            self._tensors = {}
            for _, operands in items:  # the kernel that packs may read them
                self._know(operands)
            super().launch_group(variant, items, blocks=blocks, before=before)

    def _prepare(self, problem: Problem, operands: Operands) -> Operands:
        given = super()._prepare(problem, operands)
        self._know(given)  # a group's operands don't come as arguments
        return given

    def _know(self, operands: Operands) -> None:
        number = len(self._tensors)
        self._tensors |= {f"{name} ({number})": x for name, x in self._named(operands).items()}

    @staticmethod
    def _named(operands: Operands) -> dict[str, Any]:
        found = {name: getattr(operands, name) for name in ("a", "b", "c", "d", "bias")}
        return {name: x for name, x in found.items() if x is not None}

    def _load(self, name: str) -> _Ready:
        ready = super()._load(name)
        return replace(ready, call=self._executing(name, ready.call))

    def _executing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        ptx = self.libraries.path(name, "ptx").read_text()

        def execute(*arguments: Any) -> None:
            tensors = [x for x in arguments if hasattr(x, "data_ptr")]
            buffers = self._tensors | {f"argument {i}": x for i, x in enumerate(tensors)}
            passed = [on_device(x) if hasattr(x, "data_ptr") else x for x in arguments]
            report = run(
                lambda: call(*passed), buffers, ptx, schedules_=self._schedules, options=self._options
            )
            self.reports.append(report)
            if not report.ok:
                raise Misbehaved(str(report))

        return execute
