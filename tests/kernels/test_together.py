"""Which unlike products share a launch: those that gain by it, with the bits that were promised."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kernels.device import H200
from kernels.problem import DType, Problem
from kernels.runtime import Runtime
from kernels.together import Host

SMALL = [Problem(16 + 8 * n, 256, 512) for n in range(8)]
LARGE = Problem(8192, 8192, 8192)


class Everything:
    """A build in which every function is there."""

    manifest = SimpleNamespace(functions={"some": 1}, build_hash="")

    def info(self, name: str) -> Any:
        return SimpleNamespace()


@pytest.fixture
def gpu() -> Runtime:
    return Runtime(H200, libraries=Everything())  # type: ignore[arg-type]


def numbers(runtime: Runtime, problems: list[Problem]) -> list[tuple[int, ...]]:
    return [group.numbers for group in runtime.groups(problems)]


def test_small_unlike_products_share_a_launch_and_the_reason_says_how_many(gpu: Runtime) -> None:
    (group,) = gpu.groups(SMALL)
    assert group.numbers == tuple(range(8))
    assert group.choice.variant == group.variant.name
    assert "8 products" in group.choice.why
    alone = sum(gpu.choose(problem).seconds for problem in SMALL)
    assert 0 < 8 * group.choice.seconds < alone


def test_what_fills_the_device_by_itself_keeps_its_own_launch(gpu: Runtime) -> None:
    assert numbers(gpu, [LARGE, *SMALL]) == [tuple(range(1, 9))]
    assert numbers(gpu, [LARGE, LARGE]) == []
    assert numbers(gpu, SMALL[:1]) == []
    assert numbers(gpu, []) == []


def test_where_launching_takes_longer_than_computing_fewer_are_enough(gpu: Runtime) -> None:
    assert numbers(gpu, SMALL[:2]) == []
    slow = Host(launch=50e-6, member=25e-6)
    assert [group.numbers for group in gpu.groups([*SMALL[:3], LARGE], slow)] == [(0, 1, 2)]
    dear = Host(launch=50e-6, member=50e-6)
    assert gpu.groups(SMALL, dear) == []


def test_types_and_layouts_do_not_mix(gpu: Runtime) -> None:
    halves = [
        Problem(32, 128, 256, dtype=DType.BF16, out_dtype=DType.BF16, trans_b=n % 2 == 1) for n in range(20)
    ]
    found = numbers(gpu, [*SMALL, *halves, Problem(8, 8, 8, dtype=DType.FP32, out_dtype=DType.FP32)])
    assert found == [tuple(range(8)), tuple(range(8, 28, 2)), tuple(range(9, 28, 2))]


def test_a_kernel_that_may_not_run_or_has_other_bits_takes_nobody(gpu: Runtime) -> None:
    first, second = gpu.grouped
    gpu.bar(first.name, "a test")
    (group,) = gpu.groups(SMALL)
    assert group.variant is second
    gpu.admit(second.name, equal_bits=False)
    assert gpu.groups(SMALL) == []
    free = [Problem(each.m, each.n, each.k, batch_invariant=False) for each in SMALL]
    (group,) = gpu.groups(free)
    assert group.variant is second


def test_a_function_that_is_wrong_here_bars_the_kernel(gpu: Runtime) -> None:
    asked: list[str] = []

    def check(runtime: Runtime, variant: Any, problem: Problem) -> str | None:
        asked.append(variant.name)
        return "3 of 9 elements are wrong"

    gpu._check = check
    assert gpu.groups(SMALL) == []
    assert asked[0] in gpu.barred
