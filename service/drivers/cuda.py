"""A GPU as a device: receives batches, moves operands from the page-locked arena, runs kernels, moves D back.

Three lanes, a stream each (copy in, compute, copy out), so that one batch computes while the next arrives and
the last leaves. `submit` only queues; a thread of its own waits for each batch's end and tells. Stored tensors
stay in device memory within a byte budget, least recently used first out. D that is to be stored stays there too,
and is copied out when the front fetches it, on a stream that no reply waits for.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from kernels import climb, cublas, predict, probe
from kernels.device import Device
from kernels.problem import DType, Problem, Unsupported
from kernels.runtime import Operands, Runtime, runtime
from kernels.selector import Choice
from service.drivers.base import CannotStart, late, problem_asked, problem_of
from service.drivers.cuda_regions import CudaRegions
from service.drivers.gpm import SOURCE, Reading, TensorProbe
from service.drivers.lent import Lent
from service.drivers.loans import Loans
from service.drivers.resident import Cache
from service.drivers.tiles import tiles
from service.handle import CACHE_SHARE
from service.memory import Memory, operands_of, unmapped
from service.messages import ON_DEVICE, Batch, BatchDone, Item, ItemDone, Map, Operand, Report

log = logging.getLogger("gemm.worker")

#: Batches that the lanes hold at once: one arrives, one computes, one leaves.
LANES = 3
#: Share of the cache's budget that loans take besides.
LOAN_SHARE = 0.25
#: Exit status after a device error: the context is lost, and with it the process.
EXIT_DEVICE_FAULT = 5


@dataclass(slots=True)
class _Run:
    """Items that one launch computes, and the events around it."""

    items: Sequence[Item]
    choice: Choice
    flops: int
    begun: Any
    ended: Any


@dataclass(slots=True)
class _Flight:
    """A batch in the lanes. `held` keeps device memory until the last copy is done; `kept` are items whose D stays."""

    batch: Batch
    done: Callable[[BatchDone], None]
    ended: dict[int, ItemDone] = field(default_factory=dict)
    runs: list[_Run] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    marks: dict[str, Any] = field(default_factory=dict)


class CudaDriver:
    """See service.drivers.base.Driver: GPU `index` of those that CUDA_VISIBLE_DEVICES leaves."""

    backend = "cublas"
    #: Blocks only while the lanes hold more batches than the front sends ahead.
    only_queues = True

    def __init__(self, memory: Memory, index: int = 0) -> None:
        self._memory = memory
        self._index = index
        self.stacking = True
        self.device: Device
        self._runtime: Runtime
        self._cache: Cache
        self._lent: Lent
        self._outcomes: dict[str, probe.Outcome] = {}
        self._reading = Reading(None, detail="not read yet")
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        #: Batches that have not ended, oldest first.
        self._open_flights: deque[_Flight] = deque()
        self._fetches: queue.SimpleQueue[tuple[Operand, Callable[[str], None]] | None] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(LANES)
        self._lock = threading.Lock()
        self._regions: CudaRegions | None = None

    # -- life -------------------------------------------------------------------------------------------------

    def start(self, report: Callable[[Report], None]) -> None:
        """Open the GPU, page-lock the arena, verify the reference; own variants join as their self-tests pass."""
        self._tell = report
        try:
            import torch
        except ImportError as error:
            raise CannotStart(f"torch isn't installed: {error}", needs_person=True) from None
        self._torch: Any = torch
        try:
            if not torch.cuda.is_available():
                raise CannotStart("torch finds no CUDA device or no driver that fits it", needs_person=True)
            torch.cuda.set_device(self._index)
            self._open()
        except (RuntimeError, AssertionError) as error:
            raise CannotStart(f"GPU {self._index} can't be used: {error}", needs_person=True) from None
        self._verify_reference()
        self._begin()
        self._admit_variants()
        self._probe = TensorProbe(self.device.uuid)
        self._probe.start(self._read)

    def _open(self) -> None:
        torch = self._torch
        self._runtime = runtime(self._index)
        self.device = self._runtime.device
        self._place = torch.device("cuda", self._index)
        self._in, self._compute, self._out, self._back = (torch.cuda.Stream(self._place) for _ in range(4))
        self._lent = Lent(torch, self._index)
        self._lent.add_host(0, self._memory.arena.memory)
        free, _ = torch.cuda.mem_get_info(self._place)
        self._cache = Cache(int(free * CACHE_SHARE))
        self._loans = Loans(torch, self._place, self._back, int(free * CACHE_SHARE * LOAN_SHARE))
        self._types = {
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "fp32": torch.float32,
            "fp64": torch.float64,
        }

    def _begin(self) -> None:
        self._threads = [
            threading.Thread(target=self._wait, name="copy_out", daemon=True),
            threading.Thread(target=self._write_back, name="write_back", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _verify_reference(self) -> None:
        torch = self._torch
        x = torch.randn(64, 96, device=self._place, dtype=torch.float64)
        y = torch.randn(96, 32, device=self._place, dtype=torch.float64)
        for dtype, bound in ((DType.FP64, 1e-12), (DType.FP32, 1e-5), (DType.FP16, 2e-2)):
            a, b = (z.to(self._types[dtype])[None] for z in (x, y))
            d = torch.full((1, 64, 32), float("nan"), device=self._place, dtype=self._types[dtype])
            problem = Problem(64, 32, 96, dtype=dtype, out_dtype=dtype)
            self._runtime.run(problem, Operands(a, b, d), cublas.NAME)
            want = x @ y
            if not (d[0].double() - want).norm() <= bound * want.norm():
                raise CannotStart(f"cuBLAS computes wrong {dtype} products on this GPU", needs_person=True)

    def _admit_variants(self) -> None:
        """Self-tests run in a process of their own, beside the service; what is known already joins now."""
        begun = threading.Event()

        def settle(outcome: probe.Outcome) -> None:
            self._outcomes[outcome.variant] = outcome
            self._report()

        def admit() -> None:
            try:
                probe.admit(self._runtime, self._index, on_outcome=settle, on_known=begun.set)
            finally:
                begun.set()

        threading.Thread(target=admit, name="probe", daemon=True).start()
        begun.wait()

    def _read(self, reading: Reading) -> None:
        if reading.active is None:
            log.warning("tensor-core activity: %s", reading.detail)
        self._reading = reading
        self._report()

    def _report(self) -> None:
        torch = self._torch
        quarantined = {name: self._kind(name, because) for name, because in self._runtime.barred.items()}
        held = {
            "cached": self._cache.nbytes,
            "only": self._cache.sole_nbytes,
            "reserved": torch.cuda.memory_reserved(self._place),
        }
        reading = self._reading
        self._tell(Report(held, quarantined, reading.active, SOURCE, reading.detail, reading.sm_clock_mhz))

    def _kind(self, name: str, because: str) -> str:
        outcome = self._outcomes.get(name)
        if outcome is not None:
            return str(outcome.ended)
        return "untested" if because == probe.WAITING else "wrong"

    def close(self) -> None:
        """Finish the batches in the lanes, and what is being fetched."""
        self._flights.put(None)
        self._fetches.put(None)
        for thread in self._threads:
            thread.join()
        self._probe.stop()
        if self._regions is not None:
            self._regions.close()

    # -- clients' memory --------------------------------------------------------------------------------------

    def map(self, message: Map, descriptor: int) -> None:
        """Map and page-lock host memory, or open device memory."""
        if message.handle:
            self._lent.add_device(message)
        else:
            self._lent.add_host(message.region, self._memory.map(message, descriptor))

    def unmap(self, region: int) -> None:
        """Let it go; the batches that used it have ended."""
        self._lent.remove(region)
        self._memory.unmap(region)

    def _missing(self, item: Item) -> ItemDone | None:
        return None if all(self._known(operand) for operand in operands_of(item)) else unmapped(item)

    def _known(self, operand: Operand) -> bool:
        if operand.region == ON_DEVICE:
            return operand.tensor in self._cache
        return operand.region in self._lent.data

    # -- batches ----------------------------------------------------------------------------------------------

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Queue a batch on the lanes; blocks while they hold LANES of them."""
        self._room.acquire()
        flight = _Flight(batch, done)
        self._open_flights.append(flight)
        try:
            with self._lock:
                self._queue(flight)
        except Exception as error:
            self._fault(error, flight)
        self._flights.put(flight)

    def _queue(self, flight: _Flight) -> None:
        due = []
        for item in flight.batch.items:
            refusal = late(item) or self._missing(item)
            if refusal is None:
                due.append(item)
            else:
                flight.ended[item.id] = refusal
        groups = [due] if flight.batch.stacked and len(due) > 1 else [[item] for item in due]
        moved = [(items, self._guard(flight, items, self._copy_in)) for items in groups]
        if "begun" in flight.marks:  # else all operands were here
            self._mark(flight, "arrived", self._in)
            self._compute.wait_event(flight.marks["arrived"])
        ran = []
        for items, operands in moved:
            if operands is not None and self._guard(flight, items, self._run, operands):
                ran.append((items, operands.d))
        if flight.runs:
            flight.marks["computed"] = flight.runs[-1].ended
        else:
            self._mark(flight, "computed", self._compute)
        flight.marks["left"] = flight.marks["computed"]
        leaving = [(items, d) for items, d in ran if not self._stays(flight, items, d)]
        if leaving:
            self._out.wait_event(flight.marks["computed"])
            for items, d in leaving:
                self._copy_out(flight, items, d)
            self._mark(flight, "left", self._out)

    def _mark(self, flight: _Flight, name: str, stream: Any) -> None:
        event = flight.marks[name] = self._torch.cuda.Event(enable_timing=True)
        event.record(stream)

    def _guard(self, flight: _Flight, items: Sequence[Item], step: Callable[..., Any], *args: Any) -> Any:
        """A step of one launch; memory that is short is made, once, from the cache."""
        torch = self._torch
        for last in (False, True):
            try:
                return step(flight, items, *args)
            except Unsupported as reason:
                return self._end(flight, items, "unsupported", reason.because)
            except torch.OutOfMemoryError:
                if last:
                    break
                log.warning("device memory is short: %d bytes of stored tensors leave", self._cache.nbytes)
                self._cache.shrink(0)
                torch.cuda.synchronize(self._place)
                torch.cuda.empty_cache()
        return self._end(flight, items, "no_room", "the GPU has no memory for this product")

    @staticmethod
    def _end(flight: _Flight, items: Sequence[Item], code: str, detail: str) -> None:
        for item in items:
            flight.ended[item.id] = ItemDone(item.id, code, detail)

    def _copy_in(self, flight: _Flight, items: Sequence[Item]) -> Operands:
        """Operands of one launch in device memory; rows of a stack side by side."""
        torch = self._torch
        first = items[0]
        with torch.cuda.stream(self._in):
            if len(items) == 1:
                a = self._arrive(flight, first.a)
            else:
                rows = sum(item.a.shape[0] for item in items)
                a = torch.empty(
                    (rows, first.a.shape[1]), dtype=self._types[first.a.dtype], device=self._place
                )
                at = 0
                self._copies_in(flight)
                for item in items:
                    kept = self._cache.get(item.a.tensor) if item.a.tensor else None
                    source = self._here(item.a) if kept is None else kept
                    a[at : at + item.a.shape[0]].copy_(source, non_blocking=True)
                    flight.held.append(source)
                    at += item.a.shape[0]
            b = self._arrive(flight, first.b)
            c = None if first.c is None else self._arrive(flight, first.c)
            bias = None if first.bias is None else self._arrive(flight, first.bias)
            if len(items) == 1 and self._lent.on_device(first.out.region):
                d = self._here(first.out)
            else:
                shape = first.out.shape if len(items) == 1 else (a.shape[0], first.out.shape[1])
                d = torch.empty(shape, dtype=self._types[first.out.dtype], device=self._place)
        flight.held += [a, b, c, bias, d]
        params = first.params
        return Operands(_logical(a, params.trans_a), _logical(b, params.trans_b), _three(d), _three(c), bias)

    def _run(self, flight: _Flight, items: Sequence[Item], operands: Operands) -> bool:
        torch = self._torch
        first = items[0]
        refusal = late(first) if len(items) == 1 else None
        if refusal is not None:
            flight.ended[first.id] = refusal
            return False
        problem = problem_of(first)
        if len(items) > 1:
            problem = replace(problem, m=operands.a.shape[1])
        wanted = cublas.NAME if flight.batch.reference_only else first.params.variant
        if problem.epilogue.reads_c and operands.c is not None:
            operands = replace(operands, c=operands.c.expand(operands.d.shape))
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._compute):
            if operands.d.numel():
                # Recorded right before the launch, so that busy seconds don't count what Python takes to choose.
                before: Callable[[], object] = begun.record
                for part, views in tiles(problem, operands):
                    choice = self._runtime.run(part, views, wanted, before=before)
                    before = _nothing
            else:
                begun.record()
                choice = self._runtime.choose(replace(problem, m=1, n=1), cublas.NAME)
            ended.record()
        flight.runs.append(_Run(items, choice, problem.flops, begun, ended))
        return True

    def _stays(self, flight: _Flight, items: Sequence[Item], d: Any) -> bool:
        """Whether D is where it belongs already: in a client's device memory, or here, as it is to be stored."""
        if len(items) > 1:
            return False
        if self._lent.on_device(items[0].out.region):
            return True
        return self._keep(flight, items[0], lambda: d.view(items[0].out.shape))

    def _keep(self, flight: _Flight, item: Item, value: Callable[[], Any]) -> bool:
        """Keep D here, if it is to be stored and there is room."""
        if not item.out.tensor or not self._cache.takes(item.out.nbytes):
            return False
        try:
            self._cache.keep(item.out.tensor, value())
        except self._torch.OutOfMemoryError:
            return False
        flight.kept.add(item.id)
        return True

    def _copy_out(self, flight: _Flight, items: Sequence[Item], d: Any) -> None:
        """D into the slots; rows of a stack each to its own, or into memory of their own here."""
        with self._torch.cuda.stream(self._out):
            if len(items) == 1:
                self._here(items[0].out).copy_(d.view(items[0].out.shape), non_blocking=True)
                return
            at = 0
            for item in items:
                rows = d[0, at : at + item.out.shape[0]]
                if not self._keep(flight, item, rows.clone):
                    self._here(item.out).copy_(rows, non_blocking=True)
                at += len(rows)

    def _copies_in(self, flight: _Flight) -> None:
        """The first copy of a batch is about to be queued."""
        if "begun" not in flight.marks:
            self._mark(flight, "begun", self._in)

    def _arrive(self, flight: _Flight, operand: Operand) -> Any:
        """An operand in device memory: kept there already, or copied now (and kept, if it is stored)."""
        if self._lent.on_device(operand.region):
            return self._here(operand)
        kept = self._cache.get(operand.tensor) if operand.tensor else None
        if kept is not None:
            return kept
        self._copies_in(flight)
        moved = self._torch.empty(operand.shape, dtype=self._types[operand.dtype], device=self._place)
        moved.copy_(self._here(operand), non_blocking=True)
        if operand.tensor:
            self._cache.put(operand.tensor, moved)
        return moved

    def _here(self, operand: Operand) -> Any:
        """The operand's bytes where they lie, as a tensor."""
        data = self._lent.data[operand.region][operand.offset : operand.offset + operand.nbytes]
        return data.view(self._types[operand.dtype]).view(operand.shape)

    # -- ends -------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Tell each batch's end, in order."""
        while True:
            flight = self._flights.get()
            if flight is None:
                return
            try:
                done = self._finish(flight)
            except Exception as error:
                self._fault(error, flight)
            flight.held.clear()
            self._open_flights.popleft()
            self._room.release()
            flight.done(done)

    def _finish(self, flight: _Flight) -> BatchDone:
        marks = flight.marks
        marks["left"].synchronize()
        flops: dict[str, float] = {}
        busy: dict[str, float] = {}
        for run in flight.runs:
            variant = run.choice.variant
            flops[variant] = flops.get(variant, 0.0) + run.flops
            busy[variant] = busy.get(variant, 0.0) + run.begun.elapsed_time(run.ended) / 1e3
            for item in run.items:
                reason, kept = str(run.choice.reason), item.id in flight.kept
                flight.ended.setdefault(
                    item.id, ItemDone(item.id, "", "", variant, reason, run.choice.why, kept)
                )
        seconds = {
            "copy_in": marks["begun"].elapsed_time(marks["arrived"]) / 1e3 if "begun" in marks else 0.0,
            "kernel": sum(busy.values()),
            "copy_out": marks["computed"].elapsed_time(marks["left"]) / 1e3,
        }
        items = tuple(flight.ended[item.id] for item in flight.batch.items)
        return BatchDone(flight.batch.id, items, seconds, flops, busy)

    def _write_back(self) -> None:
        """Copy to the arena what the front fetches, one tensor after the other, beside the batches."""
        torch = self._torch
        while True:
            wanted = self._fetches.get()
            if wanted is None:
                return
            operand, fetched = wanted
            with self._lock:
                kept = self._cache.get(operand.tensor)
            if kept is None:
                fetched("the device doesn't have it")
                continue
            try:
                with torch.cuda.stream(self._back):
                    self._here(operand).copy_(kept, non_blocking=True)
                self._back.synchronize()
            except RuntimeError as error:
                self._fault(error, None)
            fetched("")

    def _fault(self, error: Exception, flight: _Flight | None) -> None:
        """A device error poisons the context: note who is suspect, and leave; the supervisor starts another."""
        suspects = (
            {run.choice.variant for run in flight.runs} - {cublas.NAME} if flight is not None else set()
        )
        log.critical("device error: %s (variants in flight: %s)", error, sorted(suspects) or "reference only")
        for name in suspects:
            probe.condemn(self._runtime, name, f"{type(error).__name__}: {error}"[:500])
        os._exit(EXIT_DEVICE_FAULT)

    def hung(self) -> None:
        """Quarantine the variant of the first launch of the oldest batch that has not ended, and leave."""
        runs = self._open_flights[0].runs if self._open_flights else []
        suspect = next((run.choice.variant for run in runs if not run.ended.query()), cublas.NAME)
        log.critical("a batch outlasted its limit (variant: %s)", suspect)
        if suspect != cublas.NAME:
            probe.condemn(
                self._runtime, suspect, "a batch with it outlasted its limit", ended=probe.Ended.HANG
            )
        os._exit(EXIT_DEVICE_FAULT)

    # -- questions --------------------------------------------------------------------------------------------

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """ "variants", "choose", what concerns memory of clients, and a model's "predict" and "trace"."""
        if what in ("predict", "trace"):
            measured = {"here": climb.kept(self.device.key)} if what == "predict" else {}
            return predict.answer(what, args) | measured
        if what == "variants":
            barred = self._runtime.barred
            return {
                "device": asdict(self.device),
                "variants": [
                    {
                        "name": each.name,
                        "step": each.step,
                        "state": "barred" if each.name in barred else "admitted",
                        "detail": barred.get(each.name, self._detail(each.name)),
                    }
                    for each in self._runtime.variants
                ],
            }
        if what == "choose":
            return asdict(self._runtime.choose(problem_asked(args), args.get("variant", "auto")))
        return self._ask_of_memory(what, args)

    def _ask_of_memory(self, what: str, args: dict[str, Any]) -> Any:
        """Loans of stored tensors, and CUDA shared memory."""
        if what == "lend":
            return self._lend(msgspec.convert(args["operand"], Operand))
        if what == "end_loan":
            return self._loans.end(args["loan"])
        if self._regions is None:
            self._regions = CudaRegions(self._memory.arena)
        return self._regions.ask(what, args)

    def _lend(self, operand: Operand) -> dict[str, Any] | None:
        """A stored tensor that is in the arena too, from wherever it is nearest."""
        with self._lock:
            kept = self._cache.get(operand.tensor)
            self._back.wait_stream(self._in)  # it may be on its way
        return self._loans.lend(self._here(operand) if kept is None else kept)

    def _detail(self, name: str) -> str:
        outcome = self._outcomes.get(name)
        return f"self-test: {outcome.ended}" if outcome is not None else "the reference"

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop these from device memory."""
        with self._lock:
            self._cache.forget(tensors)

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """Queue a copy to the arena."""
        self._fetches.put((operand, fetched))

    def settled(self, tensors: Sequence[str]) -> None:
        """The arena has these too: they may be dropped."""
        with self._lock:
            self._cache.settled(tensors)


def _nothing() -> None:
    """Before all launches but the first."""


def _three(x: Any) -> Any:
    return x if x is None or x.dim() == 3 else x[None]


def _logical(x: Any, transposed: bool) -> Any:
    """op(X) as [layers, rows, columns]."""
    x = _three(x)
    return x.transpose(1, 2) if transposed else x
