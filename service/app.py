"""The application: receives settings, hands on a FastAPI app whose lifespan builds the front's parts and ends them.

`service.app:app` reads its settings from the environment when a server first starts it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from service import settings as settings_module
from service.admit import Bounds
from service.arena import Arena, Slots
from service.batch import Limits
from service.gate import Gate
from service.handle import Times
from service.jobs import Jobs
from service.keys import Keys
from service.local.server import LocalServer
from service.metrics import Metrics
from service.regions import Regions
from service.routes import gemm, inference, info, jobs, page, schema, tensors
from service.routes.plain import PlainRoute, Shortcut
from service.services import Services
from service.settings import Settings, SettingsError
from service.store import LocalStore, TensorStore
from service.supervisor import Options, Supervisor
from service.team import Spread
from service.tls import Certificates
from service.version import version

_ROUTERS = (gemm.router, tensors.router, jobs.router, inference.router, info.router, page.router)
_DOCS = Path(fastapi_offline.__file__).parent / "static"


class App(FastAPI):
    """A FastAPI app inside the gate: who may, request ids, the log and error documents are outermost."""

    def build_middleware_stack(self) -> ASGIApp:
        # No layer of the framework answers errors: every exception reaches the gate, which words them all.
        return Gate(Shortcut(AsyncExitStackMiddleware(self.router), self, _ROUTERS), self)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if not self.openapi_schema:
            self.openapi_schema = schema.finish(super().openapi())
        return self.openapi_schema


def create_app(settings: Settings | None = None, certificates: Certificates | None = None) -> FastAPI:
    """The app; `settings` None reads GEMM_* and the TOML file when the server starts it.

    `certificates` are for gRPC, which has a listener of its own.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = build(settings or settings_module.load())
        app.state.services = services
        try:
            await services.store.start()
            services.supervisor.start()
            await services.jobs.start()
            if services.settings.local:
                services.local = LocalServer(services)
                services.local.start()
            async with serving_grpc(services, app.version, certificates):
                yield
        finally:
            await shut(services)

    app = App(
        title="GEMM service",
        version=version(),
        summary="Matrix products on tensor cores: D = act(alpha · op(A) · op(B) + beta · C + bias)",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A redirect would make some clients send a POST again as GET, without its body.
        redirect_slashes=False,
    )
    app.router.route_class = PlainRoute
    for router in _ROUTERS:
        app.include_router(router)
    # Swagger UI from files that a package carries: the page at /docs asks no other host.
    app.mount("/docs/static", StaticFiles(directory=_DOCS), name="docs-static")
    return app


@contextlib.asynccontextmanager
async def serving_grpc(
    services: Services, version: str, certificates: Certificates | None
) -> AsyncIterator[None]:
    """The inference protocol over gRPC, where a port is set, for the length of a block."""
    settings = services.settings
    if settings.grpc_port is None:
        yield
        return
    try:
        from service.inference import rpc
    except ImportError:
        raise SettingsError("grpc_port: needs the extra grpc: pip install 'gemm-service[grpc]'") from None
    # Beside a Unix socket, gRPC is for this machine too.
    host = settings.host if settings.uds is None else "127.0.0.1"
    credentials = None if certificates is None else certificates.grpc_credentials()
    server, services.inference.grpc_port = await rpc.serve(
        services, host, settings.grpc_port, version, credentials
    )
    try:
        yield
    finally:
        await drain(services)
        await server.stop(1.0)


