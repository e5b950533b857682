"""Products by way of shared memory: receives calls, hands on replies whose bytes crossed no socket.

Operands that lie in arrays of `Client.empty` are multiplied where they are; others are copied once into memory that
the connection lends. The connection speaks service.local.messages and has the form of wire.Connection, so that
the same transports drive it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np

from service.awake import Awake, cores, seconds_for
from service.client.device import Bytes, OnDevice, nbytes_of, on_host, settle
from service.client.errors import ConnectionFailed, GemmError, refusal
from service.client.shared import ALIGN, Arrays, Shared
from service.client.wire import Call, Head, Need, Reply, Waiting
from service.local.messages import (
    MAX_PACKET,
    Borrow,
    Done,
    Garbled,
    Hello,
    Loan,
    Multiply,
    Piece,
    Product,
    Refused,
    Share,
    ToClient,
    ToService,
    Unshare,
    Welcome,
    address,
    decode_answer,
    encode,
)

#: Calls with fewer bytes of operands don't make a client look for this path: over HTTP they are as fast.
WORTH = 1 << 18
#: Room for a D whose size only the service can tell.
_GUESS = 1 << 20
#: What a connection lends is kept for the next call up to this many bytes.
_KEEP = 1 << 28
_ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_ROOM = "x-gemm-room"
_NO_ROOM = 507
#: Allocations of device memory that a session lends at once; well below what the service takes.
_MOST_HANDLES = 16
_RAW = ("content-type", "application/octet-stream")
#: An operand of no bytes.
_EMPTY = Piece(0, 0, 0)


class CannotLend(ConnectionFailed):
    """The service takes no more memory from this client now; a socket serves it."""


class Place(NamedTuple):
    """Where a service serves clients on this machine, and which service it is."""

    socket: str
    instance: str

    @classmethod
    def of(cls, limits: bytes) -> Place | None:
        """From the document of GET /limits, where it tells one whose socket is on this machine."""
        try:
            told = json.loads(limits)["local"]
            place = cls(str(told["socket"]), str(told["instance"]))
        except (ValueError, KeyError, TypeError):
            return None
        return place if os.path.exists(place.socket) else None


def product(call: Call) -> bool:
    """Whether a call is a product whose operands come as raw bytes."""
    return call.method == "POST" and call.target.startswith("/gemm?") and _RAW in call.headers


def result_of(query: Mapping[str, str]) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of D by a request's query, as far as it tells: a C that the service keeps may add a batch."""
    try:
        a, b = (tuple(map(int, query[name].split("x"))) for name in ("a_shape", "b_shape"))
        m = a[-1] if query.get("trans_a") == "true" else a[-2]
        n = b[-2] if query.get("trans_b") == "true" else b[-1]
        dtype = query.get("out_dtype") or query["dtype"]
    except (KeyError, ValueError, IndexError):
        return None
    c = tuple(query.get("c_shape", "").split("x"))
    batches = [int(shape[0]) for shape in (a, b, c) if len(shape) == 3]
    batch = next((one for one in batches if one != 1), 1)
    return dtype, (batch, m, n) if batches else (m, n)


@lru_cache(256)  # the same products are asked for again and again
def room(target: str) -> int | None:
    """Bytes of D, as far as the query tells."""
    query = dict(parse_qsl(urlsplit(target).query))
    if query.get("out", "inline") != "inline":
        return 0
    told = result_of(query)
    if told is None or told[0] not in _ITEMSIZE:
        return None
    return math.prod(told[1]) * _ITEMSIZE[told[0]]


