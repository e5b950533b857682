"""A GPU as a device: receives batches, moves operands from the page-locked arena, runs kernels, moves D back.

Three lanes, a stream each (copy in, compute, copy out), so that one batch computes while the next arrives and
the last leaves. One thread drives them: it queues work and asks events whether it has ended, and waits for nothing.
Stored tensors stay in device memory within a byte budget, least recently used first out. D that is to be stored stays
there too, and is copied out when the front fetches it, on a stream that no reply waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import msgspec

from kernels import climb, cublas, predict, probe
from kernels.device import Device
from kernels.operands import Operands
from kernels.problem import DType, Problem, Unsupported
from kernels.runtime import Runtime, runtime
from service.drivers.base import CannotStart, late, problem_asked
from service.drivers.cuda_regions import CudaRegions
from service.drivers.events import Events
from service.drivers.fetches import Fetches
from service.drivers.flight import Flight, Moved
from service.drivers.gpm import SOURCE, Reading, TensorProbe
from service.drivers.launches import Launches
from service.drivers.lent import Lent
from service.drivers.loans import Loans
from service.drivers.moves import Moves
from service.drivers.resident import Cache
from service.drivers.trust import Trust
from service.handle import CACHE_SHARE
from service.memory import Memory, operands_of, unmapped
from service.messages import Batch, BatchDone, Item, ItemDone, Map, Operand, Report

log = logging.getLogger("gemm.worker")

#: Batches that the lanes hold at once: one arrives, one computes, one leaves.
LANES = 3
#: Share of the cache's budget that loans take besides.
LOAN_SHARE = 0.25
#: Between two looks at what has not ended while the driver is closed.
CLOSING_SECONDS = 0.001
#: Exit status after a device error: the context is lost, and with it the process.
EXIT_DEVICE_FAULT = 5


class CudaDriver:
    """See service.drivers.base.Driver: GPU `index` of those that CUDA_VISIBLE_DEVICES leaves."""

    backend = "cublas"

    def __init__(self, memory: Memory, index: int = 0) -> None:
        self._memory = memory
        self._index = index
        self.stacking = True
        self.device: Device
        self._runtime: Runtime
        self._reading = Reading(None, detail="not read yet")
        #: Batches that no lane has yet, and what may happen only after them; those in the lanes. Oldest first.
        self._waiting: deque[Flight | Callable[[], None]] = deque()
        self._flights: deque[Flight] = deque()
        #: Held where what is cached is asked for or changed: questions come on another thread.
        self._lock = threading.Lock()
        self._regions: CudaRegions | None = None

    # -- life -------------------------------------------------------------------------------------------------

    def start(self, report: Callable[[Report], None]) -> None:
        """Open the GPU, page-lock the arena, verify the reference; own variants join as their self-tests pass."""
        self._tell = report
        populated = self._memory.arena.populate()  # takes about as long as importing torch
        try:
            import torch
        except ImportError as error:
            raise CannotStart(f"torch isn't installed: {error}", needs_person=True) from None
        self._torch: Any = torch
        try:
            if not torch.cuda.is_available():
                raise CannotStart("torch finds no CUDA device or no driver that fits it", needs_person=True)
            torch.cuda.set_device(self._index)
            populated.join()
            self._open()
        except (RuntimeError, AssertionError) as error:
            raise CannotStart(f"GPU {self._index} can't be used: {error}", needs_person=True) from None
        self._verify_reference()
        self._join()
        self._probe = TensorProbe(self.device.uuid)
        self._probe.start(self._read)

    def _open(self) -> None:
        torch = self._torch
        self._runtime = runtime(self._index)
        self.device = self._runtime.device
        self._trust = Trust(self._runtime, self._report)
        self._place = torch.device("cuda", self._index)
        inward, self._compute, outward, self._back = (torch.cuda.Stream(self._place) for _ in range(4))
        torch.cuda.set_stream(self._compute)
        self._lent = Lent(torch, self._index)
        self._lent.add_host(0, self._memory.arena.memory)
        free, _ = torch.cuda.mem_get_info(self._place)
        self._cache = Cache(int(free * CACHE_SHARE))
        self._events = Events(torch)
        self._moves = Moves(torch, self._place, self._lent, self._cache, self._events, inward, outward)
        self._launches = Launches(self._runtime, self._lent, self._events, self._compute, self._guard)
        self._fetches = Fetches(torch, self._back, self._cache, self._moves)
        self._loans = Loans(torch, self._place, self._back, int(free * CACHE_SHARE * LOAN_SHARE))

    def _join(self) -> None:
        """Own variants whose tests are known join. The front knows from the start which are still to be tested."""
        self._trust.begin(self._index)
        self._report()

    def _verify_reference(self) -> None:
        torch = self._torch
        x = torch.randn(64, 96, device=self._place, dtype=torch.float64)
        y = torch.randn(96, 32, device=self._place, dtype=torch.float64)
        for dtype, bound in ((DType.FP64, 1e-12), (DType.FP32, 1e-5), (DType.FP16, 2e-2)):
            a, b = (z.to(self._moves.types[dtype])[None] for z in (x, y))
            d = torch.full((1, 64, 32), float("nan"), device=self._place, dtype=a.dtype)
            problem = Problem(64, 32, 96, dtype=dtype, out_dtype=dtype)
            self._runtime.run(problem, Operands(a, b, d), cublas.NAME)
            want = x @ y
            if not (d[0].double() - want).norm() <= bound * want.norm():
                raise CannotStart(f"cuBLAS computes wrong {dtype} products on this GPU", needs_person=True)

    def _read(self, reading: Reading) -> None:
        if reading.active is None:
            log.warning("tensor-core activity: %s", reading.detail)
        self._reading = reading
        self._report()

    def _report(self) -> None:
        torch = self._torch
        held = {
            "cached": self._cache.nbytes,
            "only": self._cache.sole_nbytes,
            "reserved": torch.cuda.memory_reserved(self._place),
        }
        reading = self._reading
        self._tell(
            Report(
                held, self._trust.quarantined, reading.active, SOURCE, reading.detail, reading.sm_clock_mhz
            )
        )

    def close(self) -> None:
        """Finish the batches in the lanes, and what is being fetched."""
        while self.advance():
            time.sleep(CLOSING_SECONDS)
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
        return None if all(map(self._moves.knows, operands_of(item))) else unmapped(item)

    # -- batches ----------------------------------------------------------------------------------------------

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Take a batch, and launch it when the lanes have room."""
        self._waiting.append(Flight(batch, done))
        self._go_on()

    def advance(self) -> bool:
        """Tell what ended and launch what waits; whether anything is under way. Never waits for the device."""
        try:
            fetching = self._fetches.advance()
        except RuntimeError as error:  # of whatever ran meanwhile: a copy isn't to blame
            self._fault(error, self._flights[0] if self._flights else None)
        while self._flights and self._is_over(self._flights[0]):
            flight = self._flights.popleft()
            flight.done(flight.outcome())
            flight.held.clear()
            self._events.give_back(flight)
        self._go_on()
        return fetching or bool(self._flights)

    def _go_on(self) -> None:
        """Launch what waits, as far as the lanes have room, and what was to happen after it."""
        while self._waiting:
            head = self._waiting[0]
            if not isinstance(head, Flight):
                head()
            elif len(self._flights) < LANES:
                self._flights.append(head)
                try:
                    with self._lock:
                        self._launch(head)
                except Exception as error:
                    self._fault(error, head)
                head.launched()
            else:
                return
            self._waiting.popleft()

    def _in_turn(self, action: Callable[[], None]) -> None:
        """Do what a batch that came before must not notice: its operands have to be there when it is launched."""
        if self._waiting:
            self._waiting.append(action)
        else:
            action()

    def _is_over(self, flight: Flight) -> bool:
        try:
            return flight.over
        except RuntimeError as error:
            self._fault(error, flight)

    def _launch(self, flight: Flight) -> None:
        moves = self._moves
        moved: list[Moved] = []
        due = []
        for item in flight.batch.items:
            refusal = late(item)
            if refusal is None and (here := moves.find(item)) is not None:
                moved.append(here)
            elif refusal is None and (refusal := self._missing(item)) is None:
                due.append(item)
            else:
                flight.ended[item.id] = refusal
        groups: list[Sequence[Item]] = (
            [due] if flight.batch.stacked and len(due) > 1 else [[item] for item in due]
        )
        for items in groups:
            one = self._guard(flight, items, moves.copy_in)
            if one is not None:
                moved.append(one)
        if "begun" in flight.marks:  # else all operands were here
            moves.mark(flight, "arrived", moves.inward)
            self._compute.wait_event(flight.marks["arrived"])
        ran = self._launches.run(flight, moved)
        if flight.runs:
            flight.marks["computed"] = flight.runs[-1].ended
        else:
            moves.mark(flight, "computed", self._compute)
        flight.marks["left"] = flight.marks["computed"]
        leaving = [(items, d) for items, d in ran if not moves.stays(flight, items, d)]
        if leaving:
            moves.outward.wait_event(flight.marks["computed"])
            for items, d in leaving:
                moves.copy_out(flight, items, d)
            moves.mark(flight, "left", moves.outward)

    def _guard(self, flight: Flight, items: Sequence[Item], step: Callable[..., Any], *args: Any) -> Any:
        """A step of one launch; memory that is short is made, once, from the cache."""
        torch = self._torch
        for last in (False, True):
            try:
                return step(flight, items, *args)
            except Unsupported as reason:
                return flight.refuse(items, "unsupported", reason.because)
            except torch.OutOfMemoryError:
                if last:
                    break
                log.warning("device memory is short: %d bytes of stored tensors leave", self._cache.nbytes)
                self._cache.shrink(0)
                torch.cuda.synchronize(self._place)
                torch.cuda.empty_cache()
        return flight.refuse(items, "no_room", "the GPU has no memory for this product")

    # -- faults -----------------------------------------------------------------------------------------------

    def _fault(self, error: Exception, flight: Flight | None) -> NoReturn:
        """A device error poisons the context: note who is suspect, and leave; the supervisor starts another."""
        suspects = flight.suspects if flight is not None else set()
        log.critical("device error: %s (variants in flight: %s)", error, sorted(suspects) or "reference only")
        for name in suspects:
            probe.condemn(self._runtime, name, f"{type(error).__name__}: {error}"[:500])
        os._exit(EXIT_DEVICE_FAULT)

    def hung(self) -> None:
        """Quarantine the variant of the first launch of the oldest batch that has not ended, and leave."""
        suspect = self._flights[0].stuck if self._flights else cublas.NAME
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
            return {"device": asdict(self.device), "variants": self._trust.variants()}
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
            self._back.wait_stream(self._moves.inward)  # it may be on its way
        return self._loans.lend(self._moves.here(operand) if kept is None else kept)

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop these from device memory, once no batch waits that may name them."""

        def forget() -> None:
            with self._lock:
                self._cache.forget(tensors)

        self._in_turn(forget)

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """Queue a copy to the arena."""
        try:
            with self._lock:
                self._fetches.begin(operand, fetched)
        except RuntimeError as error:
            self._fault(error, None)

    def settled(self, tensors: Sequence[str]) -> None:
        """The arena has these too: they may be dropped, once no batch waits that says that it hasn't."""

        def settled() -> None:
            with self._lock:
                self._cache.settled(tensors)

        self._in_turn(settled)
