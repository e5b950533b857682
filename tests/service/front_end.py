"""The front's end of a link, as tests of the worker hold it: messages out, messages in."""

from __future__ import annotations

import socket
from typing import Any

from service.link import _Encoder, _Frames
from service.messages import ToFront


class FrontEnd:
    """Sends and receives over `end`; `next` waits for so many messages. `theirs` is the worker's end."""

    def __init__(self) -> None:
        self.end, self.theirs = socket.socketpair()
        self.end.settimeout(60)
        self._descriptors = socket.socketpair()
        self._frames: _Frames[ToFront] = _Frames(ToFront)

    def send(self, *messages: Any) -> None:
        self.end.sendall(b"".join(map(_Encoder().frame, messages)))

    def next(self, count: int) -> list[ToFront]:
        found: list[ToFront] = []
        while len(found) < count:
            found += self._frames.feed(self.end.recv(1 << 16))
        return found
