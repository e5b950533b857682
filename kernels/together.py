"""Unlike products in one launch: receives what waits together, hands on which gain by it, and the launch's table.

Own kernels that compute a list of products (kernels/group.py) take those of one input type and layout. Whether they
do is decided by an estimate; that bits stay what was promised, by the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels import group
from kernels.call import code_of
from kernels.group import GroupVariant
from kernels.operands import Operands, as_packed, maybe_dtype_of
from kernels.problem import DType, Problem
from kernels.selector import Choice, Reason

if TYPE_CHECKING:
    from kernels.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Group:
    """Products that gain by sharing a launch, by their numbers; the kernel for it, and what is told of each."""

    variant: GroupVariant
    numbers: tuple[int, ...]
    choice: Choice


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds that the computer needs for a launch, and for each product that joins a group's."""

    launch: float = 0.0
    member: float = 0.0


def groups(runtime: Runtime, problems: Sequence[Problem], host: Host) -> list[Group]:
    """Sets of at least two problems that are expected to take less time together than one after the other.

    A launch takes the longer of the device's time and the host's, which works ahead.
    """
    alike: dict[tuple[DType, bool, bool], list[int]] = {}
    for number, problem in enumerate(problems):
        alike.setdefault((problem.dtype, problem.trans_a, problem.trans_b), []).append(number)
    found = (_best(runtime, problems, numbers, host) for numbers in alike.values() if len(numbers) > 1)
    return [each for each in found if each is not None]


def _best(runtime: Runtime, problems: Sequence[Problem], numbers: Iterable[int], host: Host) -> Group | None:
    """The kernel and the set of these that save the most time; None where none does."""
    tidy = {n: as_packed(problems[n]) for n in numbers}
    alone: dict[int, float] = {}
    best: tuple[float, GroupVariant, list[int], float] | None = None
    for variant in runtime.grouped:
        able = [n for n in tidy if runtime.may_join(variant, tidy[n])]
        # One that fills the device by itself has nothing to gain, and a kernel of its own may be quicker.
        small = [n for n in able if group.tiles(tidy[n], *variant.tile) < runtime.device.sms]
        for chosen in (able, small) if len(small) < len(able) else (able,):
            if len(chosen) < 2:
                continue
            for n in chosen:
                if n not in alone:
                    alone[n] = max(runtime.choose(tidy[n]).seconds, host.launch)
            together = variant.seconds_together([tidy[n] for n in chosen], runtime.device)
            prepared = host.launch + len(chosen) * host.member
            saved = sum(alone[n] for n in chosen) - max(together, prepared)
            if saved > 0 and (best is None or (saved, -together) > (best[0], -best[3])):
                best = saved, variant, chosen, together
    if best is None:
        return None
    _, variant, chosen, seconds = best
    if not runtime.trusts(variant, tidy[chosen[0]]):
        return None
    why = f"one launch for {len(chosen)} products, {seconds * 1e6:.1f} µs estimated"
    return Group(variant, tuple(chosen), Choice(variant.name, Reason.ESTIMATE, why, seconds / len(chosen)))


def table(
    items: Sequence[tuple[Problem, Operands]], variant: GroupVariant, raster: int, library: str, place: str
) -> tuple[Any, int]:
    """The table of products with prepared operands, on the device, and the number of all tiles.

    library: the compiler's run-time library, whose cuTensorMapEncodeTiled is used.
    """
    import torch

    products = [_product(problem, given) for problem, given in items]
    data, total = group.table(products, *variant.tile, raster, group.encoder(library))
    host = torch.frombuffer(bytearray(data), dtype=torch.int64)
    # Page-locked, so that the copy waits for nothing; torch keeps both until the stream is through with them.
    there = host if place == "cpu" else host.pin_memory().to(place, non_blocking=True)
    return _aligned(there), total


def _product(problem: Problem, given: Operands) -> group.Product:
    """A product as a table describes it."""
    a, b, c, d, bias = given.a, given.b, given.c, given.d, given.bias
    return group.Product(
        problem,
        group.Place(a.data_ptr(), a.shape[0], *a.stride()),
        group.Place(b.data_ptr(), b.shape[0], b.stride(0), b.stride(2), b.stride(1)),
        d.data_ptr(),
        d.stride(),
        0 if c is None else c.data_ptr(),
        (0, 0, 0) if c is None else c.stride(),
        0 if bias is None else bias.data_ptr(),
        code_of(problem, c=maybe_dtype_of(c), bias=maybe_dtype_of(bias)),
    )


def _aligned(there: Any) -> Any:
    """The table at a multiple of 128 bytes, where the driver wants tensor maps: as it is on a GPU."""
    import torch

    if there.data_ptr() % 128 == 0:
        return there
    room = torch.empty(there.numel() + 16, dtype=there.dtype, device=there.device)
    start = -room.data_ptr() % 128 // 8
    placed = room[start : start + there.numel()]
    placed.copy_(there)
    return placed
