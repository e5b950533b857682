"""The Python client: receives numpy and torch arrays, hands on products, kept tensors and jobs of a service.

>>> from service.client import Client >>> with Client() as client: ... d = client.gemm(a, b)
"""

from service.client.calls import Options
from service.client.client import AsyncClient, Client
from service.client.errors import (
    Busy,
    ConnectionFailed,
    DeadlinePassed,
    GemmError,
    Invalid,
    JobFailed,
    NotAllowed,
    NotFound,
    Refused,
    TimedOut,
)
from service.client.jobs import Job, Step, StepState
from service.client.loans import Borrowed
from service.client.operations import Result, Retries
from service.client.tensors import Handle

__all__ = [
    "AsyncClient",
    "Borrowed",
    "Busy",
    "Client",
    "ConnectionFailed",
    "DeadlinePassed",
    "GemmError",
    "Handle",
    "Invalid",
    "Job",
    "JobFailed",
    "NotAllowed",
    "NotFound",
    "Options",
    "Refused",
    "Result",
    "Retries",
    "Step",
    "StepState",
    "TimedOut",
]
