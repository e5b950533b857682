"""One product over the nodes of a Ray cluster: receives matrices, hands on D; the ranks are Ray's actors.

Ray places the ranks (a placement group, spread over the nodes), starts them and notices their end; the product is
that of kernels.sharded, whose blocks of B go from rank to rank by NCCL between GPUs, by gloo between CPUs. Needs the
extra `ray`, and a cluster that `ray.init` has joined.

    with Ranks(4, gpus=1) as ranks:
        d = ranks.gemm(a, b, activation="relu")
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kernels.sharded import RankLost, gemm_sharded, split


class Ranks:
    """`count` ranks, each with `gpus` GPUs (0: it computes on CPUs) and `cpus` CPUs, until closed.

    `seconds` bounds how long Ray may take to place them and a product may take. When a rank ends, the group is of
    no more use: RankLost is raised, and every later call raises it at once.
    """

    def __init__(self, count: int, *, gpus: float = 1.0, cpus: float = 1.0, seconds: float = 300.0) -> None:
        """Raises TimeoutError where the cluster has no room for the ranks."""
        self._seconds = seconds
        self._lost = ""
        self._group: Any = placement_group(
            [{"GPU": gpus, "CPU": cpus} if gpus else {"CPU": cpus}] * count, "SPREAD"
        )
        self._actors: list[Any] = []
        try:
            if not self._group.wait(seconds):
                raise TimeoutError(f"the cluster has no room for {count} ranks within {seconds:g} s")
            place = [PlacementGroupSchedulingStrategy(self._group, bundle) for bundle in range(count)]
            rank = ray.remote(_Rank)
            self._actors = [
                rank.options(
                    scheduling_strategy=place[n], num_gpus=gpus, num_cpus=cpus, max_restarts=0
                ).remote(n, count)
                for n in range(count)
            ]
            address = self._get([self._actors[0].address.remote()])[0]
            self._get([actor.join.remote(address, gpus > 0, seconds) for actor in self._actors])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def nodes(self) -> list[str]:
        """Ids of the nodes that the ranks are on."""
        return [str(node) for node in self._get([actor.node.remote() for actor in self._actors])]

    def gemm(self, a: Any, b: Any, *, c: Any = None, bias: Any = None, **options: Any) -> Any:
        """D = act(alpha · A·B + beta · C + bias) of CPU tensors, with the options of kernels.gemm.

        a [M, K], b [K, N], c [M, N]. Each rank is sent its rows of A and C and its columns of B, through Ray's object
        store, and sends its rows of D back. Raises ValueError where a rank would have none, RankLost, and what a
        product raises.
        """
        count = len(self._actors)
        if self._lost:
            raise RankLost(self._lost)
        if min(a.shape[0], b.shape[1]) < count:
            raise ValueError(f"{count} ranks need as many rows of A and columns of B")
        rows, columns = _spans(a.shape[0], count), _spans(b.shape[1], count)
        along_m = options.get("bias_dim", "n") == "m"
        parts = [
            actor.gemm.remote(
                a[mine].contiguous(),
                b[:, columns[n]].contiguous(),
                None if c is None else c[mine].contiguous(),
                bias[mine] if bias is not None and along_m else bias,
                options,
            )
            for n, (actor, mine) in enumerate(zip(self._actors, rows, strict=True))
        ]
        return torch.cat(self._get(parts))

    def close(self) -> None:
        """End the ranks and give their places back."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _get(self, answers: Sequence[Any]) -> list[Any]:
        """All answers; the first failure ends the wait, though the others still wait for their neighbour."""
        left = list(answers)
        try:
            while left:
                done, left = ray.wait(left, timeout=self._seconds)
                if not done:
                    raise RankLost(f"no rank answered within {self._seconds:g} s")
                ray.get(done)
            return list(ray.get(list(answers)))
        except ray.exceptions.RayTaskError as error:
            raise self._told(error.cause) from error
        except (ray.exceptions.RayActorError, RankLost) as error:
            raise self._told(RankLost(f"a rank is gone: {error}")) from error

    def _told(self, error: BaseException) -> BaseException:
        if isinstance(error, RankLost):
            self._lost = str(error)
        return error


def _spans(extent: int, count: int) -> list[slice]:
    parts = split(extent, count, 128 if extent >= 128 * count else 1)
    starts = [sum(parts[:n]) for n in range(count)]
    return [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]


class _Rank:
    """An actor: one rank of the process group."""

    def __init__(self, number: int, count: int) -> None:
        self._number, self._count = number, count
        self._device = torch.device("cpu")

    def address(self) -> str:
        """Where the others find the first rank: its node's address, and a port that is free there."""
        tools: Any = ray.util  # it carries no types
        host = tools.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def node(self) -> str:
        """The node's id."""
        return str(ray.get_runtime_context().get_node_id())

    def join(self, address: str, on_gpu: bool, seconds: float) -> None:
        """Find the other ranks."""
        if on_gpu:
            self._device = torch.device("cuda", 0)  # Ray shows an actor its own GPUs alone
            torch.cuda.set_device(self._device)
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            address,
            timeout=timedelta(seconds=seconds),
            world_size=self._count,
            rank=self._number,
        )

    def gemm(self, a: Any, b: Any, c: Any, bias: Any, options: dict[str, Any]) -> Any:
        """This rank's rows of D, on the CPU."""
        here = [None if x is None else x.to(self._device) for x in (a, b, c, bias)]
        return gemm_sharded(here[0], here[1], c=here[2], bias=here[3], **options).cpu()
