"""What the front tells a worker beside its batches, without any: when its device may drop tensors."""

from __future__ import annotations

import asyncio

import pytest

from service.handle import FORGET_SECONDS
from service.messages import Batch, Forget, Ready
from tests.service.linked import GPU, Link, end, opened, product, submitted


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
