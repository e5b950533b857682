"""Stand-in GPUs whose tensor cores can be read: the real driver and probe over a stand-in of torch and of NVML.

Each is an H200 by its datasheet and computes on the CPU. Of the third nothing can be read; one variant is barred.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kernels.device import H200, Device
from service.drivers.gpm import TensorProbe
from service.messages import Report
from tests.service.cuda_stand_in import BUDGET, Runtime, StandIn
from tests.service.nvml_stand_in import Nvml

#: Per cent of the time that tensor cores of each GPU are busy, as its samples say.
PERCENT = (81.0, 62.5, 0.0)
#: The variant that these GPUs have found wrong.
BARRED = "step9-64x64-split4"

SITE = """
import sys
if "service.worker" in sys.orig_argv:
    from service.drivers import cuda
    from tests.service.watched_gpu import Watched
    cuda.CudaDriver = Watched
"""


def environ(tmp: Path, gpus: int = len(PERCENT)) -> dict[str, str]:
    """Environment of a service whose `--device cuda` means these GPUs."""
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / "sitecustomize.py").write_text(SITE)
    return {
        "PYTHONPATH": f"{tmp}{os.pathsep}{Path(__file__).resolve().parents[2]}",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "GEMM_CACHE": str(tmp / "cache"),
    }


def device(number: int) -> Device:
    """What a GPU says of itself."""
    return replace(H200, uuid=f"GPU-{number}", driver="580.65.06", memory_bytes=2 * BUDGET)


class Watched(StandIn):
    """A stand-in that is read."""

    def start(self, report: Callable[[Report], None]) -> None:
        super().start(report)
        number = self._index
        nvml = Nvml(uuid=self.device.uuid, percent=PERCENT[number], supported=number < 2)
        self._probe = TensorProbe(self.device.uuid, nvml)
        self._probe.start(self._read)

    def _made(self) -> Runtime:
        made = Runtime()
        made.device = device(self._index)
        made.barred = {BARRED: "its self-test found 3 of 9 elements wrong"}
        return made

    def close(self) -> None:
        self._probe.stop()
        super().close()
