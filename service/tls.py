"""TLS of the listening sockets: receives certificate files, hands on contexts that follow the files as they change.

New handshakes take a new certificate within seconds of its files' replacement, open connections go on; so a
certificate is renewed without a restart. Files that don't fit together leave the last good ones in force. A
client CA that is added counts likewise; one that is taken away does after a restart.
"""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

from service.logs import Log
from service.settings import Settings, SettingsError
from service.stamp import stamp

#: Seconds between looks at the files.
LOOK_SECONDS = 5.0

_log = Log("tls")


class Certificates:
    """The certificate, its key, and the CA that clients' certificates must come from (None: clients need none)."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """SettingsError where a file can't be read or they don't fit together."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self.context = _context(client_ca is not None)
        self._stamps = self._seen()
        try:
            self._load(self.context)
        except OSError as error:  # ssl.SSLError is one
            raise SettingsError(self._complaint(error)) from None

    @classmethod
    def of(cls, settings: Settings) -> Certificates | None:
        """Those of the settings; None where the service speaks plainly."""
        if settings.tls_cert is None or settings.tls_key is None:
            return None
        return cls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> bool:
        """Read the files again where they changed; whether they were."""
        stamps = self._seen()
        if stamps == self._stamps:
            return False
        try:
            self._load(_context(self._client_ca is not None))  # a trial: a half-written pair harms nobody
            self._load(self.context)
        except OSError as error:
            _log.error(
                "certificates unreadable, the last good ones stay in force", why=self._complaint(error)
            )
            return False
        self._stamps = stamps
        _log.info("certificates read again", cert=self._cert)
        return True

    def grpc_credentials(self) -> Any:
        """Credentials of a gRPC server, which asks for the certificate at each handshake."""
        import grpc

        def now() -> Any:
            pair = (self._key.read_bytes(), self._cert.read_bytes())
            ca = None if self._client_ca is None else self._client_ca.read_bytes()
            return grpc.ssl_server_certificate_configuration([pair], ca)

        told = self._seen()

        def fetch() -> Any:
            nonlocal told
            if self._stamps == told:
                return None  # as before
            told = self._stamps
            return now()

        return grpc.dynamic_ssl_server_credentials(now(), fetch, self._client_ca is not None)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._cert, self._key)
        if self._client_ca is not None:
            context.load_verify_locations(self._client_ca)

    def _seen(self) -> list[tuple[int, int, int] | None]:
        return [stamp(path) for path in (self._cert, self._key, self._client_ca) if path is not None]

    def _complaint(self, error: OSError) -> str:
        why = error.strerror or str(error)
        return f"tls_cert, tls_key, tls_client_ca: can't use {self._cert} with {self._key}: {why}"


def _context(mutual: bool) -> ssl.SSLContext:
    """A server's context: TLS 1.2 and later, HTTP/1.1; with `mutual`, who has no certificate gets no handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
