"""The virtual GPU: executes the compiled PTX of kernels on the CPU, asynchronous engines and all."""

from kernels.virtual.host import buffer_of, on_device, prepare, run
from kernels.virtual.launch import EARLY, LATE, Options, Schedule, schedules
from kernels.virtual.report import Fault, Finding, Report, Run

__all__ = [
    "EARLY", "LATE", "Fault", "Finding", "Options", "Report", "Run", "Schedule", "buffer_of", "on_device",
    "prepare", "run", "schedules",
]  # fmt: skip