@dataclass(slots=True)
class LocalConnection:
    """One session; `used` counts its exchanges. See wire.Connection."""

    sock: socket.socket
    arrays: Arrays
    used: int = 0
    answered: bool = False
    _shared: set[int] = field(default_factory=set)
    _staging: Shared | None = None
    _number: int = 0
    _in_place: bool = False
    #: GPUs of the service's workers.
    _gpus: frozenset[str] = frozenset()
    #: `arrays.lost` when what is gone was taken back last.
    _lost: int = 0
    #: How long an answer is waited for without falling asleep, where a GPU is to give it.
    _awake: Awake = field(default_factory=lambda: Awake(0.0))
    #: Numbers of device memory that is lent, by handle, longest unused first.
    _handles: dict[bytes, int] = field(default_factory=dict)

    def close(self) -> None:
        """End the session; the service lets go of what was lent."""
        self.sock.close()
        self._drop_staging()

    def stale(self) -> bool:
        """Whether the service has ended the session: not asked, as the next packet finds out and products are pure."""
        return False

    def exchange(self, call: Call, authority: str, headers: tuple[tuple[str, str], ...]) -> Waiting:
        """Send the product, receive what became of it. Returns a Reply."""
        self.used += 1
        if self._lost != self.arrays.lost:
            yield from self._tidy()
        self.answered = False
        wanted = room(call.target)
        if wanted is None:
            wanted = _GUESS if call.into is None else nbytes_of(call.into)
        elif call.into is not None and nbytes_of(call.into) != wanted:
            call = msgspec.structs.replace(call, into=None)  # it doesn't fit, as the sink will say
        answer = yield from self._multiply(call, wanted)
        if isinstance(answer, Refused) and int(answer.headers.get(_ROOM, "0")) > wanted:
            wanted = int(answer.headers[_ROOM])
            call = msgspec.structs.replace(call, into=None)
            answer = yield from self._multiply(call, wanted)
        if isinstance(answer, Refused) and answer.status == _NO_ROOM and self._handles:
            # A worker that can't open device memory refuses it only when a product names it.
            for handle in list(self._handles):
                yield from self._unshare(self._handles.pop(handle))
            self._gpus = frozenset()
            answer = yield from self._multiply(call, wanted)
        if isinstance(answer, Refused):
            return Reply(Head(answer.status, answer.headers), answer.problem)
        assert isinstance(answer, Product)
        head = Head(200, answer.headers)
        taken = call.sink(head) if call.sink is not None and not self._in_place else None
        if taken is not None and taken.nbytes:
            assert self._staging is not None
            np.frombuffer(taken, np.uint8)[:] = self._staging.bytes()[: taken.nbytes]
        if self._staging is not None and self._staging.nbytes > _KEEP:
            yield from self._unshare(self._staging.number)
            self._drop_staging()
        return Reply(head, answer.body, in_place=self._in_place)

    def greet(self, key: str, instance: str) -> Generator[Need, None, None]:
        """The first packets; ConnectionFailed where another service answers."""
        yield from self._send(Hello(key=key))
        answer = yield from self._receive()
        if isinstance(answer, Refused):
            raise ConnectionFailed(f"the local socket refuses: {answer.problem.decode()}", sent=False)
        if not isinstance(answer, Welcome) or answer.instance != instance:
            raise ConnectionFailed("another service is behind the local socket", sent=False)
        self._gpus = frozenset(answer.devices)

    def borrow(self, name: str) -> Generator[Need, None, Loan]:
        """A copy of a stored tensor in the GPU's memory, until the session ends. Refused where there is none."""
        self._number += 1
        yield from self._send(Borrow(self._number, name))
        answer = yield from self._answer()
        if isinstance(answer, Refused):
            raise refusal(answer.status, answer.headers, answer.problem)
        assert isinstance(answer, Loan)
        return answer

    # -- a product --------------------------------------------------------------------------------------------

    def _multiply(self, call: Call, wanted: int) -> Generator[Need, None, ToClient]:
        """Lend what isn't lent yet, copy what doesn't lie in lent memory, and multiply."""
        pieces: list[Piece | None] = []
        for part in call.parts:
            pieces.append((yield from self._lent(part)))
        out = None
        if call.into is not None and nbytes_of(call.into):  # a D without bytes has its place where copies go
            out = yield from self._lent(call.into)
        if out is not None and any(_overlap(out, piece) for piece in pieces if piece is not None):
            out = None  # D would be written while they are read
        self._in_place = out is not None
        if out is None or None in pieces:
            out = yield from self._copy(call.parts, pieces, out, wanted)
        # Else nothing is copied, and no memory is needed for it.
        body = tuple(piece for piece in pieces if piece is not None)
        query = call.target.partition("?")[2]
        self._number += 1
        if self._handles:
            settle(call.parts if call.into is None else (*call.parts, call.into))
            self._awake.began(time.monotonic())
        yield from self._send(Multiply(self._number, query, body, out, _request_id(call)))
        answer = yield from self._answer()
        self._awake.ended(time.monotonic(), busy=False)
        return answer

    def _copy(
        self, parts: Sequence[Bytes], pieces: list[Piece | None], out: Piece | None, wanted: int
    ) -> Generator[Need, None, Piece]:
        """Copy what has no piece into memory of the connection's own, and find room there for a D without one."""
        copied = [part for part, piece in zip(parts, pieces, strict=True) if piece is None]
        nbytes = sum(-(-nbytes_of(part) // ALIGN) * ALIGN for part in copied)
        staged = yield from self._stage(nbytes + (wanted if out is None else 0))
        at = 0
        if out is None:
            # D comes first, so that it is found there whatever the operands were.
            out = Piece(staged.number, 0, wanted)
            at = -(-wanted // ALIGN) * ALIGN
        whole = staged.bytes()
        for index, piece in enumerate(pieces):
            if piece is None:
                part = on_host(parts[index])
                whole[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
                pieces[index] = Piece(staged.number, at, part.nbytes)
                at += -(-part.nbytes // ALIGN) * ALIGN
        return out

    def _lent(self, data: Bytes) -> Generator[Need, None, Piece | None]:
        """The piece that bytes in a lent array are; None for other memory, and where no more may be lent."""
        nbytes = nbytes_of(data)
        if not nbytes:
            return _EMPTY
        if isinstance(data, OnDevice):
            return (yield from self._lent_device(data, nbytes))
        spot = self.arrays.find(memoryview(data))
        if spot is None:
            return None
        if spot.number not in self._shared:
            answer = yield from self._share(spot.number, spot.descriptor)
            if isinstance(answer, Refused):
                return None
        return Piece(spot.number, spot.offset, nbytes)

    def _lent_device(self, data: OnDevice, nbytes: int) -> Generator[Need, None, Piece | None]:
        """The same of device memory: a service that computes on this very GPU, and no other, takes it."""
        if len(self._gpus) != 1 or data.uuid not in self._gpus:
            return None
        lent = data.lend()
        if lent is None or lent.offset % ALIGN:
            return None
        number = self._handles.pop(lent.handle, 0)
        if not number:
            while len(self._handles) >= _MOST_HANDLES:
                yield from self._unshare(self._handles.pop(next(iter(self._handles))))
            number = next(Shared.numbers)
            self._number += 1
            yield from self._send(Share(self._number, number, lent.nbytes, lent.handle))
            if isinstance((yield from self._answer()), Refused):
                return None
            self._shared.add(number)
        self._handles[lent.handle] = number
        return Piece(number, lent.offset, nbytes)

    def _stage(self, nbytes: int) -> Generator[Need, None, Shared]:
        """Memory of the connection's own, of at least `nbytes`."""
        nbytes += ALIGN  # D's end is rounded up
        if self._staging is not None and self._staging.nbytes < nbytes:
            yield from self._unshare(self._staging.number)
            self._drop_staging()
        if self._staging is None:
            self._staging = Shared(-(-nbytes // _GUESS) * _GUESS)
            answer = yield from self._share(self._staging.number, self._staging.descriptor)
            if isinstance(answer, Refused):
                raise CannotLend(f"no memory can be lent: {answer.problem.decode()}", sent=False)
        return self._staging

    # -- what is lent -----------------------------------------------------------------------------------------

    def _share(self, number: int, descriptor: int) -> Generator[Need, None, ToClient]:
        self._number += 1
        yield from self._send(Share(self._number, number), descriptor)
        answer = yield from self._answer()
        if isinstance(answer, Done):
            self._shared.add(number)
        return answer

    def _unshare(self, number: int) -> Generator[Need, None, None]:
        self._number += 1
        yield from self._send(Unshare(self._number, number))
        yield from self._answer()
        self._shared.discard(number)

    def _tidy(self) -> Generator[Need, None, None]:
        """Take back what is gone here."""
        self._lost = self.arrays.lost
        own = {self._staging.number if self._staging is not None else 0, *self._handles.values()}
        for number in self._shared - own - self.arrays.numbers:
            yield from self._unshare(number)

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    # -- packets ----------------------------------------------------------------------------------------------

    def _send(self, message: ToService, descriptor: int = -1) -> Generator[Need, None, None]:
        packet = encode(message)
        while True:
            try:
                if descriptor >= 0:
                    socket.send_fds(self.sock, [packet], [descriptor])
                else:
                    self.sock.send(packet)
            except BlockingIOError:
                yield Need(self.sock.fileno(), False, True)
            except OSError as error:
                raise ConnectionFailed(f"the service left: {error.strerror}", sent=True) from None
            else:
                return

    def _answer(self) -> Generator[Need, None, ToClient]:
        """The answer to the last packet."""
        answer = yield from self._receive()
        self.answered = True
        if isinstance(answer, Welcome) or answer.id != self._number:
            raise ConnectionFailed("the service answered something else", sent=True)
        return answer

    def _receive(self) -> Generator[Need, None, ToClient]:
        while True:
            try:
                packet = self.sock.recv(MAX_PACKET)
            except BlockingIOError:
                if self._awake.stays(time.monotonic()):
                    os.sched_yield()
                else:
                    yield Need(self.sock.fileno(), True, False)
                continue
            except OSError as error:
                raise ConnectionFailed(f"the service left: {error.strerror}", sent=True) from None
            if not packet:
                raise ConnectionFailed("the service ended the session", sent=True)
            try:
                return decode_answer(packet)
            except Garbled as error:
                raise GemmError(f"what answered doesn't speak this protocol: {error}") from None


def _overlap(one: Piece, other: Piece) -> bool:
    first, last = max(one.offset, other.offset), min(one.offset + one.nbytes, other.offset + other.nbytes)
    return one.region == other.region and first < last


def open_session(place: Place, key: str, arrays: Arrays, *, blocking: bool = False) -> Waiting:
    """A session with the service at `place`. Returns a LocalConnection.

    blocking: whoever waits has nothing else to do, and may wait awake for a GPU (see service.awake).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        _connect(sock, place.socket)
        awake = Awake(seconds_for(1, cores()) if blocking else 0.0)
        connection = LocalConnection(sock, arrays, _awake=awake)
        yield from connection.greet(key, place.instance)
    except BaseException:
        sock.close()
        raise
    return connection


def _connect(sock: socket.socket, path: str) -> None:
    try:
        with address(path) as name:
            sock.connect(name)  # at once, or not at all: EAGAIN is a full backlog
    except OSError as error:
        raise ConnectionFailed(f"can't connect to {path}: {error.strerror}", sent=False) from None


def _request_id(call: Call) -> str:
    for name, value in call.headers:
        if name == "x-request-id":
            return value
    return ""
