"""Who waits for sockets: receives calls, hands on replies, over kept connections, in threads or asyncio.

A `Transport` has one method, `send(call) -> Reply`, and `close()`; `AsyncTransport` the same as coroutines.
A faster path between processes of one machine is another implementation of it: calls carry views of the
caller's memory and a sink for the result, and name no socket.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from service.client.errors import ConnectionFailed, TimedOut
from service.client.wire import Address, Call, Connection, Reply, Waiting, connect


class Transport(Protocol):
    """Sends calls from any thread."""

    def send(self, call: Call, deadline: float) -> Reply:
        """The reply, or ConnectionFailed; TimedOut at `deadline` (time.monotonic seconds)."""

    def close(self) -> None:
        """Close what is kept open."""


class AsyncTransport(Protocol):
    """Sends calls from one event loop."""

    async def send(self, call: Call, deadline: float) -> Reply:
        """The reply, or ConnectionFailed; TimedOut at `deadline` (time.monotonic seconds)."""

    async def close(self) -> None:
        """Close what is kept open."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is, and what every request carries."""

    host: str
    port: int
    authority: str
    prefix: str
    path: str | None
    tls: ssl.SSLContext | None
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, url: str, key: str | None = None, verify: ssl.SSLContext | bool = True) -> Endpoint:
        """From `http://host:port`, `https://…` or `unix:/path/of/socket`."""
        headers = [("accept-encoding", "identity"), ("user-agent", "gemm-service-client")]
        if key:
            headers.append(("authorization", f"Bearer {key}"))
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            return cls("", 0, "localhost", "", os.path.expanduser(path), None, tuple(headers))
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"url must be http://host:port, https://host:port or unix:/path, not {url!r}")
        tls = _context(verify) if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.netloc, parts.path.rstrip("/"), None, tls, tuple(headers))

    @property
    def name(self) -> str:
        """For people."""
        return self.path or self.authority

    def known(self) -> list[Address] | None:
        """Addresses that need no look-up."""
        return [(socket.AF_UNIX, self.path)] if self.path is not None else None

    def unresolved(self, error: OSError) -> ConnectionFailed:
        """A failed look-up."""
        return ConnectionFailed(f"can't find {self.host}: {error.strerror}", sent=False)


def _context(verify: ssl.SSLContext | bool) -> ssl.SSLContext:
    if isinstance(verify, ssl.SSLContext):
        return verify
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class SocketTransport:
    """Calls over kept connections, for threads: a call waits where `connections` are in use."""

    def __init__(self, endpoint: Endpoint, connections: int = 64) -> None:
        self._endpoint = endpoint
        self._free = threading.BoundedSemaphore(connections)
        self._idle: deque[Connection] = deque()

    def send(self, call: Call, deadline: float) -> Reply:
        """See Transport."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimedOut("no connection got free in time", sent=False)
        try:
            while True:
                connection = self._take() or self._connect(deadline)
                try:
                    return self._exchange(connection, call, deadline)
                except ConnectionFailed as error:
                    if not _again(connection, call, error):
                        raise
        finally:
            self._free.release()

    def close(self) -> None:
        """See Transport."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if not connection.stale():
                return connection
            connection.close()
        return None

    def _connect(self, deadline: float) -> Connection:
        end = self._endpoint
        addresses = end.known()
        if addresses is None:
            try:
                found = socket.getaddrinfo(end.host, end.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise end.unresolved(error) from None
            addresses = [(info[0], info[4]) for info in found]
        made: Connection = _wait(connect(addresses, end.tls, end.host or end.name), deadline)
        return made

    def _exchange(self, connection: Connection, call: Call, deadline: float) -> Reply:
        end = self._endpoint
        try:
            steps = connection.exchange(_prefixed(call, end), end.authority, end.headers)
            reply: Reply = _wait(steps, deadline)
        except BaseException:
            connection.close()
            raise
        if reply.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply


def _wait(steps: Waiting, deadline: float) -> Any:
    """Drive a generator of `Need`s with poll."""
    poller: select.poll | None = None
    try:
        while True:
            need = next(steps)
            events = (select.POLLIN if need.read else 0) | (select.POLLOUT if need.write else 0)
            if poller is None:
                poller = select.poll()
            poller.register(need.descriptor, events)
            left = deadline - time.monotonic()
            ready = left > 0 and poller.poll(left * 1000)
            poller.unregister(need.descriptor)
            if not ready:
                steps.close()
                raise TimedOut("no reply in the time given for the call", sent=True)
    except StopIteration as done:
        return done.value


def _again(connection: Connection, call: Call, error: ConnectionFailed) -> bool:
    """Whether a kept connection was closed under a call, which a fresh one then serves."""
    stale = connection.used > 1 and not connection.answered and not isinstance(error, TimedOut)
    return stale and call.idempotent


def _prefixed(call: Call, end: Endpoint) -> Call:
    if not end.prefix:
        return call
    return Call(call.method, end.prefix + call.target, call.headers, call.parts, call.sink, call.idempotent)


class AsyncSocketTransport:
    """Calls over kept connections, for one event loop."""

    def __init__(self, endpoint: Endpoint, connections: int = 64) -> None:
        self._endpoint = endpoint
        self._free = asyncio.Semaphore(connections)
        self._idle: deque[Connection] = deque()

    async def send(self, call: Call, deadline: float) -> Reply:
        """See AsyncTransport."""
        try:
            async with asyncio.timeout_at(_loop_time(deadline)), self._free:
                while True:
                    connection = self._take() or await self._connect()
                    try:
                        return await self._exchange(connection, call)
                    except ConnectionFailed as error:
                        if not _again(connection, call, error):
                            raise
        except TimeoutError:
            raise TimedOut("no reply in the time given for the call", sent=True) from None

    async def close(self) -> None:
        """See AsyncTransport."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale():
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        end = self._endpoint
        addresses = end.known()
        if addresses is None:
            loop = asyncio.get_running_loop()
            try:
                found = await loop.getaddrinfo(end.host, end.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise end.unresolved(error) from None
            addresses = [(info[0], info[4]) for info in found]
        made: Connection = await _await(connect(addresses, end.tls, end.host or end.name))
        return made

    async def _exchange(self, connection: Connection, call: Call) -> Reply:
        end = self._endpoint
        try:
            steps = connection.exchange(_prefixed(call, end), end.authority, end.headers)
            reply: Reply = await _await(steps)
        except BaseException:
            connection.close()
            raise
        if reply.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply


async def _await(steps: Waiting) -> Any:
    """Drive a generator of `Need`s with the event loop."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            need = next(steps)
            ready = loop.create_future()
            if need.read:
                loop.add_reader(need.descriptor, _set, ready)
            if need.write:
                loop.add_writer(need.descriptor, _set, ready)
            try:
                await ready
            finally:
                loop.remove_reader(need.descriptor)
                loop.remove_writer(need.descriptor)
    except StopIteration as done:
        return done.value
    finally:
        steps.close()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _loop_time(deadline: float) -> float:
    """A deadline of time.monotonic on the loop's own clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
