"""Step 9 on a real GPU under a thousand seeds of delays in each role: equal bits, and those of the product."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kernels.call import Code
from kernels.device import describe_cuda
from kernels.libraries import Libraries
from kernels.problem import DType

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

SEEDS = 1000
BLOCKS = 12  # so few that each walks over several tiles and its ring wraps
PREFIX = "stress_"


def stressed() -> list[str]:
    """Names of what is built for stress; empty where there is no GPU or nothing is built."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return []
    return sorted(n for n in Libraries("sm_90a").manifest.functions if n.startswith(PREFIX + "step9"))


def test_a_thousand_seeds_leave_the_same_bits() -> None:
    names = stressed()
    if not names:
        pytest.skip("needs sm_90 and python -m kernels build --arch sm_90a")
    assert len(names) >= 5
    libraries, device = Libraries("sm_90a"), describe_cuda()
    for name in names:
        m, n, k = (48, 2056, 1096) if "swap" in name else (1096, 2056, 1096)
        a = torch.randn(1, m, k, device="cuda").half()
        b = torch.randn(1, n, k, device="cuda").half()
        d = torch.empty(1, m, n, device="cuda", dtype=torch.float16)

        def launch(function: Any, seed: int, a: Any = a, b: Any = b, d: Any = d) -> Any:
            d.fill_(torch.nan)
            function(
                a, b.transpose(1, 2), d.data_ptr(), *d.stride(), 0, 0, 0, 0, seed, 1.0, 0.0,
                Code(d=DType.FP16).pack(), 1, BLOCKS, 8,
            )  # fmt: skip
            return d

        product = libraries.load(name.removeprefix(PREFIX))
        want = launch(product, 0).clone()
        assert bool(torch.isfinite(want).all())
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        function = libraries.load(name)
        differ = torch.zeros((), device="cuda", dtype=torch.int64)
        begin.record()
        for seed in range(1, SEEDS + 1):
            differ += (launch(function, seed) != want).any()
        end.record()
        end.synchronize()
        assert int(differ) == 0, f"{name}: {int(differ)} of {SEEDS} seeds left other bits"
        assert begin.elapsed_time(end) / SEEDS > 0.02, f"{name}: nothing was delayed on {device.name}"


@pytest.mark.parametrize("step", [7, 8])
def test_steps_with_a_producer_of_their_own_leave_the_same_bits_too(step: int) -> None:
    """Delays are put into the compiled PTX here; the driver compiles it, the function's own host code launches it.

    The stand-in for the CUDA runtime must come first in a process, so this runs in one of its own.
    """
    if not stressed():
        pytest.skip("needs sm_90 and python -m kernels build --arch sm_90a")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(step), str(SEEDS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0", "of", str(SEEDS)]


CHILD = """
import ctypes, sys
from pathlib import Path
import torch
from benchmarks.planted import Driver, case_kernel
from kernels.libraries import Libraries
from kernels.virtual import mutants
from kernels.virtual.jitter import SEED, delayed

torch.zeros(1, device="cuda")
driver = Driver()
case = mutants.case_of("sm_90a", int(sys.argv[1]))
libraries = Libraries("sm_90a", stand_in=Path(driver.path))
function = libraries.load(case.function)
driver.text = delayed(libraries.path(case.function, "ptx").read_text())
driver.function(case_kernel(driver.text))
place, size = ctypes.c_void_p(), ctypes.c_size_t()
module = driver._modules[driver.text]
assert driver.cuda.cuModuleGetGlobal_v2(ctypes.byref(place), ctypes.byref(size), module, SEED.encode()) == 0
p = case.problem
a, b = (torch.randn(rows, p.k, device="cuda").half() for rows in (p.m, p.n))
d, want = (torch.empty(p.m, p.n, device="cuda", dtype=torch.float16) for _ in range(2))
differ = 0
for seed in range(int(sys.argv[2]) + 1):
    value = ctypes.c_uint32(seed)
    torch.cuda.synchronize()
    assert driver.cuda.cuMemcpyHtoD_v2(place, ctypes.byref(value), ctypes.c_size_t(4)) == 0
    out = d if seed else want
    out.fill_(float("nan"))
    function(a, b, out, 4)
    if seed:
        differ += int((d != want).any())
exact = (a.double() @ b.double().T)
assert bool(((want.double() - exact).abs() <= 0.05).all())
print(differ, "of", sys.argv[2])
"""
