"""A product over ranks that Ray places on three raylets: the bits of one process, and clear when a node dies.

Slow: `make test-ray`. The raylets are real processes of this machine.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels import gemm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, about its use of other packages
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from kernels.sharded_ray import RankLost, Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def operands(kind: torch.dtype) -> dict[str, Any]:
    random = torch.Generator().manual_seed(7)
    shapes = {"a": (301, 150), "b": (150, 203), "c": (301, 203), "bias": (203,)}
    return {name: torch.randn(shape, generator=random).to(kind) for name, shape in shapes.items()}


def test_ranks_on_three_nodes_give_the_bits_of_one_process_and_a_dead_node_is_a_clear_error(
    cluster: Any,
) -> None:
    with Ranks(3, gpus=0, cpus=1, seconds=90) as ranks:
        assert len(set(ranks.nodes())) == 3
        for kind in (torch.float32, torch.float64, torch.bfloat16):
            x = operands(kind)
            tail = {"alpha": 0.5, "beta": 2.0, "activation": "relu"}
            d = ranks.gemm(x["a"], x["b"], c=x["c"], bias=x["bias"], **tail)
            want = gemm(x["a"], x["b"], c=x["c"], bias=x["bias"], **tail)
            assert torch.equal(d, want)
        x = operands(torch.float32)
        along_m = ranks.gemm(x["a"], x["b"], bias=x["a"][:, 0], bias_dim="m")
        assert torch.equal(along_m, gemm(x["a"], x["b"], bias=x["a"][:, 0], bias_dim="m"))
        with pytest.raises(ValueError, match="as many rows"):
            ranks.gemm(x["a"][:2], x["b"])
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        began = time.monotonic()
        with pytest.raises(RankLost):
            ranks.gemm(x["a"], x["b"])
        assert time.monotonic() - began < 90
        with pytest.raises(RankLost):  # at once
            ranks.gemm(x["a"], x["b"])
    # The others' places are free again, for a smaller product's ranks.
    with Ranks(2, gpus=0, cpus=1, seconds=90) as ranks:
        assert torch.equal(ranks.gemm(x["a"], x["b"]), gemm(x["a"], x["b"]))


def test_no_room_is_said_within_the_time(cluster: Any) -> None:
    with pytest.raises(TimeoutError, match="no room for 64 ranks"):
        Ranks(64, gpus=0, cpus=1, seconds=2)
