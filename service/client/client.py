"""The two clients: receive calls in plain Python, hand them to operations, and wait each in its own way."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import numpy as np

from service.client.errors import ConnectionFailed, GemmError
from service.client.jobs import Job, Step
from service.client.loans import Borrowed
from service.client.local import Place, open_session
from service.client.operations import Operation, Operations, Pause, Result, Retries
from service.client.several import AsyncSeveralTransport, Order, SeveralTransport
from service.client.shared import Arrays
from service.client.tensors import Array, Handle
from service.client.transport import (
    AsyncBestTransport,
    AsyncSocketTransport,
    AsyncTransport,
    BestTransport,
    Endpoint,
    SocketTransport,
    Transport,
    wait,
)

T = TypeVar("T")
Operand = Array | Handle | str

DEFAULT_URL = "http://127.0.0.1:8000"


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


class _Base:
    """What both clients are made with."""

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        *,
        key: str | None = None,
        timeout: float = 600.0,
        retries: Retries | int = 5,
        connections: int = 64,
        verify: ssl.SSLContext | bool = True,
        local: bool = True,
    ) -> None:
        """Without arguments: the service in GEMM_URL (else http://127.0.0.1:8000), the key in GEMM_KEY.

        `url` may be `unix:/path`; or several, in a sequence (in GEMM_URL with commas between), of fronts that share
        their store: each handle is then asked of one of them, of another where that one can't be had. `timeout`
        bounds a call with its retries, seconds. `retries` is how often a call is tried where the service says that
        it is busy or the connection breaks: products are pure and jobs carry an idempotency key, so nothing happens
        twice. `local`: use shared memory where the service is
        on this machine and offers it.
        """
        urls = url or os.environ.get("GEMM_URL") or DEFAULT_URL
        key = key or os.environ.get("GEMM_KEY")
        self.endpoints = [
            Endpoint.of(one.strip(), key, verify)
            for one in (urls.split(",") if isinstance(urls, str) else urls)
        ]
        self.timeout = timeout
        self._connections = connections
        self._local = local
        self._arrays = Arrays()
        self._ask = Operations(Retries(attempts=retries) if isinstance(retries, int) else retries)

    def _order(self) -> Order:
        return Order([endpoint.name + endpoint.prefix for endpoint in self.endpoints])

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, np.dtype[Any]]:
        """An array of zeros in memory that a service on this machine shares: as operand or `out` it isn't copied."""
        return self._arrays.empty(shape, np.dtype(dtype))

    def _until(self, timeout: float | None = None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else timeout)


class Client(_Base):
    """The service, for threads: usable from several at once.

    >>> with Client() as client:
    ...     d = client.gemm(a, b, activation="relu")   # numpy or torch in, the same out
    ...     client.put("w", weights)
    ...     client.gemm(x, "w", out=y)                 # a string names what is kept; D goes into y
    """

    def __init__(self, *args: Any, transport: Transport | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._transport = transport or self._own_transport()

    __init__.__doc__ = _Base.__init__.__doc__

    def _own_transport(self) -> Transport:
        transports = [self._transport_to(endpoint) for endpoint in self.endpoints]
        return transports[0] if len(transports) == 1 else SeveralTransport(self._order(), transports)

    def _transport_to(self, endpoint: Endpoint) -> Transport:
        if self._local and endpoint.near:
            return BestTransport(endpoint, self._connections, self._arrays)
        return SocketTransport(endpoint, self._connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close kept connections; the client may be used again."""
        self._transport.close()

    def _run(self, operation: Operation[T], deadline: float) -> T:
        """Drive an operation: send its calls, sleep its pauses."""
        try:
            step = next(operation)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.seconds)
                    step = operation.send(None)
                    continue
                try:
                    reply = self._transport.send(step, deadline)
                except ConnectionFailed as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            operation.close()

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
    ) -> Any:
        """D = act(alpha · op(A) · op(B) + beta · C + bias).

        Operands are arrays of numpy, torch or any library that has DLPack (CuPy, JAX), or what the service keeps (a
        Handle or its name). Returns an array of the same kind; `out` itself where an array was given for the result
        (its dtype then is D's); the Handle where `out` is one, under which the service then keeps D.
        """
        made = self.gemm_result(a, b, c, bias, out=out, timeout=timeout, **options)
        return made.array if made.handle is None else made.handle

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
    ) -> Result:
        """`gemm`, with the variant that ran, why, and how long the request waited and computed."""
        until = self._until(timeout)
        return self._run(self._ask.gemm(a, b, c, bias, out=out, options=options, deadline=until), until)

    def put(
        self,
        name: str,
        value: Array | Path,
        *,
        ttl_seconds: float | None = None,
        if_match: str | None = None,
        replace: bool = True,
    ) -> Handle:
        """Keep an array, or a .npy or .safetensors file (a Path), on the service; durable when this returns.

        `if_match` replaces only the tensor of that ETag; `replace=False` only makes a new one.
        """
        until = self._until()
        return self._run(
            self._ask.put(
                name, value, ttl_seconds=ttl_seconds, if_match=if_match, replace=replace, deadline=until
            ),
            until,
        )

    def get(self, name: str | Handle, *, out: Array | None = None, like: Array | None = None) -> Any:
        """A kept tensor as a numpy array, into `out`, or as an array of `like`'s library on its device."""
        until = self._until()
        return self._run(self._ask.get(_name(name), out, like, until), until)

    def head(self, name: str | Handle) -> Handle:
        """What is known of a kept tensor: ETag, dtype, shape."""
        until = self._until()
        return self._run(self._ask.head(_name(name), until), until)

    def delete(self, name: str | Handle, *, if_match: str | None = None) -> None:
        """Forget a kept tensor."""
        until = self._until()
        self._run(self._ask.delete(_name(name), if_match, until), until)

    def tensors(self) -> list[Handle]:
        """All kept tensors."""
        until = self._until()
        return self._run(self._ask.tensors(until), until)

    def borrow(self, name: str | Handle) -> Borrowed:
        """A stored tensor as a torch tensor on the GPU that computes for a service on this machine.

        It is a copy of the caller's own, by CUDA IPC, until `close` or the end of a `with` block, ten minutes at
        most. GemmError where the service isn't on this machine, or computes elsewhere than on a GPU.

        >>> with client.borrow("w") as w:
        ...     y = x @ w.value
        """
        place = Place.of(json.dumps(self.limits()).encode())
        endpoint = self.endpoints[0]
        if not (self._local and endpoint.near) or place is None:
            raise GemmError("only a service on this machine lends its tensors")
        deadline = self._until()
        connection = wait(open_session(place, endpoint.key, self._arrays), deadline)
        try:
            return Borrowed(connection, wait(connection.borrow(_name(name)), deadline))
        except BaseException:
            connection.close()
            raise

    def submit(self, steps: Iterable[Step], *, idempotency_key: str | None = None) -> Job:
        """Hand in a job; it is durable when this returns. The same key again names the same job."""
        until = self._until()
        return self._run(self._ask.submit(list(steps), idempotency_key, until), until)

    def wait(self, job: Job | str, *, timeout: float | None = None, progress: bool = False) -> Job:
        """The job once it has ended; with `progress` a bar on the terminal. JobFailed where it isn't done."""
        until = self._until(timeout)
        with _bar(progress) as show:
            return self._run(self._ask.wait(_job(job), until, show), until + 10.0)

    def job(self, job: Job | str) -> Job:
        """How a job stands."""
        until = self._until()
        return self._run(self._ask.job(_job(job), None, until), until)

    def jobs(self) -> list[Job]:
        """All jobs."""
        until = self._until()
        return self._run(self._ask.jobs(until), until)

    def result(
        self, job: Job | str, step: Step | str, *, out: Array | None = None, like: Array | None = None
    ) -> Any:
        """A step's result as a numpy array, into `out`, or as an array of `like`'s library on its device."""
        until = self._until()
        return self._run(self._ask.result(_job(job), _step(step), out, like, until), until)

    def cancel(self, job: Job | str) -> None:
        """Cancel a job; steps that run are finished and dropped."""
        until = self._until()
        self._run(self._ask.cancel(_job(job), until), until)

    def variants(self) -> Any:
        """What can run on the service's device."""
        return self._read("/variants")

    def choose(self, m: int, n: int, k: int, **problem: Any) -> Any:
        """What would run for a problem, each candidate's estimate, and why not the others."""
        until = self._until()
        return self._run(self._ask.choose(m, n, k, problem, until), until)

    def now(self) -> Any:
        """What the service does now: rates and times of the last seconds, workers, memory, the last batches."""
        return self._read("/now")

    def limits(self) -> Any:
        """All limits of the service."""
        return self._read("/limits")

    def ready(self) -> bool:
        """Whether the service takes work now."""
        until = self._until(10.0)
        once = Operations(Retries(attempts=1))
        try:
            self._run(once.read("/health/ready", until), until)
        except GemmError:
            return False
        return True

    def metrics(self) -> str:
        """The metrics, as Prometheus reads them."""
        until = self._until()
        return self._run(self._ask.text("/metrics", until), until)

    def _read(self, target: str) -> Any:
        until = self._until()
        return self._run(self._ask.read(target, until), until)


class AsyncClient(_Base):
    """The service, for one event loop; `Client`'s methods as coroutines.

    >>> async with AsyncClient() as client:
    ...     products = await asyncio.gather(*(client.gemm(x, "w") for x in batches))
    """

    def __init__(self, *args: Any, transport: AsyncTransport | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._transport = transport or self._own_transport()

    __init__.__doc__ = _Base.__init__.__doc__

    def _own_transport(self) -> AsyncTransport:
        transports = [self._transport_to(endpoint) for endpoint in self.endpoints]
        return transports[0] if len(transports) == 1 else AsyncSeveralTransport(self._order(), transports)

    def _transport_to(self, endpoint: Endpoint) -> AsyncTransport:
        if self._local and endpoint.near:
            return AsyncBestTransport(endpoint, self._connections, self._arrays)
        return AsyncSocketTransport(endpoint, self._connections)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close kept connections; the client may be used again."""
        await self._transport.close()

    async def _run(self, operation: Operation[T], deadline: float) -> T:
        """Drive an operation: send its calls, sleep its pauses."""
        try:
            step = next(operation)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    step = operation.send(None)
                    continue
                try:
                    reply = await self._transport.send(step, deadline)
                except ConnectionFailed as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            operation.close()

    async def gemm(
        self,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        bias: Operand | None = None,
        *,
        out: Array | Handle | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """See Client.gemm."""
        made = await self.gemm_result(a, b, c, bias, out=out, timeout=timeout, **options)
        return made.array if made.handle is None else made.handle

    async def gemm_result(
        self,
        a: Operand,
        b: Operand,
        c: Operand | None = None,
        bias: Operand | None = None,
        *,
        out: Array | Handle | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Result:
        """See Client.gemm_result."""
        until = self._until(timeout)
        return await self._run(self._ask.gemm(a, b, c, bias, out=out, options=options, deadline=until), until)

    async def put(
        self,
        name: str,
        value: Array | Path,
        *,
        ttl_seconds: float | None = None,
        if_match: str | None = None,
        replace: bool = True,
    ) -> Handle:
        """See Client.put."""
        until = self._until()
        return await self._run(
            self._ask.put(
                name, value, ttl_seconds=ttl_seconds, if_match=if_match, replace=replace, deadline=until
            ),
            until,
        )

    async def get(self, name: str | Handle, *, out: Array | None = None, like: Array | None = None) -> Any:
        """See Client.get."""
        until = self._until()
        return await self._run(self._ask.get(_name(name), out, like, until), until)

    async def head(self, name: str | Handle) -> Handle:
        """See Client.head."""
        until = self._until()
        return await self._run(self._ask.head(_name(name), until), until)

    async def delete(self, name: str | Handle, *, if_match: str | None = None) -> None:
        """See Client.delete."""
        until = self._until()
        await self._run(self._ask.delete(_name(name), if_match, until), until)

    async def tensors(self) -> list[Handle]:
        """See Client.tensors."""
        until = self._until()
        return await self._run(self._ask.tensors(until), until)

    async def submit(self, steps: Iterable[Step], *, idempotency_key: str | None = None) -> Job:
        """See Client.submit."""
        until = self._until()
        return await self._run(self._ask.submit(list(steps), idempotency_key, until), until)

    async def wait(self, job: Job | str, *, timeout: float | None = None, progress: bool = False) -> Job:
        """See Client.wait."""
        until = self._until(timeout)
        with _bar(progress) as show:
            return await self._run(self._ask.wait(_job(job), until, show), until + 10.0)

    async def job(self, job: Job | str) -> Job:
        """See Client.job."""
        until = self._until()
        return await self._run(self._ask.job(_job(job), None, until), until)

    async def jobs(self) -> list[Job]:
        """See Client.jobs."""
        until = self._until()
        return await self._run(self._ask.jobs(until), until)

    async def result(
        self, job: Job | str, step: Step | str, *, out: Array | None = None, like: Array | None = None
    ) -> Any:
        """See Client.result."""
        until = self._until()
        return await self._run(self._ask.result(_job(job), _step(step), out, like, until), until)

    async def cancel(self, job: Job | str) -> None:
        """See Client.cancel."""
        until = self._until()
        await self._run(self._ask.cancel(_job(job), until), until)

    async def variants(self) -> Any:
        """See Client.variants."""
        until = self._until()
        return await self._run(self._ask.read("/variants", until), until)

    async def choose(self, m: int, n: int, k: int, **problem: Any) -> Any:
        """See Client.choose."""
        until = self._until()
        return await self._run(self._ask.choose(m, n, k, problem, until), until)

    async def now(self) -> Any:
        """See Client.now."""
        until = self._until()
        return await self._run(self._ask.read("/now", until), until)

    async def limits(self) -> Any:
        """See Client.limits."""
        until = self._until()
        return await self._run(self._ask.read("/limits", until), until)

    async def ready(self) -> bool:
        """See Client.ready."""
        until = self._until(10.0)
        try:
            await self._run(Operations(Retries(attempts=1)).read("/health/ready", until), until)
        except GemmError:
            return False
        return True

    async def metrics(self) -> str:
        """See Client.metrics."""
        until = self._until()
        return await self._run(self._ask.text("/metrics", until), until)


def _name(value: str | Handle) -> str:
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
