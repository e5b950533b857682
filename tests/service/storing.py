"""What tests of the store and of jobs share: settings, an arena, tensors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from service.arena import Arena, Slots
from service.kept import Kept
from service.store import LocalStore, TensorStore

MIB = 1 << 20


@dataclass
class Clock:
    """A time that a test sets."""

    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Settings:
    """The settings that the store and the jobs read."""

    data: Path
    store_memory_bytes: int = 4 * MIB
    store_disk_bytes: int = 64 * MIB
    max_body_bytes: int = 64 * MIB
    max_output_bytes: int = 64 * MIB
    max_flops: float = 1e12
    max_json_bytes: int = 64 * MIB
    job_steps: int = 16
    job_bytes: int = 16 * MIB
    result_ttl_seconds: float = 3600.0
    arena_bytes: int = 8 * MIB
    key_bytes: int = 8 * MIB


@contextlib.asynccontextmanager
async def open_store(
    settings: Settings,
    *,
    clock: Clock | None = None,
    forgotten: list[str] | None = None,
    kept: Kept | None = None,
) -> AsyncIterator[LocalStore]:
    """A started store over an arena of its own; the arena must be free of requests and replies at the end."""
    arena = Arena.create(settings.arena_bytes)
    slots = Slots(arena)
    told = forgotten if forgotten is not None else []
    store = LocalStore(settings, slots, lambda *tensors: told.extend(tensors), clock=clock or Clock())
    if kept is not None:
        store.contents.attach(kept)
    await store.start()
    try:
        yield store
    finally:
        await store.close()
        assert slots.bytes_by_state["request"] == slots.bytes_by_state["reply"] == 0
        arena.close()


def tensor(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Some float32 matrix."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


async def put(store: TensorStore, owner: str, name: str, array: np.ndarray, **options: object) -> str:
    """Store an array from a slot, as a request does; returns its ETag."""
    slot = store.contents.memory.slots.allocate(array.nbytes, owner=owner)
    try:
        slot.view(array.nbytes)[:] = array.tobytes()
        entry = await store.put(owner, name, slot, array.nbytes, "fp32", array.shape, **options)
    finally:
        slot.release()
    return entry.etag


async def get(store: TensorStore, owner: str, name: str) -> np.ndarray:
    """The tensor through a pin."""
    with await store.pin(owner, name) as pin:
        return np.frombuffer(bytes(pin.view()), np.float32).reshape(pin.operand.shape)
