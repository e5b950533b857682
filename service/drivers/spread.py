"""All ranks of products over a cluster's nodes: receives a product from the front, hands it to ranks that Ray placed.

The process of this driver is the one member of the front's team: it maps the arena, joins the Ray cluster, and ends
with its ranks when one of them is lost; the front starts another with the next product.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.device import Device, describe_cpu
from kernels.problem import Unsupported
from kernels.sharded import RankLost
from service.drivers.base import CannotStart
from service.drivers.shards import VARIANT, OfRanks, named, reason_of, tensor_of
from service.handle import EXIT_CANNOT_START
from service.memory import Memory, operands_of, unmapped
from service.messages import Batch, BatchDone, Item, ItemDone, Report

if TYPE_CHECKING:
    from service.drivers.ray_ranks import Ranks, Told

log = logging.getLogger("gemm.worker")

#: Seconds between looks at ranks that have nothing to do.
WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray cluster's address, how many ranks it is to hold and on what, and what each may keep (see Rank)."""

    address: str
    ranks: int
    device: str
    reference: str = "auto"
    shard_bytes: int = 0


class SpreadDriver(OfRanks):
    """See service.drivers.base.Driver; computes one item at a time, on all ranks."""

    stacking = False

    def __init__(self, memory: Memory, cluster: Cluster, seconds: float) -> None:
        """`seconds`: how long the ranks may take to be placed and to find each other."""
        self._memory = memory
        self._cluster = cluster
        self._end = time.monotonic() + seconds
        self._ranks: Ranks
        self._report: Callable[[Report], None]
        self._on_gpus = False
        self._using = threading.Lock()
        self.device: Device = describe_cpu()

    @property
    def backend(self) -> str:
        """What brings blocks from rank to rank."""
        return "nccl" if self._on_gpus else "gloo"

    def start(self, report: Callable[[Report], None]) -> None:
        """Join the cluster and have it place the ranks, which verify a product."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, about its use of other packages
                import ray

                from service.drivers.ray_ranks import Ranks
        except ImportError as error:
            raise CannotStart(f"the extra ray isn't installed: {error}", needs_person=True) from None
        wanted = self._cluster
        try:
            ray.init(address=wanted.address, log_to_driver=False, logging_level=logging.WARNING)
            resources: dict[str, float] = ray.cluster_resources()
            has = resources.get("GPU", 0.0)
            self._on_gpus = wanted.device == "cuda" or (wanted.device == "auto" and has >= wanted.ranks)
            self._ranks = Ranks(
                wanted.ranks,
                gpus=self._on_gpus,
                reference=wanted.reference,
                shard_bytes=wanted.shard_bytes,
                seconds=max(1.0, self._end - time.monotonic()),
            )
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise CannotStart(f"ranks in the Ray cluster at {wanted.address}: {error}") from None
        log.info("%d ranks on nodes %s", wanted.ranks, ", ".join(sorted(set(self._ranks.nodes()))))
        self._report = report
        report(Report())
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        """End the process when a rank is lost between products: the next one is then for new ranks."""
        while True:
            time.sleep(WATCH_SECONDS)
            with self._using:
                try:
                    self._ranks.nodes()
                except RankLost as error:
                    log.error("%s", error)
                    os._exit(EXIT_CANNOT_START)

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Compute the one item on all ranks."""
        with self._using:
            done(self._computed(batch))

    def _computed(self, batch: Batch) -> BatchDone:
        (item,) = batch.items
        if not all(self._memory.holds(operand.region) for operand in operands_of(item)):
            return _refused(batch, unmapped(item))
        try:
            told = self._ranks.compute(item, lambda name: tensor_of(self._memory, named(item)[name]))
        except Unsupported as reason:
            return _refused(batch, ItemDone(item.id, "unsupported", reason.because))
        except RankLost as error:
            return _refused(
                batch, ItemDone(item.id, "no_worker", f"a rank of the product is gone: {error}"[:300])
            )
        except MemoryError:
            detail = "a rank has no memory for its part of this product"
            return _refused(batch, ItemDone(item.id, "no_room", detail))
        return self._done(batch, item, told)

    def _done(self, batch: Batch, item: Item, told: Sequence[Told]) -> BatchDone:
        """D in the arena, and the ranks' word as one."""
        began = time.perf_counter()
        out, at = self._memory.view(item.out), 0
        for each in told:
            out[at : at + each.rows.nbytes] = each.rows.data
            at += each.rows.nbytes
        seconds = {stage: max(each.seconds[stage] for each in told) for stage in told[0].seconds}
        seconds["copy_out"] += time.perf_counter() - began
        busy = sum(each.seconds["kernel"] for each in told)
        shards = {way: sum(each.shards[way] for each in told) for way in told[0].shards}
        self._report(Report(device_bytes={"shards": sum(each.nbytes for each in told)}))
        why = f"rows of A and columns of B over {len(told)} ranks that Ray placed, blocks of B by {self.backend}"
        kept = any(each.kept for each in told)
        ended = ItemDone(item.id, "", "", VARIANT, reason_of(item), why, kept)
        flops = sum(each.flops for each in told)
        return BatchDone(batch.id, (ended,), seconds, {VARIANT: flops}, {VARIANT: busy}, shards=shards)

    def forget(self, tensors: Sequence[str]) -> None:
        """Ranks drop their shards."""
        with self._using:
            self._ranks.forget(tensors)

    def close(self) -> None:
        """End the ranks; nothing is under way."""
        self._using.acquire()  # for good: nobody is to look at them again
        self._ranks.close()


def _refused(batch: Batch, ended: ItemDone) -> BatchDone:
    return BatchDone(batch.id, (ended,), {}, {}, {})
