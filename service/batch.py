"""What runs together: receives admitted work, hands on batches, oldest of the highest priority first.

Pure: the time is an argument, nothing here sleeps or sends. While a device is busy the queue grows, and the next
batch takes what is there. Requests that share a resident B and all parameters are stacked along M.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.messages import Item, Operand, Params

#: Priority 1 is the highest; 0 in a request means this one.
DEFAULT_PRIORITY = 5
PRIORITIES = range(1, 11)


#: Rows of A beyond which arithmetic bounds a product, not the reading of B: a stack would only cost copies.
MOST_STACKED = 2048


def _nothing() -> None:
    return None


def _any(work: Work) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rate:
    """A key's quota on FLOPs a second; `key` is its id."""

    key: str
    flops_per_second: float


@dataclass(slots=True, eq=False)
class Work:
    """One GEMM on its way. `seconds` is its estimated time on the device; times are CLOCK_MONOTONIC seconds;
    `rate` is the quota that its FLOPs are taken from when it is admitted, None for none.

    `trace` is the id of the trace that it belongs to, "" for none.

    `release` gives the operands back; it is called once, when nothing can read them any more. `retries` counts
    the workers that died with it.
    """

    id: int
    a: Operand
    b: Operand
    out: Operand
    params: Params
    c: Operand | None = None
    bias: Operand | None = None
    owner: str = ""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    rate: Rate | None = None
    seconds: float = 0.0
    arrived: float = 0.0
    retries: int = 0
    trace: str = ""
    release: Callable[[], None] = _nothing
    stack_key: tuple[object, ...] | None = field(init=False)
    #: Its operands that are stored tensors.
    stored: tuple[Operand, ...] = field(init=False)
    #: Bytes of operands and result that the product touches.
    nbytes: int = field(init=False)
    #: Bytes that the work alone holds while it waits: stored tensors are there anyway, for all who use them.
    held_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.stack_key = _stack_key(self)
        self.stored = ()
        self.nbytes = self.held_nbytes = self.out.nbytes
        for operand in (self.a, self.b, self.c, self.bias):
            if operand is not None:
                self.nbytes += operand.nbytes
                if operand.tensor:
                    self.stored += (operand,)
                else:
                    self.held_nbytes += operand.nbytes

    @property
    def regions(self) -> set[int]:
        """Clients' memory that it names."""
        parts = (self.a, self.b, self.out, self.c, self.bias)
        return {part.region for part in parts if part is not None and part.region}

    @property
    def rows(self) -> int:
        """Rows of A."""
        return self.a.shape[-2]

    @property
    def kind(self) -> str:
        """The type that devices state a peak of: A's, or tf32 where that is asked for."""
        return "tf32" if self.a.dtype == "fp32" and self.params.precision == "tf32" else self.a.dtype

    @property
    def flops(self) -> float:
        """2·M·N·K·batch."""
        k = self.a.shape[-2] if self.params.trans_a else self.a.shape[-1]
        return 2.0 * k * math.prod(self.out.shape)

    def item(self) -> Item:
        """The message for the worker."""
        deadline = 0.0 if self.deadline is None else self.deadline
        return Item(self.id, self.a, self.b, self.out, self.params, self.c, self.bias, deadline)


