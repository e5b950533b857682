"""`gemm-service serve`: receives settings, hands a bound socket to the HTTP server, prints its address."""

from __future__ import annotations

import argparse
import asyncio
import errno
import math
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from service import audit, cli, logs, scrape
from service.cli.shadow import complaint
from service.settings import Settings, SettingsError, load, memory_limit
from service.tls import Certificates

if TYPE_CHECKING:
    import uvicorn

_BACKLOG = 2048
#: Open files that the front, its worker and a few connections take.
_DESCRIPTORS = 64

_log = logs.Log("serve")

#: Titles of the help, by the setting that each begins with.
_GROUPS = {
    "host": "where it listens",
    "keys_file": "who may",
    "data": "where it computes and keeps",
    "arena_bytes": "memory and bodies",
    "queue_requests": "queue and batches",
    "job_steps": "jobs",
    "header_bytes": "slow and dead clients",
    "start_seconds": "workers' health",
    "log_format": "what it tells",
}

_EXAMPLES = """\
  gemm-service serve                                     on http://127.0.0.1:8000, for this machine only
  gemm-service serve --port 0                            on a free port, which is printed
  gemm-service serve --uds /run/gemm.sock                on a Unix socket that only its owner can open
  gemm-service serve --host 0.0.0.0 --keys-file keys.json --hosts gemm.example
  GEMM_ARENA_BYTES=8GiB gemm-service serve --config gemm.toml

Every setting is a flag, an environment variable (GEMM_PORT for --port) and a name in the TOML file (port);
the first of them that names it wins. SIGTERM finishes accepted work within --grace-seconds; exit status 0.
Of the environment alone: GEMM_KERNELS, the folder of compiled kernels, and GEMM_CACHE, that of self-tests' outcomes
and measured times (~/.cache/gemm-kernels where it is unset).
"""


def arguments() -> argparse.ArgumentParser:
    """One flag for every setting."""
    parser = cli.parser("serve", "Run the service.", _EXAMPLES)
    parser.usage = "%(prog)s [--config FILE] [--SETTING VALUE ...]"
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; or GEMM_CONFIG")
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    for name, field in Settings.model_fields.items():
        if name in _GROUPS:
            group = parser.add_argument_group(_GROUPS[name])
        flag = f"--{name.replace('_', '-')}"
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(
                flag, default=argparse.SUPPRESS, nargs="?", const="true", metavar="BOOL", help=text
            )
            continue
        # Where a default is empty or found at start, the description says what that means.
        known = field.default_factory is None and field.default not in (0, None, ())
        told = f" (default: {_told(name, field.default)})" if known else ""
        group.add_argument(flag, default=argparse.SUPPRESS, metavar="VALUE", help=text + told)
    return parser


def _told(name: str, value: Any) -> str:
    """A default for people."""
    if name.endswith("_bytes") and value % (1 << 20) == 0:
        return f"{value >> 30}GiB" if value % (1 << 30) == 0 else f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str]) -> int:
    """Serve until a signal. Status 2: a setting or the address is wrong; 3: the application can't start."""
    given = vars(arguments().parse_args(argv))
    config = given.pop("config")
    try:
        settings = load(given, config=config)
        if (wrong := complaint()) is not None:
            raise SettingsError(wrong)
        check(settings)
        raise_descriptors()
        certificates = Certificates.of(settings)
        listener, scraped = bind(settings), bind_scrape(settings)
    except SettingsError as error:
        return cli.complain(error)
    logs.setup(settings.log_format, settings.log_level)
    if settings.audit_file is not None:
        try:
            audit.to_file(settings.audit_file)
        except OSError as error:
            return cli.complain(f"audit_file: can't write {settings.audit_file}: {error.strerror}")
    _log.info(
        "starts", data=settings.data, arena_bytes=settings.arena_bytes, keys=settings.keys_file or "none"
    )
    if settings.arena_bytes > memory_limit():
        _log.warning(
            "arena_bytes is above the memory limit", limit=memory_limit(), arena=settings.arena_bytes
        )
    try:
        return run(settings, listener, certificates, scraped)
    finally:
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)


