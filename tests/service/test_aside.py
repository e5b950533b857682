"""Accounts that nobody waits for: given in their order, with the next product, a moment later, or when read."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from service import aside
from service.aside import Aside
from service.metrics import Metrics
from tests.service.linked import end, opened, product, submitted


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_moment_later_all_are_given_in_their_order_whatever_becomes_of_one() -> None:
    loop, given, failed = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    accounts = Aside()
    for number in range(3):
        accounts.put(partial(given.append, number))
    accounts.put(lambda: 1 / 0)
    accounts.put(partial(given.append, 3))
    await turns()
    assert given == []
    await asyncio.sleep(10 * aside.SECONDS)
    assert given == [0, 1, 2, 3]
    assert isinstance(failed[0], ZeroDivisionError)
    accounts.put(partial(given.append, 4))
    await asyncio.sleep(10 * aside.SECONDS)
    assert given[4:] == [4]


async def test_who_reads_metrics_finds_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "SECONDS", 60.0)
    metrics = Metrics()
    metrics.aside.put(lambda: metrics.request("local", 200, 0.1))
    assert 'gemm_requests_total{code="200",route="local"} 1.0' in metrics.exposition()[0].decode()
    metrics.aside.put(lambda: metrics.request("local", 200, 0.1))
    metrics.aside.soon()  # the loop comes to it after who reads
    for _ in range(2):
        assert 'gemm_requests_total{code="200",route="local"} 2.0' in metrics.exposition()[0].decode()
        await turns()


async def test_a_batch_is_counted_once_the_worker_has_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "SECONDS", 60.0)
    supervisor, _ = opened(1)
    counted: list[int] = []
    supervisor.watchers.append(lambda works, done: counted.append(works[0].id))
    first = product("o/d@1")
    await submitted(supervisor, first)
    end(supervisor.handles[0])
    await turns()
    assert counted == []
    await submitted(supervisor, product("o/d@2"))
    await turns()
    assert counted == [first.id]
