"""The two clients: receive calls in plain Python, drive their operations, and wait each in its own way."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy as np

from service.client.calls import Calls, Timed, name_of
from service.client.errors import ConnectionFailed, GemmError
from service.client.loans import Borrowed, ask
from service.client.local import Place
from service.client.operations import Operation, Pause, Retries
from service.client.several import AsyncSeveralTransport, Order, SeveralTransport
from service.client.shared import Arrays
from service.client.tensors import Handle, Unfit
from service.client.transport import (
    AsyncBestTransport,
    AsyncSocketTransport,
    AsyncTransport,
    BestTransport,
    Endpoint,
    SocketTransport,
    Transport,
    wait,
    wait_async,
)

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"


P = ParamSpec("P")
M = TypeVar("M")
Asked = Callable[Concatenate[Calls, P], Timed[T]]


def blocking(call: Asked[P, T]) -> Callable[Concatenate[Client, P], T]:
    """The call as a method that returns when it is done."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(*call(self._calls, *args, **kwargs))

    return _named(method, call)


def awaited(call: Asked[P, T]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The call as a coroutine."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(*call(self._calls, *args, **kwargs))

    return _named(method, call)


def _named(method: M, call: Callable[..., Any]) -> M:
    """With the call's name, signature and docstring, as help() shows them."""
    told: Any = method
    functools.update_wrapper(told, call)
    signature = inspect.signature(call)
    result = str(signature.return_annotation).removeprefix("Timed[").removesuffix("]")
    told.__signature__ = signature.replace(return_annotation=result)
    return method


_BORROW = """A stored tensor as a torch tensor on the GPU that computes for a service on this machine.

        It is a copy of the caller's own, by CUDA IPC, until `close` or the end of the block, ten minutes at most.
        GemmError where the service isn't on this machine, or computes elsewhere than on a GPU.

        >>> {block}("w") as w:
        ...     y = x @ w.value
        """


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
        self._calls = Calls(Retries(attempts=retries) if isinstance(retries, int) else retries, timeout)

    def _order(self) -> Order:
        return Order([endpoint.name + endpoint.prefix for endpoint in self.endpoints])

    def _lender(self, limits: Any) -> tuple[Place, str]:
        """Where a service on this machine lends its tensors, by the document of its limits, and the key for it."""
        endpoint = self.endpoints[0]
        place = Place.of(json.dumps(limits).encode())
        if not (self._local and endpoint.near) or place is None:
            raise GemmError("only a service on this machine lends its tensors")
        return place, endpoint.key

    def empty(self, shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray[Any, np.dtype[Any]]:
        """An array of zeros in memory that a service on this machine shares: as operand or `out` it isn't copied."""
        return self._arrays.empty(shape, np.dtype(dtype))


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
                except (ConnectionFailed, Unfit) as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            operation.close()

    gemm = blocking(Calls.gemm)
    gemm_result = blocking(Calls.gemm_result)
    put = blocking(Calls.put)
    get = blocking(Calls.get)
    head = blocking(Calls.head)
    delete = blocking(Calls.delete)
    tensors = blocking(Calls.tensors)
    submit = blocking(Calls.submit)
    wait = blocking(Calls.wait)
    job = blocking(Calls.job)
    jobs = blocking(Calls.jobs)
    result = blocking(Calls.result)
    cancel = blocking(Calls.cancel)
    variants = blocking(Calls.variants)
    choose = blocking(Calls.choose)
    now = blocking(Calls.now)
    limits = blocking(Calls.limits)
    ready = blocking(Calls.ready)
    metrics = blocking(Calls.metrics)

    def borrow(self, name: str | Handle) -> Borrowed:
        place, key = self._lender(self.limits())
        steps = ask(place, key, self._arrays, name_of(name))
        return Borrowed(wait(steps, time.monotonic() + self.timeout))

    borrow.__doc__ = _BORROW.format(block="with client.borrow")


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
                except (ConnectionFailed, Unfit) as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            operation.close()

    gemm = awaited(Calls.gemm)
    gemm_result = awaited(Calls.gemm_result)
    put = awaited(Calls.put)
    get = awaited(Calls.get)
    head = awaited(Calls.head)
    delete = awaited(Calls.delete)
    tensors = awaited(Calls.tensors)
    submit = awaited(Calls.submit)
    wait = awaited(Calls.wait)
    job = awaited(Calls.job)
    jobs = awaited(Calls.jobs)
    result = awaited(Calls.result)
    cancel = awaited(Calls.cancel)
    variants = awaited(Calls.variants)
    choose = awaited(Calls.choose)
    now = awaited(Calls.now)
    limits = awaited(Calls.limits)
    ready = awaited(Calls.ready)
    metrics = awaited(Calls.metrics)

    async def borrow(self, name: str | Handle) -> Borrowed:
        place, key = self._lender(await self.limits())
        steps = ask(place, key, self._arrays, name_of(name))
        return await Borrowed.opened(await wait_async(steps, time.monotonic() + self.timeout))

    borrow.__doc__ = _BORROW.format(block="async with await client.borrow")
