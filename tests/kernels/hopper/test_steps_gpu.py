"""Steps 1 to 8 on a GPU: ragged shapes, whole numbers bit for bit, normal inputs within the API's bound."""

from __future__ import annotations

import pytest

from benchmarks.ladder import ARCH, verify
from kernels.ladder import HOPPER
from kernels.problem import DType

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("number", [step.number for step in HOPPER if step.number < 9])
@pytest.mark.parametrize("ctas", [0, 3])
def test_step_is_right(number: int, dtype: DType, ctas: int) -> None:
    """ctas: 0 stands for all SMs, 3 for so few that each walks over many tiles."""
    import torch

    device = torch.cuda.get_device_properties(0)
    arch = ARCH[device.major, device.minor]
    worst = verify(arch, number, dtype, ctas or device.multi_processor_count)
    assert worst < (1e-3 if dtype is DType.FP16 else 8e-3)
