"""Who reads a socket: receives its bytes, hands headers to the parser, leaves large bodies in their memory.

While a Filler is the transport's protocol, the kernel copies straight into the views that were asked for, and
never reads beyond the body's end, so what follows on the connection is still there for the parser.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: Most bytes of one read. One that doesn't fill its buffer ends libuv's turn for this connection, so more than
#: a socket usually holds is both faster and fairer than less, of which it would take 32 in a row.
READ_BYTES = 1 << 22


class Connection(Protocol):
    """What is in charge of the connection that a reader reads."""

    def filled(self) -> None:
        """All views are full; nothing more is read until the next `fill`."""

    def data_received(self, data: memoryview) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class _Reader(asyncio.BufferedProtocol):
    """Hands everything but the bytes to the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class Filler(_Reader):
    """Fills views in order. `received` counts the bytes so far."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.received = 0
        self._views: list[memoryview] = []
        self._at = 0

    def fill(self, views: list[memoryview]) -> None:
        """Take the next bytes into `views`, none of which is empty."""
        self._views = views[::-1]
        self._at = 0

    def forget(self) -> None:
        """Drop the views: their memory is about to be used for something else."""
        self._views = []

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._views[-1][self._at : self._at + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self._at += nbytes
        if self._at == len(self._views[-1]):
            self._views.pop()
            self._at = 0
            if not self._views:
                self._connection.filled()


class Head(_Reader):
    """Reads what the parser reads: short pieces, so that little of a large body takes the way with copies.

    All connections share one buffer: what was read is parsed before anything else runs.
    """

    _scratch = memoryview(bytearray(1 << 14))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(self._scratch[:nbytes])


class Sink(_Reader):
    """Throws away what a client still sends of a refused body; all sinks share one scratch buffer."""

    _scratch = memoryview(bytearray(1 << 16))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        pass
