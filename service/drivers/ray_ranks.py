"""Ranks on the nodes of a Ray cluster: receives a product and its operands, hands on D; the ranks are Ray's actors.

Ray places the ranks (a placement group, spread over the nodes), starts them and notices their end; the product is
that of service.drivers.shards, whose blocks of B go from rank to rank by NCCL between GPUs, by gloo between CPUs.
Operands travel through Ray's object store, and only to ranks that keep no shard of them. Needs the extra `ray` on all
nodes, and a cluster that `ray.init` has joined.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kernels.device import describe_cpu, describe_cuda
from kernels.sharded import RankLost
from service.drivers.base import problem_of
from service.drivers.shards import Shards, cut, dtype_of, named, shard_budget
from service.messages import Item

#: Seconds between looks at whether ranks answer.
LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Told:
    """What a rank says of a product: its rows of D (bytes), seconds by stage word, bytes of shards, what it keeps."""

    rows: Any
    seconds: dict[str, float]
    shards: dict[str, int]
    flops: float
    kept: bool
    nbytes: int


class Ranks:
    """`count` ranks, each with a GPU or, without `gpus`, a CPU, until closed.

    `seconds` bounds how long Ray may take to place them, and they to find each other. When a rank ends, the group is
    of no more use: RankLost.
    """

    def __init__(self, count: int, *, gpus: bool, reference: str, shard_bytes: int, seconds: float) -> None:
        """Raises TimeoutError where the cluster has no room for the ranks, RankLost where one ends meanwhile."""
        self.count = count
        self._seconds = seconds
        end = time.monotonic() + seconds
        needs = {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
        self._group: Any = placement_group([needs] * count, "SPREAD")
        self._actors: list[Any] = []
        try:
            if not self._group.wait(seconds):
                what = "GPUs" if gpus else "CPUs"
                raise TimeoutError(f"the cluster has no room for {count} ranks ({what}) within {seconds:g} s")
            rank = ray.remote(_Rank)
            self._actors = [
                rank.options(
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, n),
                    num_gpus=needs.get("GPU", 0),
                    num_cpus=1,
                    max_restarts=0,
                ).remote(n, count, reference, shard_bytes)
                for n in range(count)
            ]
            (address,) = self.all_of([self._actors[0].address.remote()], end)
            left = max(1.0, end - time.monotonic())
            self.all_of([actor.join.remote(address, gpus, left) for actor in self._actors], end)
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[str]:
        """Ids of the nodes that the ranks are on."""
        answers = self.all_of([actor.node.remote() for actor in self._actors])
        return [str(node) for node in answers]

    def compute(self, item: Item, view: Callable[[str], Any]) -> list[Told]:
        """Each rank's part of the product; `view` gives a whole operand, a CPU tensor.

        Raises Unsupported, MemoryError, RankLost.
        """
        lacking = self.all_of([actor.lacks.remote(item) for actor in self._actors])
        wholes = {name: view(name) for name in named(item) if any(name in names for names in lacking)}
        asked = [
            actor.compute.remote(
                item,
                {name: to_bytes(cut(item, name, wholes[name], n, self.count)) for name in lacking[n]},
            )
            for n, actor in enumerate(self._actors)
        ]
        return list(self.all_of(asked))

    def forget(self, tensors: Sequence[str]) -> None:
        """Ranks drop what they keep of these tensors, before they compute the next product."""
        for actor in self._actors:
            actor.forget.remote(list(tensors))

    def close(self) -> None:
        """End the ranks and give their places back."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def all_of(self, answers: Sequence[Any], end: float = float("inf")) -> list[Any]:
        """All answers, in order. The first failure ends the wait, though the others may still wait for that rank."""
        left = list(answers)
        try:
            while left:
                if time.monotonic() > end:
                    raise RankLost(
                        f"{len(left)} of {self.count} ranks didn't answer within {self._seconds:g} s"
                    )
                done, left = ray.wait(left, timeout=LOOK_SECONDS)
                ray.get(done)
            return list(ray.get(list(answers)))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise RankLost(f"a rank ended: {error}") from error


class _Rank:
    """An actor: one rank of the process group."""

    def __init__(self, number: int, count: int, reference: str, shard_bytes: int) -> None:
        self._number, self._count = number, count
        self._reference, self._budget = reference, shard_bytes
        self._shards: Shards

    def address(self) -> str:
        """Where the others find the first rank: its node's address, and a port that is free there."""
        host = _host()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def node(self) -> str:
        """The node's id."""
        return str(ray.get_runtime_context().get_node_id())

    def join(self, address: str, on_gpu: bool, seconds: float) -> None:
        """Find the other ranks and verify a product with them."""
        name = interface_of(_host())
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)
        place = (
            torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        )  # Ray shows an actor its own GPU alone
        if on_gpu:
            torch.cuda.set_device(place)
        try:
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                address,
                timeout=timedelta(seconds=seconds),
                world_size=self._count,
                rank=self._number,
            )
        except RuntimeError as error:
            raise RankLost(f"the ranks don't find each other: {error}") from None
        device = describe_cuda(0) if on_gpu else describe_cpu()
        variant = "auto" if on_gpu or self._reference == "auto" else f"reference-{self._reference}"
        # Several ranks may be on one node, each with its GPU, or all with its memory.
        budget = self._budget or shard_budget(device, 1 if on_gpu else self._count)
        self._shards = Shards(self._number, self._count, place, budget, variant)
        self._shards.verify()

    def lacks(self, item: Item) -> list[str]:
        """Operands of which this rank has no part."""
        return self._shards.lacks(item)

    def compute(self, item: Item, sent: dict[str, Any]) -> Told:
        """This rank's part of the product; `sent` holds what it lacks, as bytes."""
        problem = problem_of(item)
        began = time.perf_counter()

        def fetch(name: str) -> Any:
            whole = named(item)[name]
            part = of_bytes(sent[name], whole.dtype)
            shape = cut(item, name, torch.empty(whole.shape, device="meta"), self._number, self._count).shape
            return part.reshape(shape).to(self._shards.place)

        try:
            parts = self._shards.bring(item, fetch)
            rows = parts.a.shape[0]
            kind = dtype_of(item.out.dtype)
            d = torch.empty((rows, problem.n), dtype=kind, device=self._shards.place)
            self._wait()
            brought = time.perf_counter()
            self._shards.multiply(item, parts, d)
            self._wait()
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        computed = time.perf_counter()
        out = to_bytes(d.cpu())
        kept = self._shards.keep_result(item, d)
        ended = time.perf_counter()
        seconds = {"copy_in": brought - began, "kernel": computed - brought, "copy_out": ended - computed}
        return Told(out, seconds, parts.shards, self._shards.flops(problem), kept, self._shards.nbytes)

    def forget(self, tensors: list[str]) -> None:
        """Drop what is kept of these tensors."""
        self._shards.forget(tensors)

    def _wait(self) -> None:
        if self._shards.place.type == "cuda":
            torch.cuda.synchronize(self._shards.place)


def to_bytes(x: Any) -> Any:
    """A CPU tensor's elements as numpy bytes, which Ray's object store holds without another copy."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


def of_bytes(data: Any, dtype: str) -> Any:
    """Back, one-dimensional, in memory of its own: what lies in the object store can't be written."""
    return torch.from_numpy(data.copy()).view(dtype_of(dtype))


def _host() -> str:
    tools: Any = ray.util  # it carries no types
    return str(tools.get_node_ip_address())


def interface_of(host: str) -> str:
    """The name of the network interface with this IPv4 address, which gloo and NCCL are to use."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(told[20:24]) == host:
                return name
    raise RankLost(f"no network interface has this node's address {host}")
