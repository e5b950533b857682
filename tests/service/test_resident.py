"""The device cache: budgets, and what may never leave by itself."""

from __future__ import annotations

from dataclasses import dataclass

from service.drivers.resident import Cache


@dataclass
class Tensor:
    nbytes: int


def test_the_least_recently_used_leaves_first() -> None:
    cache = Cache(250)
    for name in "ab":
        cache.put(name, Tensor(100))
    cache.get("a")
    cache.put("c", Tensor(100))
    assert ("a" in cache, "b" in cache, "c" in cache, cache.nbytes) == (True, False, True, 200)
    cache.put("large", Tensor(300))
    assert "large" not in cache


def test_what_is_nowhere_else_stays_until_it_is_settled() -> None:
    cache = Cache(400)
    assert cache.takes(200)
    cache.keep("only", Tensor(200))
    assert not cache.takes(1)
    cache.put("other", Tensor(150))
    cache.put("next", Tensor(100))
    assert ("only" in cache, "other" in cache, "next" in cache) == (True, False, True)
    cache.shrink(0)
    assert ("only" in cache, "next" in cache, cache.nbytes, cache.sole_nbytes) == (True, False, 200, 200)
    cache.settled(["only", "unknown"])
    assert (cache.sole_nbytes, cache.takes(200)) == (0, True)
    cache.shrink(0)
    assert (cache.nbytes, "only" in cache) == (0, False)


def test_what_is_forgotten_gives_its_room_back() -> None:
    cache = Cache(400)
    cache.keep("only", Tensor(200))
    cache.put("other", Tensor(100))
    cache.forget(["only", "other", "unknown"])
    assert (cache.nbytes, cache.sole_nbytes) == (0, 0)


def test_a_copy_that_would_push_out_an_only_one_is_not_kept() -> None:
    cache = Cache(400)
    cache.keep("only", Tensor(200))
    cache.put("other", Tensor(300))
    assert ("other" in cache, cache.nbytes) == (False, 200)
