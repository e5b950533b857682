"""The Unix socket for clients on this machine: receives connections, hands on sessions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from pathlib import Path

from service import logs
from service.local.messages import NAME, address
from service.local.session import Session
from service.services import Services

#: Sessions at once; one more is closed unread.
MOST_SESSIONS = 256
#: Seconds until the next look where the system had no descriptor for a connection.
ACCEPT_AGAIN_SECONDS = 0.2
_BACKLOG = 128

_log = logs.Log("local")


class LocalServer:
    """Listens in the data folder, whose lock makes this front the only one there."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._listener: socket.socket | None = None
        self._sessions: set[Session] = set()
        self.instance = secrets.token_hex(16)
        #: Where it listens; None where it doesn't.
        self.path: Path | None = None

    def start(self) -> None:
        """Listen. A folder that takes no sockets costs this way in, not the service."""
        path = self._services.settings.data / NAME
        try:
            self._listener = _listen(path)
        except OSError as error:
            _log.warning("no socket for clients on this machine", why=error.strerror, path=str(path))
            return
        self.path = path
        self._accept_on()

    def close(self) -> None:
        """End all sessions."""
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for session in list(self._sessions):
            session.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            self.path = None

    def _accept_on(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            end, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: look again soon, not all the time
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(ACCEPT_AGAIN_SECONDS, self._accept_on)
            return
        if len(self._sessions) >= MOST_SESSIONS:
            end.close()
            return
        end.setblocking(False)
        self._sessions.add(Session(self._services, end, self.instance, self._sessions.discard))


def _listen(path: Path) -> socket.socket:
    """A listening socket of mode 0600 from its first moment; what an earlier front left is taken away."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(os.fspath(path)) as name:
            mask = os.umask(0o177)
            try:
                listener.bind(name)
            finally:
                os.umask(mask)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
