"""Step 9 on the virtual GPU with its race detector: multicast, ping-pong, split-K and the transposed form."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kernels import selftest
from kernels.build import build
from kernels.hopper.variants import variants
from kernels.problem import Problem
from kernels.verify import check
from tests.kernels.samples.step9 import NAMES

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample, compiled."""
    folder = tmp_path_factory.mktemp("kernels")
    build("sm_90a", modules=["tests.kernels.samples.step9"], root=folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_it_is_right_and_free_of_races(root: Path, name: str) -> None:
    from kernels.virtual.runtime import VirtualRuntime

    variant = next(v for v in variants() if name in {each[0] for each in v.functions()})
    chip = VirtualRuntime("sm_90a", root=root, variants=[variant], detect=True)
    rows = variant.tiling.q if variant.tiling.swap else 264
    problem = Problem(rows, 264, 136)  # more tiles than blocks, and edges in all three
    assert variant.function(problem) == name
    a, b, c, bias = selftest.host_operands(problem)
    verdict = check(problem, selftest.launch(chip, variant, problem, a, b, c, bias), a, b, c, bias)
    assert verdict.ok, verdict.detail
