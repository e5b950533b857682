"""The application over a supervisor that computes in the test: routes, gate, store and jobs are the real ones."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from service import keys
from service.app import create_app
from service.arena import Arena, Slots
from service.jobs import Jobs
from service.keys import Keys, Quota
from service.metrics import Metrics
from service.services import Services
from service.settings import Settings
from service.store import LocalStore
from tests.service.computing import Computer
from tests.service.storing import MIB, Clock

RAW = {"content-type": "application/octet-stream"}


@functools.cache
def _app() -> Any:
    """One for all tests: it holds nothing of theirs but `state.services`."""
    return create_app()


@dataclass
class Site:
    """A served application: clients of two owners, and its parts."""

    ann: httpx.AsyncClient
    bob: httpx.AsyncClient
    services: Services
    computer: Computer
    clock: Clock
    app: Any


def revoke(folder: Path, owner: str) -> None:
    """Take the owner's keys out of force."""
    path = folder / "keys.json"
    for key in keys.read(path):
        if key.owner == owner:
            keys.revoke(path, key.id)


@asynccontextmanager
async def serving(folder: Path, *, clock: Clock | None = None, **options: Any) -> AsyncIterator[Site]:
    """The application for the length of a block. Bob may keep 4096 bytes."""
    clock = clock or Clock()
    path = folder / "keys.json"
    tokens = [keys.add(path, "ann")[1], keys.add(path, "bob", quota=Quota(store_bytes=4096))[1]]
    settings = Settings(
        **{"data": folder / "data", "arena_bytes": 8 * MIB, "store_memory_bytes": 4 * MIB, "keys_file": path}
        | {"key_bytes": 8 * MIB}
        | options
    )
    arena = Arena.create(settings.arena_bytes)
    slots = Slots(arena, share=settings.key_bytes)
    computer = Computer(slots)
    store = LocalStore(settings, slots, lambda *tensors: None, clock=clock)
    services: Any = Services(settings, Metrics(), Keys(settings), arena, slots, computer, store, None)
    services.jobs = Jobs(services, clock=clock)
    app = _app()
    app.state.services = services
    await store.start()
    await services.jobs.start()
    transport = httpx.ASGITransport(app)
    clients = [
        httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers={"authorization": f"Bearer {token}"}
        )
        for token in tokens
    ]
    try:
        yield Site(*clients, services, computer, clock, app)
    finally:
        computer.draining = True
        computer.gate.set()
        for client in clients:
            await client.aclose()
        await services.jobs.close()
        await store.close()
        assert slots.bytes_by_state["request"] == slots.bytes_by_state["reply"] == 0
        arena.close()
