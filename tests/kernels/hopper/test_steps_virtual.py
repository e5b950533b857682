"""Steps 1 to 8 as built, on the virtual GPU: ragged shapes, late, early and random schedules, the race detector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.build import build
from kernels.ladder import HOPPER
from kernels.libraries import Libraries
from kernels.problem import DType, Problem

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]

# M, N, K and CTAs: edges in every dimension, K past the ring's six stages, several tiles a CTA
SHAPES = {
    1: (100, 72, 40, 1),
    2: (100, 72, 150, 1),
    3: (130, 140, 100, 1),
    4: (136, 200, 152, 1),
    5: (136, 200, 456, 1),
    6: (392, 264, 456, 3),
    7: (392, 264, 456, 3),
    8: (392, 264, 456, 4),
}


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    """The steps, built or from the cache, with the virtual GPU in CUDA's place."""
    pytest.importorskip("cutlass")
    from kernels.virtual.host import host

    build("sm_90a", only="step[1-8]_*")
    return Libraries("sm_90a", stand_in=Path(host().path))


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("number", SHAPES)
def test_step_is_right_under_every_schedule(libraries: Libraries, number: int, dtype: DType) -> None:
    torch: Any = pytest.importorskip("torch")
    from kernels.virtual import Options, on_device, run

    m, n, k, ctas = SHAPES[number]
    step = HOPPER[number - 1]
    assert step.unsupported(Problem(m, n, k, dtype=dtype, out_dtype=dtype, trans_b=True)) is None
    kind = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(number)
    a, b = (torch.randint(-2, 3, size, generator=generator).to(kind) for size in ((m, k), (n, k)))
    d = torch.full((m, n), float("nan"), dtype=kind)
    name = step.function(dtype)
    function = libraries.load(name)
    report = run(
        lambda: function(*map(on_device, (a, b, d)), ctas),
        {"a": a, "b": b, "d": d},
        libraries.path(name, "ptx").read_text(),
        schedules_=3,
        options=Options(sms=ctas),
    )
    assert report.ok, str(report)
    assert torch.equal(d, (a.float() @ b.float().T).to(kind))