def check(settings: Settings) -> None:
    """SettingsError where these settings would serve whom they shouldn't."""
    from service.gate import check_exposure
    from service.keys import Keys

    check_exposure(settings, Keys(settings))
    if settings.otel_endpoint is not None:
        from service import traces

        traces.check(settings.otel_endpoint)


def raise_descriptors() -> None:
    """As many descriptors as the system allows: each connection is one. SettingsError where they are too few."""
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if few != most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < _DESCRIPTORS:
        raise SettingsError(f"ulimit -n allows {most} open files; the service needs {_DESCRIPTORS} or more")


def bind(settings: Settings) -> socket.socket:
    """The listening socket; SettingsError where the address can't be had."""
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    return _bind(settings, "port", settings.port)


def bind_scrape(settings: Settings) -> socket.socket | None:
    """The socket of /metrics and /health alone, where it has a port of its own."""
    return None if settings.metrics_port is None else _bind(settings, "metrics_port", settings.metrics_port)


def _bind(settings: Settings, name: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        setting = name if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise SettingsError(
            f"{setting} = {getattr(settings, setting)!r}: can't listen on {settings.host} port {port}: "
            f"{error.strerror}"
        ) from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """A Unix socket of mode 0600 from its first moment; a dead server's leftover is taken away."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(os.fspath(path))
        finally:
            os.umask(mask)
    except OSError as error:
        listener.close()
        raise SettingsError(f"uds = {str(path)!r}: can't listen there: {error.strerror}") from None
    listener.listen(_BACKLOG)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
    return True


def url(settings: Settings, listener: socket.socket) -> str:
    """Where clients find the service."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def server_config(settings: Settings, app: Any, certificates: Certificates | None = None) -> uvicorn.Config:
    """uvicorn with uvloop and httptools; the gate logs requests and names no software in headers."""
    import uvicorn

    from service.bounds import Limits
    from service.protocol import GemmProtocol

    def refused(status: int) -> None:
        """Count what the protocol refused before there was a route."""
        services = getattr(app.state, "services", None)
        if services is not None:
            services.metrics.request("unparsed", status, 0.0)

    return uvicorn.Config(
        app,
        loop="uvloop",
        http=GemmProtocol.with_limits(Limits.of(settings), refused),
        ssl_context_factory=None if certificates is None else lambda *_: certificates.context,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(settings.keep_alive_seconds),
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
    )


def run(
    settings: Settings,
    listener: socket.socket,
    certificates: Certificates | None = None,
    scraped: socket.socket | None = None,
) -> int:
    """Serve on `listener` until a signal; /metrics and health on `scraped` too, where it is given."""
    from service.app import create_app, drain
    from service.server import Server

    app = create_app(settings, certificates)

    class Announced(Server):
        """Says where it listens once it does; what is left of the grace period bounds the last replies."""

        _asked: float | None = None
        _scrape: asyncio.Server | None = None
        _watch: asyncio.Task[None] | None = None

        async def _open_scrape(self) -> None:
            if scraped is not None:
                services = app.state.services
                self._scrape = await scrape.serve(
                    scraped, services.metrics.exposition, lambda: services.supervisor.ready
                )
            if certificates is not None:
                self._watch = asyncio.ensure_future(certificates.watch())

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                await self._open_scrape()
                if (port := app.state.services.inference.grpc_port) is not None:
                    print(f"gemm-service speaks gRPC on port {port}", flush=True)
                print(f"gemm-service listens on {url(settings, listener)}", flush=True)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self._asked is None:
                self._asked = time.monotonic()
            super().handle_exit(sig, frame)

        async def shutdown(self, sockets: Any = None) -> None:
            spent = time.monotonic() - (self._asked or time.monotonic())
            self.config.timeout_graceful_shutdown = max(1, math.ceil(settings.grace_seconds - spent))
            await super().shutdown(sockets)
            if self._scrape is not None:
                self._scrape.close()
            if self._watch is not None:
                self._watch.cancel()

    server = Announced(server_config(settings, app, certificates), lambda: drain(app.state.services))
    try:
        server.run(sockets=[listener])
    except SystemExit as ended:  # uvicorn's way of saying that the application didn't start; it has said why
        return int(ended.code or 0)
    except KeyboardInterrupt:
        return 0
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
