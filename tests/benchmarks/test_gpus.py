"""Several GPUs' measurement without any: what a rank has of a product is right, computed apart or together."""

from __future__ import annotations

import pytest

from benchmarks.gpus import Share

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed")


def test_a_ranks_share_is_right_whole_and_in_products() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        own = Share(0, 1, 48, torch.device("cpu"))
        want = own.a.float() @ own.b.float()
        for work in (own.whole, own.products):
            own.out.fill_(float("nan"))
            work()
            torch.testing.assert_close(own.out.float(), want, rtol=1e-2, atol=1e-2)
        own.exchanges()
    finally:
        distributed.destroy_process_group()
