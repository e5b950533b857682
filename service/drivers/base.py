"""The device interface that the worker drives: receives batches, hands on `BatchDone`s through a callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from kernels.device import Device
from kernels.problem import Activation, BiasDim, DType, Epilogue, Precision, Problem
from service.messages import Batch, BatchDone, Item, ItemDone, Map, Operand, Params, Report


class CannotStart(Exception):
    """The device can't be used. `needs_person`: trying again won't help (driver mismatch, Xid, no such device)."""

    def __init__(self, text: str, *, needs_person: bool = False) -> None:
        super().__init__(text)
        self.needs_person = needs_person


class Driver(Protocol):
    """One device. Methods are called from the worker's main thread; `ask` from another, and so may `fetch` and `hung`
    be where the device is no Queue.
    """

    device: Device

    @property
    def backend(self) -> str:
        """The reference library."""
        ...

    #: Whether rows keep their bits when stacked on this device, as a self-test found.
    stacking: bool

    def start(self, report: Callable[[Report], None]) -> None:
        """Open the device and verify a GEMM on the reference. Raises CannotStart."""
        ...

    def submit(self, batch: Batch, done: Callable[[BatchDone], None]) -> None:
        """Run a batch, or take it into the queue; `done` comes on this thread."""
        ...

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """Answer a question with plain data. Raises kernels.problem.Unsupported or ValueError."""
        ...

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop what caches keep of these tensors."""
        ...

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """Begin to write a tensor that only the device has to its place in the arena.

        `fetched`, on any thread, is told "" once it is there, or why it can't be.
        """
        ...

    def settled(self, tensors: Sequence[str]) -> None:
        """The arena has these now."""
        ...

    def hung(self) -> None:
        """The oldest batch outlasted its limit: quarantine what it runs, and end the process.

        Returns where there is nothing to note; the process is killed then.
        """
        ...

    def map(self, message: Map, descriptor: int) -> None:
        """Operands will lie in a client's memory; the descriptor is the driver's to close.

        Raises OSError or ValueError where it can't be mapped.
        """
        ...

    def unmap(self, region: int) -> None:
        """No operand names the region any more."""
        ...

    def close(self) -> None:
        """Finish what was submitted and let the device go."""
        ...


@runtime_checkable
class Queue(Driver, Protocol):
    """A device that works by itself: `submit` returns at once, so one thread can drive it and read the link too."""

    def advance(self) -> bool:
        """Begin what can begin, tell of what ended; whether anything is under way. Never waits for the device."""
        ...


def problem_of(item: Item) -> Problem:
    """The item's `Problem`. Operands are as decode checked them: equal batch or batch 1, matching K."""
    a, b, out = item.a, item.b, item.out
    return _problem(
        a.dtype, a.shape, b.shape, out.shape, item.c is not None, item.bias is not None, item.params
    )


@lru_cache(4096)  # the same products come again and again
def _problem(
    dtype: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    out: tuple[int, ...],
    c: bool,
    biased: bool,
    params: Params,
) -> Problem:
    m, k = (a[-1], a[-2]) if params.trans_a else (a[-2], a[-1])
    batch = out[0] if len(out) == 3 else 1
    bias = BiasDim(params.bias_dim) if biased else None
    return Problem(
        m=m,
        n=out[-1],
        k=k,
        batch=batch,
        dtype=DType(dtype),
        out_dtype=DType(params.out_dtype),
        trans_a=params.trans_a,
        trans_b=params.trans_b,
        epilogue=Epilogue(params.alpha, params.beta, c, bias, Activation(params.activation)),
        precision=Precision(params.precision),
        batch_invariant=params.batch_invariant,
        a_broadcast=batch > 1 and (len(a) == 2 or a[0] == 1),
        b_broadcast=batch > 1 and (len(b) == 2 or b[0] == 1),
    )


def late(item: Item) -> ItemDone | None:
    """The refusal of an item whose deadline has passed; deadlines are checked until launch."""
    if item.deadline and item.deadline <= time.monotonic():
        return ItemDone(item.id, "deadline", "the deadline passed before the kernel was launched")
    return None


def problem_asked(args: dict[str, Any]) -> Problem:
    """The `Problem` of a question as routes/info.py words it."""
    dtype = DType(args["dtype"])
    return Problem(
        m=args["m"],
        n=args["n"],
        k=args["k"],
        batch=args["batch"],
        dtype=dtype,
        out_dtype=DType(args["out_dtype"] or dtype),
        trans_a=args["trans_a"],
        trans_b=args["trans_b"],
        epilogue=Epilogue(
            args["alpha"],
            args["beta"],
            args["c"],
            BiasDim(args["bias"]) if args["bias"] else None,
            Activation(args["activation"]),
        ),
        precision=Precision(args["precision"]),
        batch_invariant=args["batch_invariant"],
    )
