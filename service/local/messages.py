"""The protocol of clients on this machine: packets as both sides have them, msgpack, one struct each.

A session begins with Hello and Welcome. Share lends memory: a sealed memfd, whose descriptor comes with the packet
(SCM_RIGHTS), or device memory by a CUDA IPC handle. Multiply then names pieces of it; its `query` is that of
`POST /gemm`, and `body` are the pieces that would follow one another in its raw body. Every packet but Hello
carries a number of the client's choice that its answer repeats; answers come in any order.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any, cast

import msgspec

VERSION = 1
#: The socket's name in the data folder.
NAME = "local.sock"
#: A longer packet is refused; what is large lies in shared memory.
MAX_PACKET = 1 << 16
#: Pieces begin at multiples of this in their region, as operands do in the arena: results keep their bits.
ALIGN = 256
#: Bytes of a CUDA IPC handle.
HANDLE_BYTES = 64
#: Flags of a packet that didn't fit, or whose descriptors didn't.
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)  # an enumeration's & takes as long as the packet


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [offset, offset + nbytes) of what was shared as `region`."""

    region: int
    offset: int
    nbytes: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First packet. `key` is an API key, "" where the service has none."""

    version: int = VERSION
    key: str = ""


class Share(msgspec.Struct, frozen=True, tag="share"):
    """Lend memory under the client's number `region`. `handle`: device memory of `nbytes`; else a descriptor comes."""

    id: int
    region: int
    nbytes: int = 0
    handle: bytes = b""


class Unshare(msgspec.Struct, frozen=True, tag="unshare"):
    """Take memory back. Work that uses it is finished first; the number may be used again at once."""

    id: int
    region: int


class Multiply(msgspec.Struct, frozen=True, tag="multiply"):
    """One product. D goes to the beginning of `out`, unless the query keeps it under a handle."""

    id: int
    query: str
    body: tuple[Piece, ...] = ()
    out: Piece | None = None
    request_id: str = ""


class Borrow(msgspec.Struct, frozen=True, tag="borrow"):
    """Have a copy of a stored tensor in the GPU's memory, by a CUDA IPC handle. Answered by Loan."""

    id: int
    name: str


class Return(msgspec.Struct, frozen=True, tag="return"):
    """A loan is closed on the client's side, and over."""

    id: int
    loan: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to Hello. `instance` is the one that GET /limits tells. `devices`: UUIDs of GPUs that compute."""

    instance: str
    version: int = VERSION
    devices: tuple[str, ...] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Share, Unshare or Return was done."""

    id: int


class Loan(msgspec.Struct, frozen=True, tag="loan"):
    """A tensor's bytes at the beginning of an allocation of GPU `device` (its UUID), until the loan ends."""

    id: int
    loan: int
    handle: bytes
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    etag: str
    device: str


class Product(msgspec.Struct, frozen=True, tag="product"):
    """A product's reply: headers as over HTTP. `body` is the document of a D that was kept."""

    id: int
    headers: dict[str, str]
    body: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The answer to anything that can't be done: status, headers and problem document as over HTTP."""

    id: int
    status: int
    headers: dict[str, str]
    problem: bytes


ToService = Hello | Share | Unshare | Multiply | Borrow | Return
ToClient = Welcome | Done | Product | Loan | Refused

_encoder = msgspec.msgpack.Encoder()
_to_service: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(cast(Any, ToService))
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(cast(Any, ToClient))


class Garbled(Exception):
    """A packet that can't be read: the two sides don't speak the same protocol."""


def encode(message: ToService | ToClient) -> bytes:
    """A packet. Raises ValueError where it is too long."""
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET:
        raise ValueError(f"a packet of {len(packet)} bytes, the limit is {MAX_PACKET}")
    return packet


def decode_request(packet: bytes) -> ToService:
    """What a client sent."""
    try:
        return _to_service.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(str(error)) from None


def decode_answer(packet: bytes) -> ToClient:
    """What the service sent."""
    try:
        return _to_client.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(str(error)) from None


def receive(end: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """The next packet and its descriptors, which are the caller's to close; b"" at the end.

    Raises Garbled where the packet is too long or brought more than `most` descriptors (they are closed).
    """
    room = socket.CMSG_SPACE(most * array.array("i").itemsize)
    packet, ancillary, flags, _ = end.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    if not ancillary and not flags & _CUT:  # most packets
        return packet, []
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    descriptors = found.tolist()
    if flags & _CUT or len(descriptors) > most:
        close_all(descriptors)
        raise Garbled("a packet is too long or brings too many descriptors")
    return packet, descriptors


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody wants."""
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def address(path: str) -> Iterator[str]:
    """An address of a Unix socket's `path`, however long it is, for the length of a block.

    The kernel takes 107 bytes; a longer path goes by way of its folder's descriptor.
    """
    if len(os.fsencode(path)) < 108:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
