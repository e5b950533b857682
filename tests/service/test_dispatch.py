"""When and where batches are sent, without workers: what two GPUs share, what is sent ahead, who must have what."""

from __future__ import annotations

from collections import deque

import pytest

from service.handle import State
from tests.service.linked import SECONDS, batches, end, opened, product, submitted
from tests.service.works import work


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


async def test_what_needs_a_result_that_one_gpu_has_waits_for_that_gpu_and_others_do_not() -> None:
    supervisor, links = opened(2)
    (first,) = await submitted(supervisor, product("o/d@1"))
    home = next(n for n, link in enumerate(links) if link.calls)
    end(supervisor.handles[home])
    await first
    for n in range(3):  # its home has all the batches that it may have
        one = work(m=4096, b="o/b@1", seconds=SECONDS)
        one.out = product(f"o/e@{n}").out
        supervisor.handles[1 - home].state = State.BACKOFF
        await submitted(supervisor, one)
    supervisor.handles[1 - home].state = State.READY
    assert len(supervisor.handles[home].flights) == 3
    bound, free = work(m=4096, b="o/d@1", seconds=SECONDS), work(m=4096, b="o/b@1", seconds=SECONDS)
    await submitted(supervisor, bound, free)
    assert [flight.works for flight in supervisor.handles[1 - home].flights.values()] == [(free,)]
    assert list(supervisor.queue) == [bound]
    end(supervisor.handles[home])
    assert bound in [w for flight in supervisor.handles[home].flights.values() for w in flight.works]
