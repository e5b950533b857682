"""What both clients can be asked: receives arguments in plain Python, hands on operations and until when they may take.

Each call is written here once, with its signature and what it means; the clients wrap it (`blocking`, `awaited` in
client.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from service.client.errors import GemmError
from service.client.jobs import Job, Step
from service.client.operations import Made, Operation, Operations, Result, Retries, result
from service.client.tensors import Array, Handle

T = TypeVar("T")
Operand = Array | Handle | str

#: An operation, and when it is given up (time.monotonic seconds).
Timed = tuple[Operation[T], float]


class Options(TypedDict, total=False):
    """Parameters of a product, as the service names them; None leaves the service's default."""

    alpha: float | None
    beta: float | None
    trans_a: bool
    trans_b: bool
    bias_dim: Literal["n", "m"]
    activation: Literal["none", "relu", "gelu", "silu"]
    out_dtype: Literal["fp16", "bf16", "fp32", "fp64"] | None
    precision: Literal["ieee", "tf32"]
    batch_invariant: bool
    variant: str
    deadline_ms: float | None
    priority: int
    durable: bool
    ttl_seconds: float | None


class Calls:
    """The calls of a client; `seconds` bounds each with its retries."""

    def __init__(self, retries: Retries, seconds: float) -> None:
        self._ask = Operations(retries)
        self._seconds = seconds

    def _until(self, timeout: float | None = None) -> float:
        return time.monotonic() + (self._seconds if timeout is None else timeout)

    def gemm(
        self,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        bias: Operand | None = None,
        *,
        out: Array | Handle | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Timed[Any]:
        """D = act(alpha · op(A) · op(B) + beta · C + bias).

        Operands are arrays of numpy, torch or any library that has DLPack (CuPy, JAX), or what the service keeps (a
        Handle or its name). Returns an array of the same kind; `out` itself where an array was given for the result
        (its dtype then is D's); the Handle where `out` is one, under which the service then keeps D.
        """
        until = self._until(timeout)
        return _d(self._ask.gemm(a, b, c, bias, out=out, options=options, deadline=until)), until

    def gemm_result(
        self,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        bias: Operand | None = None,
        *,
        out: Array | Handle | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Timed[Result]:
        """`gemm`, with the variant that ran, why, and how long the request waited and computed."""
        until = self._until(timeout)
        return _told(self._ask.gemm(a, b, c, bias, out=out, options=options, deadline=until)), until

    def put(
        self,
        name: str,
        value: Array | Path,
        *,
        ttl_seconds: float | None = None,
        if_match: str | None = None,
        replace: bool = True,
    ) -> Timed[Handle]:
        """Keep an array, or a .npy or .safetensors file (a Path), on the service; durable when this returns.

        `if_match` replaces only the tensor of that ETag; `replace=False` only makes a new one.
        """
        until = self._until()
        return (
            self._ask.put(
                name, value, ttl_seconds=ttl_seconds, if_match=if_match, replace=replace, deadline=until
            ),
            until,
        )

    def get(self, name: str | Handle, *, out: Array | None = None, like: Array | None = None) -> Timed[Any]:
        """A kept tensor as a numpy array, into `out`, or as an array of `like`'s library on its device."""
        until = self._until()
        return self._ask.get(name_of(name), out, like, until), until

    def head(self, name: str | Handle) -> Timed[Handle]:
        """What is known of a kept tensor: ETag, dtype, shape."""
        until = self._until()
        return self._ask.head(name_of(name), until), until

    def delete(self, name: str | Handle, *, if_match: str | None = None) -> Timed[None]:
        """Forget a kept tensor."""
        until = self._until()
        return self._ask.delete(name_of(name), if_match, until), until

    def tensors(self) -> Timed[list[Handle]]:
        """All kept tensors."""
        until = self._until()
        return self._ask.tensors(until), until

    def submit(self, steps: Iterable[Step], *, idempotency_key: str | None = None) -> Timed[Job]:
        """Hand in a job; it is durable when this returns. The same key again names the same job."""
        until = self._until()
        return self._ask.submit(list(steps), idempotency_key, until), until

    def wait(self, job: Job | str, *, timeout: float | None = None, progress: bool = False) -> Timed[Job]:
        """The job once it has ended; with `progress` a bar on the terminal. JobFailed where it isn't done."""
        until = self._until(timeout)

        def shown() -> Operation[Job]:
            with _bar(progress) as show:
                return (yield from self._ask.wait(_job(job), until, show))

        return shown(), until + 10.0

    def job(self, job: Job | str) -> Timed[Job]:
        """How a job stands."""
        until = self._until()
        return self._ask.job(_job(job), None, until), until

    def jobs(self) -> Timed[list[Job]]:
        """All jobs."""
        until = self._until()
        return self._ask.jobs(until), until

    def result(
        self, job: Job | str, step: Step | str, *, out: Array | None = None, like: Array | None = None
    ) -> Timed[Any]:
        """A step's result as a numpy array, into `out`, or as an array of `like`'s library on its device."""
        until = self._until()
        return self._ask.result(_job(job), _step(step), out, like, until), until

    def cancel(self, job: Job | str) -> Timed[None]:
        """Cancel a job; steps that run are finished and dropped."""
        until = self._until()
        return self._ask.cancel(_job(job), until), until

    def variants(self) -> Timed[Any]:
        """What can run on the service's device."""
        return self._read("/variants")

    def choose(self, /, m: int, n: int, k: int, **problem: Any) -> Timed[Any]:
        """What would run for a problem, each candidate's estimate, and why not the others."""
        until = self._until()
        return self._ask.choose(m, n, k, problem, until), until

    def now(self) -> Timed[Any]:
        """What the service does now: rates and times of the last seconds, workers, memory, the last batches."""
        return self._read("/now")

    def limits(self) -> Timed[Any]:
        """All limits of the service."""
        return self._read("/limits")

    def ready(self) -> Timed[bool]:
        """Whether the service takes work now."""
        until = self._until(10.0)
        once = Operations(Retries(attempts=1))

        def asked() -> Operation[bool]:
            try:
                yield from once.read("/health/ready", until)
            except GemmError:
                return False
            return True

        return asked(), until

    def metrics(self) -> Timed[str]:
        """The metrics, as Prometheus reads them."""
        until = self._until()
        return self._ask.text("/metrics", until), until

    def _read(self, target: str) -> Timed[Any]:
        until = self._until()
        return self._ask.read(target, until), until


def _d(operation: Operation[Made]) -> Operation[Any]:
    made = yield from operation
    return made.array if made.handle is None else made.handle


def _told(operation: Operation[Made]) -> Operation[Result]:
    return result((yield from operation))


def name_of(value: str | Handle) -> str:
    """A kept tensor's name."""
    return value.name if isinstance(value, Handle) else value


def _job(value: Job | str) -> str:
    return value.id if isinstance(value, Job) else value


def _step(value: Step | str) -> str:
    return value.id if isinstance(value, Step) else value


class _bar(AbstractContextManager[Callable[[Job], None] | None]):
    """A progress bar of a job's steps, or nothing."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._progress: Any = None

    def __enter__(self) -> Callable[[Job], None] | None:
        if not self._shown:
            return None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._progress.start()
        task = self._progress.add_task("job", total=None)

        def show(job: Job) -> None:
            running = sum(step.state == "running" for step in job.steps)
            self._progress.update(
                task,
                description=f"job {job.id} {job.state}" + (f", {running} running" if running else ""),
                total=len(job.steps) or None,
                completed=job.steps_ended,
            )

        return show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
