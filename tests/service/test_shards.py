"""What a rank keeps of stored tensors: found again, dropped when forgotten or when the budget is short."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from service.drivers.shards import Shards, cut, named, spans
from service.messages import Item, Operand, Params

X = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(20.0).reshape(4, 5) - 7, "c": torch.ones(6, 5)}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def item(**tensors: str) -> Item:
    """X's product, its operands (and d) stored under names."""

    def whole(name: str) -> Operand:
        shape = (6, 5) if name == "d" else tuple(X[name].shape)
        return Operand(
            0, X["c"].nbytes if name == "d" else X[name].nbytes, "fp32", shape, tensors.get(name, "")
        )

    return Item(1, whole("a"), whole("b"), whole("d"), Params("fp32", beta=1.0), whole("c"))


class Rank:
    """The one rank, and which operands it had to fetch."""

    def __init__(self, budget: int) -> None:
        self.shards = Shards(0, 1, torch.device("cpu"), budget, "auto")

    def compute(self, asked: Item, x: dict[str, Any] = X) -> list[str]:
        fetched: list[str] = []

        def fetch(name: str) -> Any:
            fetched.append(name)
            return x[name].clone()

        lacked = self.shards.lacks(asked)
        parts = self.shards.bring(asked, fetch)
        d = torch.empty(6, 5)
        self.shards.multiply(asked, parts, d)
        assert torch.equal(d, x["a"] @ x["b"] + x["c"])
        assert lacked == fetched
        copied = sum(x[name].nbytes for name in fetched)
        assert parts.shards == {
            "copied": copied,
            "exchanged": 0,
            "kept": sum(operand.nbytes for operand in named(asked).values()) - copied,
        }
        self.shards.keep_result(asked, d)
        return fetched


def test_what_is_stored_is_brought_once_and_what_passes_each_time() -> None:
    rank, asked = Rank(1 << 20), item(a="t/a@1", b="t/b@1")
    assert rank.compute(asked) == ["a", "b", "c"]
    assert rank.compute(asked) == ["c"]
    assert rank.shards.nbytes == X["a"].nbytes + X["b"].nbytes
    # In another role it is another shard.
    assert rank.compute(item(b="t/b@1", c="t/c@1")) == ["a", "c"]


def test_what_is_forgotten_or_replaced_is_brought_anew() -> None:
    rank = Rank(1 << 20)
    rank.compute(item(a="t/a@1", b="t/b@1"))
    rank.shards.forget(["t/b@1", "t/never@1"])
    assert rank.shards.nbytes == X["a"].nbytes
    assert rank.compute(item(a="t/a@1", b="t/b@1")) == ["b", "c"]
    assert rank.compute(item(a="t/a@2", b="t/b@1"), {**X, "a": -X["a"]}) == ["a", "c"]


def test_a_result_that_is_stored_is_there_for_the_next_product() -> None:
    rank = Rank(1 << 20)
    rank.compute(item(d="t/d@1"))
    d = X["a"] @ X["b"] + X["c"]
    assert rank.compute(item(c="t/d@1"), {**X, "c": d}) == ["a", "b"]


def test_the_least_recently_used_goes_when_the_budget_is_short() -> None:
    rank = Rank(X["a"].nbytes + X["b"].nbytes + 8)
    rank.compute(item(a="t/a@1", b="t/b@1"))
    rank.compute(item(b="t/b@1"))  # b was used last
    rank.compute(item(a="t/other@1", b="t/b@1"))
    assert rank.compute(item(a="t/a@1", b="t/b@1")) == ["a", "c"]
    assert rank.shards.nbytes <= X["a"].nbytes + X["b"].nbytes + 8
    assert Rank(10).compute(item(a="t/a@1")) == ["a", "b", "c"]


def test_a_cut_is_what_the_ranks_of_a_product_share() -> None:
    turned = Item(1, Operand(0, 96, "fp32", (4, 6)), item().b, item().out, Params("fp32", trans_a=True))
    at = X["a"].t().contiguous()
    parts = [cut(turned, "a", at, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(parts), X["a"])
    columns = [cut(item(), "b", X["b"], rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat(columns, 1), X["b"])
    assert [s.stop - s.start for s in spans(1000, 3)] == [384, 384, 232]
