"""The link between front and worker: receives messages, hands on frames over a socketpair, and back.

A frame is a 4-byte little-endian length and a msgpack message of service.messages. Tensors never cross it.
Descriptors of clients' memory cross on a socketpair of their own, in the order of the Map messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from service.messages import ToFront, ToWorker

_LENGTH = struct.Struct("<I")
#: No honest message is larger; a longer frame means that the two sides lost each other.
MAX_FRAME = 64 << 20

Out = TypeVar("Out")


class _Frames(Generic[Out]):
    """Cuts a byte stream into messages."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Out] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Out]:
        buffer = self._buffer
        buffer += data
        messages: list[Out] = []
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes on the link, the limit is {MAX_FRAME}")
            if len(buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            messages.append(self._decoder.decode(memoryview(buffer)[at : at + length]))
            at += length
        if at:
            del buffer[:at]
        return messages


def descriptor_pair() -> tuple[socket.socket, socket.socket]:
    """The front's end, which never blocks, and the worker's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def send_descriptor(end: socket.socket, descriptor: int) -> None:
    """Raises OSError where the socket is full or gone."""
    socket.send_fds(end, [b"d"], [descriptor])


def receive_descriptor(end: socket.socket) -> int:
    """The next descriptor. Raises OSError where the other side is gone."""
    _, descriptors, _, _ = socket.recv_fds(end, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise ConnectionResetError("no descriptor came")
    return descriptors[0]


class _Encoder:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: Any) -> bytes:
        body = self._encoder.encode(message)
        return _LENGTH.pack(len(body)) + body


class FrontLink(asyncio.Protocol):
    """The front's end, on the event loop. `received` gets each message, `lost` is called once at the end."""

    def __init__(self, received: Callable[[ToFront], None], lost: Callable[[], None]) -> None:
        self._received = received
        self._lost = lost
        self._frames: _Frames[ToFront] = _Frames(ToFront)
        self._encoder = _Encoder()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        """Attach to the front's end of the socketpair."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports don't derive from asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def send(self, *messages: ToWorker) -> None:
        """Send, in one call; dropped where the link is gone (the supervisor hears of that through `lost`)."""
        if self._transport is not None:
            self._transport.write(b"".join(map(self._encoder.frame, messages)))

    def close(self) -> None:
        """Close the front's end."""
        if self._transport is not None:
            self._transport.abort()


class WorkerLink:
    """The worker's end: one thread reads at a time, any number send."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._frames: _Frames[ToWorker] = _Frames(ToWorker)
        self._encoder = _Encoder()
        self._sending = threading.Lock()

    def receive(self) -> list[ToWorker] | None:
        """Block for at least one message; None when the front is gone."""
        while True:
            messages = self._receive(0)
            if messages != []:
                return messages

    def poll(self, seconds: float = 0.0) -> list[ToWorker] | None:
        """The messages that are here, or come within `seconds`; None when the front is gone."""
        if seconds:
            select.select([self._end], [], [], seconds)
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []

    def receive_unless(self, bell: int) -> list[ToWorker] | None:
        """As `receive`, but [] where the eventfd `bell` is rung and nothing else is here."""
        ends: list[socket.socket | int] = [self._end, bell]
        if self._end in select.select(ends, [], [])[0]:
            return self._receive(0)
        os.eventfd_read(bell)
        return []

    def _receive(self, flags: int) -> list[ToWorker] | None:
        try:
            data = self._end.recv(1 << 18, flags)
        except BlockingIOError:
            raise
        except OSError:
            return None
        return self._frames.feed(data) if data else None

    def send(self, message: ToFront) -> None:
        """Send whole; silent where the front is gone (the reading thread ends the process then)."""
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._end.sendall(self._encoder.frame(message))

    def close(self) -> None:
        """Close the worker's end."""
        self._end.close()