def build(settings: Settings) -> Services:
    """The parts, built and not yet started."""
    metrics = Metrics()
    arena = arena_of(settings)
    slots = Slots(arena, share=settings.key_bytes)
    regions = Regions(most=_most_regions(), share=settings.local_bytes)
    supervisor = Supervisor(arena, metrics, options_of(settings), regions)
    store = store_of(settings, slots, supervisor.forget)
    store.contents.attach(supervisor.kept)
    keys = Keys(settings)
    metrics.live("gemm_arena_bytes", "Bytes of the arena, by state.", lambda: _arena_states(slots), "state")
    metrics.live(
        "gemm_local_bytes", "Bytes of memory that local clients lend.", lambda: float(regions.nbytes)
    )
    metrics.live(
        "gemm_device_only_bytes",
        "Bytes of results that only the device has which computed them.",
        lambda: float(supervisor.kept.nbytes),
    )
    metrics.live("gemm_tensor_store_bytes", "Bytes of stored tensors, by tier.", store.bytes_by_tier, "tier")
    metrics.live(
        "gemm_shared_up", "1 where what fronts share served the last request.", store.parts_up, "part"
    )
    limits = {"memory": float(settings.store_memory_bytes), "disk": float(settings.store_disk_bytes)}
    metrics.live(
        "gemm_tensor_store_limit_bytes",
        "Bytes that stored tensors may take, by tier.",
        lambda: limits,
        "tier",
    )
    services = Services(settings, metrics, keys, arena, slots, supervisor, store, None)  # type: ignore[arg-type]
    supervisor.watchers.append(services.now.saw)
    services.jobs = jobs_of(services)
    return services


def arena_of(settings: Settings) -> Arena:
    """The arena of the size that is set. SettingsError where the system doesn't give so much."""
    try:
        return Arena.create(settings.arena_bytes)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "no memory is so large"
        raise SettingsError(
            f"arena_bytes = {settings.arena_bytes}: the system doesn't give so much shared memory: {why}"
        ) from None


def store_of(settings: Settings, slots: Slots, forget: Callable[..., None]) -> TensorStore:
    """The store that the settings name. SettingsError where what it needs isn't installed."""
    if settings.store is None:
        return LocalStore(settings, slots, forget=forget)
    try:
        from service.store import cluster
    except ImportError:
        raise SettingsError(
            "store, journal: need the extra cluster: pip install 'gemm-service[cluster]'"
        ) from None
    return cluster.open_store(settings, slots, forget)


def jobs_of(services: Services) -> Jobs:
    """The jobs of this front, or of all that share the store."""
    if services.settings.store is None:
        return Jobs(services)
    from service.jobs.shared import SharedJobs
    from service.store.shared import SharedStore

    assert isinstance(services.store, SharedStore)
    return SharedJobs(services, services.store)


def options_of(settings: Settings) -> Options:
    """The supervisor's options."""
    return Options(
        limits=Limits(requests=settings.batch_requests, delay=settings.batch_delay_ms / 1e3),
        bounds=Bounds(settings.queue_requests, settings.queue_bytes),
        times=Times(start=settings.start_seconds, ping=settings.ping_seconds, hang=settings.hang_seconds),
        arguments=(
            *("--device", settings.device, "--backend", settings.backend),
            *("--log-format", settings.log_format, "--log-level", settings.log_level),
        ),
        workers=settings.workers,
        awake=None if settings.awake_ms is None else settings.awake_ms / 1e3,
        shard_bytes=settings.shard_bytes,
        spread=spread_of(settings),
    )


def spread_of(settings: Settings) -> Spread | None:
    """Where ranks are if not beside the workers. SettingsError where what that needs isn't installed."""
    if settings.ray_address is None:
        return None
    if importlib.util.find_spec("ray") is None:
        raise SettingsError("ray_address: needs the extra ray: pip install 'gemm-service[ray]'")
    return Spread(settings.ray_address, settings.ray_ranks)


async def drain(services: Services) -> None:
    """Refuse new work and finish what was accepted, within the grace period."""
    services.supervisor.draining = True
    await services.jobs.pause()
    await services.supervisor.drain(services.settings.grace_seconds)


async def shut(services: Services) -> None:
    """End every part; what is durable stays."""
    await drain(services)
    if services.local is not None:
        services.local.close()
    await services.jobs.close()
    await services.inference.regions.close()
    await services.store.close()
    services.arena.close()
    services.metrics.aside.give()


def _arena_states(slots: Slots) -> dict[str, float]:
    return {**{state: float(n) for state, n in slots.bytes_by_state.items()}, "free": float(slots.free)}


def _most_regions() -> int:
    """Each region is a descriptor, here and in each worker; connections need the rest."""
    return min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


def __getattr__(name: str) -> Any:
    # Built on first use, so that importing this module costs no app.
    if name == "app":
        globals()["app"] = create_app()
        return globals()["app"]
    raise AttributeError(name)
