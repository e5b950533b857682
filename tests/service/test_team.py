"""When a product goes to all devices together, and what its ranks say as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.batch import Work
from service.gpus import Place
from service.messages import BatchDone, ItemDone, Operand, Params
from service.place import Residency
from service.team import Spread, together, too_large, why_not

GIB = 1 << 30


def work(m: int, n: int, k: int) -> Work:
    a, b, out = (Operand(0, 2 * r * c, "fp16", (r, c)) for r, c in ((m, k), (k, n), (m, n)))
    return Work(1, a, b, out, Params("fp16"))


def worker(index: int = 0, memory: int = 0, torch: str = "2", seen: str = "") -> Any:
    ready = SimpleNamespace(device={"memory_bytes": memory}, versions={"torch": torch})
    return SimpleNamespace(
        ready=ready,
        residency=Residency(memory / 2) if memory else None,
        place=Place(index, (("CUDA_VISIBLE_DEVICES", seen),) if seen else ()),
    )


def test_what_no_gpu_has_room_for_is_too_large() -> None:
    gpus = [worker(0, 80 * GIB), worker(1, 40 * GIB)]
    assert not too_large(work(65536, 65536, 65536), gpus)  # 24 GiB
    assert too_large(work(1 << 17, 1 << 16, 1 << 16), gpus)  # 40 GiB
    assert not too_large(work(1 << 17, 1 << 16, 1 << 16), gpus[:1])
    assert too_large(work(65536, 65536, 65536), gpus, kept=13 * GIB)  # its rank's shards take the rest
    assert not too_large(
        work(1 << 20, 1 << 20, 1 << 20), [worker(), worker()]
    )  # a CPU's memory is the arena's


@pytest.mark.parametrize(
    ("workers", "because"),
    [
        ([worker()], "two workers"),
        ([worker(0, GIB), worker(0, GIB)], "a device of its own"),
        ([worker(), worker(torch="")], "needs torch"),
        ([worker(0, GIB, seen="MIG-a"), worker(0, GIB, seen="MIG-b")], "not MIG slices"),
        ([worker()] * 9, "at least 9 rows"),
        ([worker(), worker()], None),
        ([worker(0, GIB), worker(1, GIB)], None),
    ],
)
def test_what_ranks_can_take(workers: list[Any], because: str | None) -> None:
    said = why_not(work(8, 100, 10), workers)
    assert (said is None) if because is None else because in (said or "")


def test_ranks_of_a_cluster_need_no_workers_of_their_kind() -> None:
    assert why_not(work(8, 100, 10), [worker(torch="")], Spread("auto", 8)) is None
    assert "at least 9 rows" in (why_not(work(8, 100, 10), [worker()], Spread("auto", 9)) or "")


def test_the_longest_time_and_the_sum_of_work_count() -> None:
    item = ItemDone(7, variant="sharded", reason="asked")
    each = [
        BatchDone(
            1,
            (item,),
            {"kernel": seconds, "copy_in": 1.0},
            {"sharded": 10.0},
            {"sharded": seconds},
            shards={"kept": 3, "copied": 4},
        )
        for seconds in (2.0, 3.0)
    ]
    one = together(each)
    assert one.seconds == {"copy_in": 1.0, "kernel": 3.0, "copy_out": 0.0}
    assert one.shards == {"kept": 6, "copied": 8}
    assert (one.flops, one.busy, one.items) == ({"sharded": 20.0}, {"sharded": 5.0}, (item,))
