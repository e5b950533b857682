"""One rank of a product over several devices: receives the whole product, computes its rows of D with the others.

Every rank maps the arena, so each takes its rows of A and columns of B from there and writes its rows of D there;
between devices blocks of B travel (kernels.sharded). A rank that fails leaves the others waiting: the front ends
them all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kernels.device import Device, describe_cpu, describe_cuda
from kernels.problem import Unsupported
from kernels.sharded import RankLost, gemm_sharded, split
from service.drivers.base import CannotStart, problem_of
from service.memory import Memory, operands_of, unmapped
from service.messages import Batch, BatchDone, Item, ItemDone, Map, Operand, Report

log = logging.getLogger("gemm.worker")

#: What this way of computing is called in requests and replies.
VARIANT = "sharded"
#: Rows of a matrix that is no whole run of memory are brought to a GPU in panels of this size.
PANEL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Rank:
    """Which of how many ranks this is, the file by which they find each other, and the GPU's index.

    Without a GPU (None) `reference` names the CPU's library: a worker's choice, so that bits are those of a worker.
    """

    number: int
    count: int
    rendezvous: str
    gpu: int | None
    reference: str = "auto"


class ShardDriver:
    """See service.drivers.base.Driver; computes one item at a time, with all other ranks."""

    stacking = False

    def __init__(self, memory: Memory, rank: Rank, seconds: float) -> None:
        """`seconds`: how long the ranks may take to find each other."""
        self._memory = memory
        self._rank = rank
        self._seconds = seconds
        self.device: Device
        self._torch: Any

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
            self._verify()
        except (RuntimeError, RankLost) as error:
            raise CannotStart(f"the ranks don't find each other: {error}") from None
        report(Report())

    def _verify(self) -> None:
        """A product of random numbers by all ranks, each checking its rows in float64."""
        torch = self._torch
        random = torch.Generator().manual_seed(1)
        m, n, k = 130 * self._rank.count, 70 * self._rank.count, 90
        a, b = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
        rows, columns = self._spans(m)[self._rank.number], self._spans(n)[self._rank.number]
        d = gemm_sharded(a[rows].to(self._place), b[:, columns].to(self._place))
        want = a[rows].double() @ b.double()
        if not torch.allclose(d.cpu().double(), want, rtol=1e-4, atol=1e-3):
            raise CannotStart("the ranks compute wrong products together", needs_person=True)

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Compute this rank's rows of the one item."""
        (item,) = batch.items
        seconds: dict[str, float] = {}
        flops: dict[str, float] = {}
        ended = self._missing(item)
        if ended is None:
            ended = self._guarded(item, seconds, flops)
        busy = {VARIANT: seconds["kernel"]} if "kernel" in seconds else {}
        done(BatchDone(batch.id, (ended,), seconds, flops, busy))

    def _missing(self, item: Item) -> ItemDone | None:
        if all(self._memory.holds(operand.region) for operand in operands_of(item)):
            return None
        return unmapped(item)

    def _guarded(self, item: Item, seconds: dict[str, float], flops: dict[str, float]) -> ItemDone:
        try:
            self._run(item, seconds)
        except Unsupported as reason:
            return ItemDone(item.id, "unsupported", reason.because)
        except RankLost as error:
            return ItemDone(item.id, "no_worker", f"a rank of the product is gone: {error}"[:300])
        except (MemoryError, self._torch.cuda.OutOfMemoryError):
            return ItemDone(item.id, "no_room", "a device has no memory for its part of this product")
        problem = problem_of(item)
        rows = self._spans(problem.m)[self._rank.number]
        flops[VARIANT] = 2.0 * (rows.stop - rows.start) * problem.n * problem.k
        why = f"rows of A and columns of B over {self._rank.count} ranks, blocks of B by {self.backend}"
        chosen = "asked" if item.params.variant == VARIANT else "only"
        return ItemDone(item.id, "", "", VARIANT, chosen, why)

    def _run(self, item: Item, seconds: dict[str, float]) -> None:
        params, problem = item.params, problem_of(item)
        rows = self._spans(problem.m)[self._rank.number]
        columns = self._spans(problem.n)[self._rank.number]
        began = time.perf_counter()
        a, b = self._tensor(item.a), self._tensor(item.b)
        a = self._bring((a.t() if params.trans_a else a)[rows])
        b = self._bring((b.t() if params.trans_b else b)[:, columns])
        c = None if item.c is None else self._bring(self._tensor(item.c).reshape(problem.m, problem.n)[rows])
        bias = None if item.bias is None else self._tensor(item.bias)
        if bias is not None:
            bias = self._bring(bias if params.bias_dim == "n" else bias[rows])
        d = self._tensor(item.out)[rows]
        self._wait()
        brought = time.perf_counter()
        local = d if self._rank.gpu is None else self._torch.empty(d.shape, dtype=d.dtype, device=self._place)
        gemm_sharded(
            a,
            b,
            c=c,
            bias=bias,
            out=local,
            alpha=params.alpha,
            beta=params.beta,
            bias_dim=params.bias_dim,
            activation=params.activation,
            precision=params.precision,
            batch_invariant=params.batch_invariant,
            variant="auto" if self._rank.reference == "auto" else f"reference-{self._rank.reference}",
        )
        self._wait()
        computed = time.perf_counter()
        if local is not d:
            d.copy_(local)
            del a, b, c, bias, local
            self._torch.cuda.empty_cache()  # the worker beside this rank needs the memory between products
        ended = time.perf_counter()
        seconds |= {"copy_in": brought - began, "kernel": computed - brought, "copy_out": ended - computed}

    def _spans(self, extent: int) -> list[slice]:
        """Each rank's part of an extent; none is empty where there are as many elements as ranks."""
        parts = split(extent, self._rank.count, 128 if extent >= 128 * self._rank.count else 1)
        starts = [sum(parts[:rank]) for rank in range(self._rank.count)]
        return [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]

    def _tensor(self, operand: Operand) -> Any:
        """A view of an operand in the arena."""
        torch = self._torch
        kind = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[operand.dtype]
        if not operand.nbytes:
            return torch.empty(operand.shape, dtype=getattr(torch, kind))
        return torch.frombuffer(self._memory.view(operand), dtype=getattr(torch, kind)).reshape(operand.shape)

    def _bring(self, x: Any) -> Any:
        """`x` on this rank's device: as it is on a CPU."""
        if self._rank.gpu is None:
            return x
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

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """A rank answers no questions; workers do."""
        raise ValueError(f"a rank can't answer {what!r}")

    def forget(self, tensors: Sequence[str]) -> None:
        """Nothing is kept from product to product."""

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """D goes to the arena at once."""
        fetched("a rank keeps no results")

    def settled(self, tensors: Sequence[str]) -> None:
        """Nothing was kept."""

    def hung(self) -> None:
        """Which rank held the others up isn't known here; the front ends them all."""

    def map(self, message: Map, descriptor: int) -> None:
        """Map a client's memory; a device's can't be."""
        if message.handle:
            raise ValueError("ranks take no device memory of clients")
        self._memory.map(message, descriptor)

    def unmap(self, region: int) -> None:
        """Let it go."""
        self._memory.unmap(region)

    def close(self) -> None:
        """Nothing is under way: `submit` returns when it is done."""
