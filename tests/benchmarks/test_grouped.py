"""Workloads of the grouped benchmark: unlike, and such that the selector sends them to one launch."""

from __future__ import annotations

from benchmarks import grouped
from kernels.device import H200
from kernels.hopper.variants import grouped as kernels
from kernels.hopper.variants import variants
from kernels.operands import as_packed
from kernels.problem import Problem
from kernels.selector import choose


def test_each_list_is_expected_to_gain_from_one_launch() -> None:
    for name, shapes in grouped.workloads().items():
        assert len(set(shapes)) > len(shapes) / 2, name
        problems = [as_packed(Problem(*shape, batch_invariant=False)) for shape in shapes]
        alone = sum(choose(each, H200, variants=variants()).seconds for each in problems)
        assert min(kernel.seconds_together(problems, H200) for kernel in kernels()) < alone, name
        assert all(kernel.unsupported(each, H200) is None for kernel in kernels() for each in problems)
