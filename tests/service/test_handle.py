"""What the front tells workers, without any: when a device may drop tensors, and how two share the work."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from service.admit import Bounds
from service.arena import Arena
from service.batch import Limits, Work
from service.handle import FORGET_SECONDS, Flight, Handle, State, Times
from service.messages import Batch, BatchDone, Forget, ItemDone, Operand, Ready
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


async def test_what_a_device_may_drop_goes_along_with_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.handle.FORGET_SECONDS", 0.2)
    supervisor, (link,) = opened(1)
    (first,) = await submitted(supervisor, product("o/d@1"))
    end(supervisor.handles[0])
    await first
    supervisor.forget("o/d@1")
    assert len(link.calls) == 1
    (second,) = await submitted(supervisor, product("o/d@2"))
    assert [type(message) for message in link.calls[1]] == [Forget, Batch]
    assert link.calls[1][0] == Forget(("o/d@1",))
    end(supervisor.handles[0])
    await second
    await asyncio.sleep(0.3)
    assert len(link.calls) == 2


async def test_what_a_device_may_drop_is_told_soon_and_only_where_it_may_be() -> None:
    supervisor, links = opened(2)
    tasks = await submitted(supervisor, product("o/d@1"))
    home = next(n for n, link in enumerate(links) if link.calls)
    end(supervisor.handles[home])
    await asyncio.gather(*tasks)
    supervisor.forget("o/d@1", "o/unknown@1")
    supervisor.forget("o/b@1")
    await asyncio.sleep(5 * FORGET_SECONDS)
    assert links[home].calls[1:] == [(Forget(("o/d@1", "o/b@1")),)]
    assert not links[1 - home].calls


async def test_a_result_that_came_to_the_arena_is_not_dropped_from_a_device() -> None:
    supervisor, (link,) = opened(1)
    tasks = await submitted(supervisor, product("o/d@1"))
    end(supervisor.handles[0], kept=False)
    await asyncio.gather(*tasks)
    supervisor.forget("o/d@1")
    await asyncio.sleep(2 * FORGET_SECONDS)
    assert len(link.calls) == 1


async def test_a_worker_that_ended_has_nothing_to_drop() -> None:
    supervisor, _ = opened(1)
    handle = supervisor.handles[0]
    tasks = await submitted(supervisor, product("o/d@1"))
    end(handle)
    await asyncio.gather(*tasks)
    supervisor.forget("o/d@1")
    handle._end(0)
    handle._link = again = Link()  # type: ignore[assignment]
    handle._received(Ready(1, GPU, {}, True))
    await asyncio.sleep(2 * FORGET_SECONDS)
    assert not again.calls


async def test_two_gpus_share_a_closed_loop_of_long_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 clients ask again when they are answered; each GPU ends its oldest batch in its own time."""
    monkeypatch.setattr("service.handle.FORGET_SECONDS", 60.0)  # whatever else this computer does
    supervisor, links = opened(2)
    asked = deque(product(f"o/d@{n}") for n in range(600))
    for _ in range(12):
        await submitted(supervisor, asked.popleft())
    clock = [0.0, 0.0]
    while asked:
        assert all(len(handle.flights) >= 2 for handle in supervisor.handles)  # one computes, one waits
        turn = clock.index(min(clock))
        done = end(supervisor.handles[turn])
        clock[turn] += SECONDS * len(done)
        for one in done:
            supervisor.forget(one.out.tensor)
        await submitted(supervisor, *(asked.popleft() for _ in done if asked))
    counts = [sum(len(call[-1].items) for call in batches(link)) for link in links]
    assert counts[0] == pytest.approx(counts[1], rel=0.05)
    # A message for each batch, and none for what may be dropped.
    assert [len(link.calls) for link in links] == [len(batches(link)) for link in links]


async def test_a_gpu_takes_a_third_batch_of_long_products_but_leaves_what_may_stack_in_the_queue() -> None:
    supervisor, _ = opened(1)
    (handle,) = supervisor.handles
    for n in range(6):
        await submitted(supervisor, product(f"o/d@{n}"))
    assert (len(handle.flights), supervisor.queue.depth) == (3, 3)
    supervisor, _ = opened(1)
    (handle,) = supervisor.handles
    for _ in range(6):
        await submitted(supervisor, work(m=64, b="o/b@1", seconds=SECONDS))
    assert (len(handle.flights), supervisor.queue.depth) == (2, 4)
    await submitted(supervisor, product("o/d@6"))  # waits behind what may stack
    assert (len(handle.flights), supervisor.queue.depth) == (2, 5)
    end(handle, kept=False)
    assert [len(flight.works) for flight in handle.flights.values()] == [1, 4]


async def test_no_more_long_products_are_sent_than_compute_in_two_groups_time() -> None:
    supervisor, _ = opened(1)
    (handle,) = supervisor.handles
    for n in range(4):
        one = product(f"o/d@{n}")
        one.seconds = 0.004
        await submitted(supervisor, one)
    assert (len(handle.flights), supervisor.queue.depth) == (2, 2)
