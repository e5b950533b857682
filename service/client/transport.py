"""Who waits for sockets: receives calls, hands on replies, over kept connections, in threads or asyncio.

A `Transport` has one method, `send(call) -> Reply`, and `close()`; `AsyncTransport` the same as coroutines.
A faster path between processes of one machine is another implementation of it: calls carry views of the
caller's memory and a sink for the result, and name no socket.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import select
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from service.client.device import OnDevice
from service.client.errors import ConnectionFailed, TimedOut
from service.client.local import WORTH, CannotLend, Place, open_session, product
from service.client.shared import Arrays
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
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ValueError(f"url must be http://host:port, https://host:port or unix:/path, not {url!r}")
        tls = _context(verify) if parts.scheme == "https" else None
        port = port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.netloc, parts.path.rstrip("/"), None, tls, tuple(headers))

    @property
    def name(self) -> str:
        """For people."""
        return self.path or self.authority

    @property
    def near(self) -> bool:
        """Whether the service may be on this machine."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return self.tls is None and ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def key(self) -> str:
        """The API key, "" for none."""
        return next((value[7:] for name, value in self.headers if name == "authorization"), "")

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
        # Leave to use a connection, one each: a queue in C, as a semaphore of threading takes longer than the packets.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(connections):
            self._free.put(None)
        self._idle: deque[Connection] = deque()

    def send(self, call: Call, deadline: float) -> Reply:
        """See Transport."""
        try:
            self._free.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            raise TimedOut("no connection got free in time", sent=False) from None
        try:
            while True:
                connection = self._take() or self._connect(deadline)
                try:
                    return self._exchange(connection, call, deadline)
                except ConnectionFailed as error:
                    if not _again(connection, call, error):
                        raise
        finally:
            self._free.put(None)

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
        made: Connection = wait(connect(addresses, end.tls, end.host or end.name), deadline)
        return made

    def _exchange(self, connection: Connection, call: Call, deadline: float) -> Reply:
        end = self._endpoint
        try:
            steps = connection.exchange(_prefixed(call, end), end.authority, end.headers)
            reply: Reply = wait(steps, deadline)
        except BaseException:
            connection.close()
            raise
        if reply.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply


def wait(steps: Waiting, deadline: float) -> Any:
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
    return msgspec.structs.replace(call, target=end.prefix + call.target)


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


async def wait_async(steps: Waiting, deadline: float) -> Any:
    """`wait`, with the event loop."""
    try:
        async with asyncio.timeout_at(_loop_time(deadline)):
            return await _await(steps)
    except TimeoutError:
        raise TimedOut("no reply in the time given for the call", sent=True) from None


class _Paths:
    """Which way a call goes: through shared memory where the service is on this machine and the call is worth it."""

    def __init__(self, endpoint: Endpoint, arrays: Arrays) -> None:
        self.arrays = arrays
        self._near = endpoint.near
        self._looked = False
        self.place: Place | None = None

    def ask(self, call: Call) -> bool | None:
        """Whether to take the near path; None: ask the service first where it is."""
        if not self._near or not product(call) or not self._worth(call):
            return False
        return None if not self._looked else self.place is not None

    def _worth(self, call: Call) -> bool:
        views = call.parts if call.into is None else (*call.parts, call.into)
        if any(isinstance(view, OnDevice) for view in views) or call.nbytes >= WORTH:
            return True
        return any(self.arrays.find(memoryview(view)) is not None for view in views)  # type: ignore[arg-type]

    def told(self, reply: Reply) -> None:
        """What the service says about itself."""
        self._looked = True
        self.place = Place.of(reply.body) if reply.status == 200 else None

    def lost(self) -> None:
        """The place is not there any more; the service may come back at another."""
        self._looked, self.place = False, None


_LIMITS = Call("GET", "/limits", (("accept", "application/json"),))


class _LocalTransport(SocketTransport):
    """Sessions instead of HTTP connections."""

    def __init__(self, endpoint: Endpoint, connections: int, paths: _Paths) -> None:
        super().__init__(endpoint, connections)
        self._paths = paths

    def _connect(self, deadline: float) -> Connection:
        place = self._paths.place
        if place is None:
            raise ConnectionFailed("there is no local socket", sent=False)
        steps = open_session(place, self._endpoint.key, self._paths.arrays, blocking=True)
        made: Connection = wait(steps, deadline)
        return made


class BestTransport:
    """Each call on the fastest path: shared memory on the same machine, else a socket."""

    def __init__(self, endpoint: Endpoint, connections: int, arrays: Arrays) -> None:
        self._paths = _Paths(endpoint, arrays)
        self._far = SocketTransport(endpoint, connections)
        self._near = _LocalTransport(endpoint, connections, self._paths)

    def send(self, call: Call, deadline: float) -> Reply:
        """See Transport."""
        near = self._paths.ask(call)
        if near is None:
            self._paths.told(self._far.send(_LIMITS, deadline))
            near = self._paths.ask(call)
        if near:
            try:
                return self._near.send(call, deadline)
            except ConnectionFailed as error:
                if isinstance(error, TimedOut):
                    raise
                if not isinstance(error, CannotLend):
                    self._near.close()
                    self._paths.lost()
                if error.sent:
                    raise
        return self._far.send(call, deadline)

    def close(self) -> None:
        """See Transport."""
        self._near.close()
        self._far.close()


class _AsyncLocalTransport(AsyncSocketTransport):
    """Sessions instead of HTTP connections."""

    def __init__(self, endpoint: Endpoint, connections: int, paths: _Paths) -> None:
        super().__init__(endpoint, connections)
        self._paths = paths

    async def _connect(self) -> Connection:
        place = self._paths.place
        if place is None:
            raise ConnectionFailed("there is no local socket", sent=False)
        made: Connection = await _await(open_session(place, self._endpoint.key, self._paths.arrays))
        return made


class AsyncBestTransport:
    """Each call on the fastest path: shared memory on the same machine, else a socket."""

    def __init__(self, endpoint: Endpoint, connections: int, arrays: Arrays) -> None:
        self._paths = _Paths(endpoint, arrays)
        self._far = AsyncSocketTransport(endpoint, connections)
        self._near = _AsyncLocalTransport(endpoint, connections, self._paths)

    async def send(self, call: Call, deadline: float) -> Reply:
        """See AsyncTransport."""
        near = self._paths.ask(call)
        if near is None:
            self._paths.told(await self._far.send(_LIMITS, deadline))
            near = self._paths.ask(call)
        if near:
            try:
                return await self._near.send(call, deadline)
            except ConnectionFailed as error:
                if isinstance(error, TimedOut):
                    raise
                if not isinstance(error, CannotLend):
                    await self._near.close()
                    self._paths.lost()
                if error.sent:
                    raise
        return await self._far.send(call, deadline)

    async def close(self) -> None:
        """See AsyncTransport."""
        await self._near.close()
        await self._far.close()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _loop_time(deadline: float) -> float:
    """A deadline of time.monotonic on the loop's own clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
