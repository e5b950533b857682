"""Clients of several fronts: who is asked for a handle, who next, and that few handles move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from service.client import AsyncClient, Busy, Client, ConnectionFailed, Retries
from service.client.errors import TimedOut
from service.client.several import Order, SeveralTransport, ranked
from service.client.wire import Call, Head, Reply, affinity

FRONTS = ("a:8000", "b:8000", "c:8000")
NAMES = [f"weight-{n}" for n in range(3000)]


class Scripted:
    """A front that answers as told and counts what it was asked."""

    def __init__(self) -> None:
        self.answer: int | Exception = 200
        self.asked: list[str] = []

    def send(self, call: Call, deadline: float) -> Reply:
        self.asked.append(call.target)
        if isinstance(self.answer, Exception):
            raise self.answer
        body = b'{"status": 1, "code": "draining", "detail": "d"}'
        return Reply(Head(self.answer, {"content-type": "application/problem+json"}), body)

    def close(self) -> None:
        pass


class ScriptedAsync(Scripted):
    async def send(self, call: Call, deadline: float) -> Reply:  # type: ignore[override]
        return super().send(call, deadline)

    async def close(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/tensors/w", "w"),
        ("/tensors/w.1?shape=2x2", "w.1"),
        ("/gemm?a_shape=2x2&b=handle%3Aw&out=handle%3Ad", "w"),
        ("/gemm?a=handle:x&b_shape=2x2", "x"),
        ("/gemm?a=handle:x&b=handle:w", "w"),
        ("/gemm?a_shape=2x2&out=handle%3Ad", "d"),
        ("/gemm?a_shape=2x2&b_shape=2x2", ""),
        ("/tensors?after=w", ""),
        ("/jobs/handle", ""),
    ],
)
def test_the_handle_of_a_request(target: str, key: str) -> None:
    assert affinity(target) == key


def test_each_front_has_its_share() -> None:
    firsts = Counter(ranked(name, FRONTS)[0] for name in NAMES)
    assert all(800 < firsts[place] < 1200 for place in range(3)), firsts


def test_only_a_leaving_fronts_handles_move() -> None:
    fewer = FRONTS[:2]
    for name in NAMES:
        before = [FRONTS[place] for place in ranked(name, FRONTS)]
        after = [fewer[place] for place in ranked(name, fewer)]
        assert after == [front for front in before if front in fewer]


def test_the_order_of_urls_does_not_matter() -> None:
    turned = FRONTS[::-1]
    assert all(FRONTS[ranked(n, FRONTS)[0]] == turned[ranked(n, turned)[0]] for n in NAMES)


@pytest.fixture
def fronts() -> list[Scripted]:
    return [Scripted() for _ in FRONTS]


@pytest.fixture
def transport(fronts: list[Scripted]) -> SeveralTransport:
    return SeveralTransport(Order(FRONTS), fronts)


def test_a_handle_is_asked_of_one_and_the_rest_in_turn(
    fronts: list[Scripted], transport: SeveralTransport
) -> None:
    for _ in range(6):
        transport.send(Call("GET", "/tensors/w"), 0)
    assert sorted(len(front.asked) for front in fronts) == [0, 0, 6]
    for _ in range(6):
        transport.send(Call("GET", "/limits"), 0)
    assert sorted(len(front.asked) for front in fronts) == [2, 2, 8]


@pytest.mark.parametrize("failure", [503, ConnectionFailed("gone", sent=True)])
def test_the_next_is_asked(
    fronts: list[Scripted], transport: SeveralTransport, failure: int | Exception
) -> None:
    first, second, third = ranked("w", FRONTS)
    fronts[first].answer = failure
    assert transport.send(Call("GET", "/tensors/w"), 0).status == 200
    assert [len(fronts[place].asked) for place in (first, second, third)] == [1, 1, 0]
    # One that couldn't be reached isn't tried again at once; one that refused is.
    transport.send(Call("GET", "/tensors/w"), 0)
    assert len(fronts[first].asked) == (2 if failure == 503 else 1)


def test_when_all_fail_the_last_says_so(fronts: list[Scripted], transport: SeveralTransport) -> None:
    for front in fronts:
        front.answer = 503
    assert transport.send(Call("GET", "/tensors/w"), 0).status == 503
    for front in fronts:
        front.answer = ConnectionFailed("gone", sent=False)
    with pytest.raises(ConnectionFailed):
        transport.send(Call("GET", "/tensors/w"), 0)


def test_what_may_not_be_done_twice_is_not(fronts: list[Scripted], transport: SeveralTransport) -> None:
    for front in fronts:
        front.answer = ConnectionFailed("gone", sent=True)
    with pytest.raises(ConnectionFailed):
        transport.send(Call("POST", "/jobs", idempotent=False), 0)
    assert sum(len(front.asked) for front in fronts) == 1
    for front in fronts:
        front.answer = TimedOut("late", sent=True)
    with pytest.raises(TimedOut):
        transport.send(Call("GET", "/tensors/w"), 0)
    assert sum(len(front.asked) for front in fronts) == 2


def test_other_refusals_are_answers(fronts: list[Scripted], transport: SeveralTransport) -> None:
    for front in fronts:
        front.answer = 429
    assert transport.send(Call("GET", "/tensors/w"), 0).status == 429
    assert sum(len(front.asked) for front in fronts) == 1


async def test_asyncio_does_the_same() -> None:
    fronts = [ScriptedAsync() for _ in FRONTS]
    async with AsyncClient(list(FRONTS_URLS), retries=Retries(1)) as client:
        client._transport._transports = tuple(fronts)  # type: ignore[union-attr, assignment]
        fronts[ranked("w", FRONTS)[0]].answer = ConnectionFailed("gone", sent=False)
        await client.delete("w")
        assert [len(fronts[place].asked) for place in ranked("w", FRONTS)] == [1, 1, 0]
        for front in fronts:
            front.answer = 503
        with pytest.raises(Busy):
            await client.delete("w")
        await asyncio.sleep(0)


FRONTS_URLS = [f"http://{front}" for front in FRONTS]


@pytest.fixture
def live(service: object) -> Iterator[Client]:
    from tests.service.real import Service

    assert isinstance(service, Service)
    with Client([service.url, "http://127.0.0.1:1"]) as client:
        yield client


def test_with_one_front_down_everything_works(live: Client) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for n in range(8):
        live.put(f"several-{n}", x)
        np.testing.assert_array_equal(live.get(f"several-{n}"), x)
        np.testing.assert_array_equal(live.gemm(x.T.copy(), f"several-{n}"), x.T @ x)
        live.delete(f"several-{n}")


def test_urls_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMM_URL", "http://a:8000, http://b:8001")
    with Client() as client:
        assert [endpoint.name for endpoint in client.endpoints] == ["a:8000", "b:8001"]