def _stack_key(work: Work) -> tuple[object, ...] | None:
    """What must be equal for two requests to be stacked along M; None where one can't be.

    B and bias must be resident (their content is then named by an ETag); C and a bias along M have rows of their
    own, and a transposed A is no stack of rows. A product of many rows reads B often enough by itself.
    """
    params = work.params
    if not work.b.tensor or work.c is not None or params.trans_a:
        return None
    if len(work.a.shape) != 2 or len(work.b.shape) != 2 or work.a.shape[0] > MOST_STACKED:
        return None
    if work.bias is not None and (params.bias_dim != "n" or not work.bias.tensor):
        return None
    return (work.b.tensor, work.a.dtype, work.a.shape[1], work.bias and work.bias.tensor, params)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one batch: requests, rows of a stack, and estimated seconds of a group.

    `group_seconds` also bounds what a stack takes along of lower priority than its head's. A device computes a
    product of `long_seconds` for far longer than its message takes.
    """

    requests: int = 64
    rows: int = 16384
    group_seconds: float = 0.005
    long_seconds: float = 0.0005
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """The works of one batch."""

    works: tuple[Work, ...]
    stacked: bool


class Queue:
    """Admitted work that no worker has yet."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._levels: dict[int, dict[int, Work]] = {level: {} for level in PRIORITIES}
        self._stacks: dict[tuple[object, ...], dict[int, Work]] = {}
        self.depth = 0
        self.nbytes = 0
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Work]:
        return itertools.chain.from_iterable(level.values() for level in self._levels.values())

    def put(self, work: Work, *, first: bool = False) -> None:
        """Add work; `first` puts it before its equals (it has waited once already)."""
        level = self._levels[work.priority]
        if first:
            rest = list(level.items())
            level.clear()
            level[work.id] = work
            level.update(rest)
        else:
            level[work.id] = work
        if work.stack_key is not None:
            self._stacks.setdefault(work.stack_key, {})[work.id] = work
        self.depth += 1
        self.nbytes += work.held_nbytes
        self.seconds += work.seconds

    def discard(self, work: Work) -> bool:
        """Take work out; False where it isn't here."""
        if self._levels[work.priority].pop(work.id, None) is None:
            return False
        if work.stack_key is not None:
            stack = self._stacks[work.stack_key]
            del stack[work.id]
            if not stack:
                del self._stacks[work.stack_key]
        self.depth -= 1
        self.nbytes -= work.held_nbytes
        # Sums of floats drift; an empty queue has no work.
        self.seconds = self.seconds - work.seconds if self.depth else 0.0
        return True

    def expired(self, now: float) -> list[Work]:
        """Take out all work whose deadline has passed."""
        late = [work for work in self if work.deadline is not None and work.deadline <= now]
        for work in late:
            self.discard(work)
        return late

    def wait(self, now: float) -> float:
        """Seconds until `take` gives a batch: 0 when it does now, infinity when empty."""
        head = self.head
        if head is None:
            return float("inf")
        if self.depth >= self.limits.requests:
            return 0.0
        return max(0.0, head.arrived + self.limits.delay - now)

    def is_long(self, work: Work) -> bool:
        """Whether nothing could be stacked with it, and it takes a device a while."""
        return work.stack_key is None and work.seconds >= self.limits.long_seconds

    def take(
        self,
        head: Work | None = None,
        *,
        stacking: bool = True,
        together: bool = False,
        fits: Callable[[Work], bool] = _any,
    ) -> Taken | None:
        """Take the next batch out, or that of `head`, of works that `fits` lets run there.

        stacking False: this device's bits differ in a stack, so only who doesn't mind. together: this device computes
        unlike products in one launch, so those that found nobody to be stacked with go as a group.
        """
        head = head or self.first(fits)
        if head is None:
            return None
        single = self._is_single if together else None
        stackable = head.stack_key is not None and (stacking or not head.params.batch_invariant)
        works = self._stack(head, fits) if stackable else self._group(head, fits, single)
        stacked = stackable and len(works) > 1
        if single is not None and stackable and not stacked and single(head):
            works = self._group(head, fits, single)
        for work in works:
            self.discard(work)
        return Taken(tuple(works), stacked)

    @property
    def head(self) -> Work | None:
        """The work that goes next; it decides where its batch runs."""
        for level in self._levels.values():
            if level:
                return next(iter(level.values()))
        return None

    def first(self, fits: Callable[[Work], bool]) -> Work | None:
        """The first that `fits`: some works can run on one device only."""
        head = self.head
        return head if head is None or fits(head) else next(filter(fits, self), None)

    def _stack(self, head: Work, fits: Callable[[Work], bool]) -> list[Work]:
        assert head.stack_key is not None
        if head.retries:
            return [head]
        works, rows, spare = [head], head.rows, self.limits.group_seconds
        for work in self._stacks[head.stack_key].values():
            if len(works) >= self.limits.requests:
                break
            if work is head or work.retries or rows + work.rows > self.limits.rows or not fits(work):
                continue
            if work.priority != head.priority:
                # Lower: it may come along only where the head hardly waits for it.
                if work.seconds > spare:
                    continue
                spare -= work.seconds
            works.append(work)
            rows += work.rows
        return works

    def _group(
        self, head: Work, fits: Callable[[Work], bool], single: Callable[[Work], bool] | None = None
    ) -> list[Work]:
        """`single`: which of those that can be stacked come along; without it they end the group, which keeps order."""
        works: list[Work] = []
        seconds = 0.0
        for work in filter(fits, self._levels[head.priority].values()):
            if works and (seconds + work.seconds > self.limits.group_seconds or work.retries or head.retries):
                break
            if work is not head and work.stack_key is not None:
                if single is None:
                    break
                if not single(work):
                    continue
            works.append(work)
            seconds += work.seconds
            if len(works) >= self.limits.requests:
                break
        return works

    def _is_single(self, work: Work) -> bool:
        """Whether nothing waits that it could be stacked with, and it is short."""
        assert work.stack_key is not None
        return len(self._stacks[work.stack_key]) == 1 and work.seconds < self.limits.long_seconds
