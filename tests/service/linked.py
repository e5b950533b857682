"""A supervisor whose workers are GPUs that were never started: what it sends them is kept, what they say is made up."""

from __future__ import annotations

import asyncio
from typing import Any

from service.admit import Bounds
from service.arena import Arena
from service.batch import Limits, Work
from service.handle import Flight, Handle, State, Times
from service.messages import Batch, BatchDone, ItemDone, Operand, Ready
from service.metrics import Metrics
from service.supervisor import Options, Supervisor
from tests.service.works import work

GPU = {"arch": "sm_90a", "virtual": False, "name": "one", "uuid": "GPU-1", "memory_bytes": 1 << 37}
SECONDS = 0.00175


class Link:
    """Keeps what is sent, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def send(self, *messages: Any) -> None:
        self.calls.append(messages)


def opened(workers: int) -> tuple[Supervisor, list[Link]]:
    """A supervisor whose workers are GPUs that were never started."""
    options = Options(Limits(), Bounds(1000, 1 << 40), Times(), workers=workers)
    supervisor = Supervisor(Arena.create(1 << 20), Metrics(), options)
    links = [Link() for _ in range(workers)]
    for handle, link in zip(supervisor.handles, links, strict=True):
        handle._link = link  # type: ignore[assignment]
        handle._received(Ready(1, GPU, {}, True))
        assert handle.state is State.READY
    return supervisor, links


def product(name: str) -> Work:
    """A long product of stored tensors, kept as `name`."""
    one = work(m=4096, b="o/b@1", seconds=SECONDS)
    one.out = Operand(0, one.out.nbytes, "fp32", one.out.shape, name)
    return one


def end(handle: Handle, *, kept: bool = True) -> tuple[Work, ...]:
    """The handle's oldest batch ends."""
    flight: Flight = next(iter(handle.flights.values()))
    items = tuple(ItemDone(each.id, variant="v", kept=kept) for each in flight.works)
    handle._received(BatchDone(flight.batch.id, items, {"kernel": SECONDS * len(items)}, {}, {}))
    return flight.works


def batches(link: Link) -> list[tuple[Any, ...]]:
    return [call for call in link.calls if isinstance(call[-1], Batch)]


async def submitted(supervisor: Supervisor, *works: Work) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.ensure_future(supervisor.submit(each)) for each in works]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks
