"""One rank of a product over several devices: receives the whole product, computes its rows of D with the others.

Every rank maps the arena, so each takes its rows of A and columns of B from there and writes its rows of D there;
between devices blocks of B travel (kernels.sharded). What stays on the device is service.drivers.shards'. A rank that
fails leaves the others waiting: the front ends them all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kernels.device import Device, describe_cpu, describe_cuda
from kernels.problem import Unsupported
from kernels.sharded import RankLost
from service.drivers.base import CannotStart, problem_of
from service.drivers.shards import (
    VARIANT,
    OfRanks,
    Shards,
    cut,
    named,
    reason_of,
    shard_budget,
    spans,
    tensor_of,
)
from service.memory import Memory, operands_of, unmapped
from service.messages import Batch, BatchDone, Item, ItemDone, Report

#: Rows of a matrix that is no whole run of memory are brought to a GPU in panels of this size.
PANEL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many ranks this is, the file by which they find each other, and the GPU's index.

    Without a GPU (None) `reference` names the CPU's library: a worker's choice, so that bits are those of a worker.
    It keeps up to `shard_bytes` of shards; 0: a share of the device's memory.
    """

    number: int
    count: int
    rendezvous: str
    gpu: int | None
    reference: str = "auto"
    shard_bytes: int = 0


class ShardDriver(OfRanks):
    """See service.drivers.base.Driver; computes one item at a time, with all other ranks."""

    stacking = False

    def __init__(self, memory: Memory, rank: Rank, seconds: float) -> None:
        """`seconds`: how long the ranks may take to find each other."""
        self._memory = memory
        self._rank = rank
        self._seconds = seconds
        self.device: Device
        self._torch: Any
        self._shards: Shards
        self._report: Callable[[Report], None]

    @property
    def backend(self) -> str:
        """What brings blocks from rank to rank."""
        return "gloo" if self._rank.gpu is None else "nccl"

    def start(self, report: Callable[[Report], None]) -> None:
        """Find the other ranks and verify a product with them."""
        try:
            import torch
        except ImportError as error:
            raise CannotStart(f"torch isn't installed: {error}", needs_person=True) from None
        self._torch = torch
        # Ranks are processes of this machine: their sockets listen on loopback alone.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        if self._rank.gpu is None:
            self.device = describe_cpu()
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self._rank.count))
            self._place = torch.device("cpu")
        else:
            torch.cuda.set_device(self._rank.gpu)
            self._place = torch.device("cuda", self._rank.gpu)
            self.device = describe_cuda(self._rank.gpu)
        try:
            torch.distributed.init_process_group(
                self.backend,
                init_method=f"file://{self._rank.rendezvous}",
                rank=self._rank.number,
                world_size=self._rank.count,
                timeout=timedelta(seconds=self._seconds),
            )
            self._shards = self._made_shards()
            self._shards.verify()
        except (RuntimeError, RankLost) as error:
            raise CannotStart(f"the ranks don't find each other: {error}") from None
        self._report = report
        report(Report())

    def _made_shards(self) -> Shards:
        on_cpu = self._rank.gpu is None
        library = self._rank.reference
        return Shards(
            self._rank.number,
            self._rank.count,
            self._place,
            self._rank.shard_bytes or shard_budget(self.device, self._rank.count if on_cpu else 1),
            "auto" if library == "auto" else f"reference-{library}",
            # A CPU reads them in the arena, where they may be replaced by others once the product is done.
            mapped=("a", "c", "bias") if on_cpu else (),
        )

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Compute this rank's rows of the one item."""
        (item,) = batch.items
        seconds: dict[str, float] = {}
        flops: dict[str, float] = {}
        ended = self._missing(item)
        shards: dict[str, int] = {}
        if ended is None:
            ended = self._guarded(item, seconds, flops, shards)
        busy = {VARIANT: seconds["kernel"]} if "kernel" in seconds else {}
        self._report(Report(device_bytes={"shards": self._shards.nbytes}))
        done(BatchDone(batch.id, (ended,), seconds, flops, busy, shards=shards))

    def _missing(self, item: Item) -> ItemDone | None:
        if all(self._memory.holds(operand.region) for operand in operands_of(item)):
            return None
        return unmapped(item)

    def _guarded(
        self, item: Item, seconds: dict[str, float], flops: dict[str, float], shards: dict[str, int]
    ) -> ItemDone:
        try:
            kept = self._run(item, seconds, shards)
        except Unsupported as reason:
            return ItemDone(item.id, "unsupported", reason.because)
        except RankLost as error:
            return ItemDone(item.id, "no_worker", f"a rank of the product is gone: {error}"[:300])
        except (MemoryError, self._torch.cuda.OutOfMemoryError):
            return ItemDone(item.id, "no_room", "a device has no memory for its part of this product")
        flops[VARIANT] = self._shards.flops(problem_of(item))
        why = f"rows of A and columns of B over {self._rank.count} ranks, blocks of B by {self.backend}"
        return ItemDone(item.id, "", "", VARIANT, reason_of(item), why, kept)

    def _run(self, item: Item, seconds: dict[str, float], shards: dict[str, int]) -> bool:
        """Whether D stays here too."""
        began = time.perf_counter()
        parts = self._shards.bring(item, lambda name: self._bring(item, name))
        d = tensor_of(self._memory, item.out)[spans(item.out.shape[0], self._rank.count)[self._rank.number]]
        self._wait()
        brought = time.perf_counter()
        on_cpu = self._rank.gpu is None
        local = d if on_cpu else self._torch.empty(d.shape, dtype=d.dtype, device=self._place)
        self._shards.multiply(item, parts, local)
        shards |= parts.shards
        self._wait()
        computed = time.perf_counter()
        kept = False
        if not on_cpu:
            d.copy_(local)
            kept = self._shards.keep_result(item, local)
            del parts, local
            self._torch.cuda.empty_cache()  # the worker beside this rank needs the memory between products
        ended = time.perf_counter()
        seconds |= {"copy_in": brought - began, "kernel": computed - brought, "copy_out": ended - computed}
        return kept

    def _bring(self, item: Item, name: str) -> Any:
        """This rank's part of an operand on its device. On a CPU all but B stay as they are in the arena."""
        whole = tensor_of(self._memory, named(item)[name])
        x = cut(item, name, whole, self._rank.number, self._rank.count)
        if self._rank.gpu is None:
            return x.clone(memory_format=self._torch.contiguous_format) if name == "b" else x
        if x.is_contiguous() or x.t().is_contiguous():
            return x.to(self._place, non_blocking=True)
        there = self._torch.empty(x.shape, dtype=x.dtype, device=self._place)
        rows = max(1, PANEL_BYTES // max(1, x.shape[1] * x.element_size()))
        for start in range(0, x.shape[0], rows):
            there[start : start + rows].copy_(x[start : start + rows])
        return there

    def _wait(self) -> None:
        if self._rank.gpu is not None:
            self._torch.cuda.synchronize(self._place)

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop their shards."""
        self._shards.forget(tensors)

    def close(self) -> None:
        """Nothing is under way: `submit` returns when it is done."""
