"""One rank's part of a product over several devices: receives shards of operands, hands on its rows of D.

A rank has rows of A, C and D and columns of B. Shards of stored tensors stay on its device within a budget, least
recently used first out: the next product with the same tensor neither copies them there nor sends blocks of B from
rank to rank. Ranks need not agree on what they keep: before blocks of B are left out, all are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.device import Device
from kernels.problem import Problem
from kernels.sharded import Gathered, gemm_sharded, split
from service.drivers.base import CannotStart, problem_of
from service.drivers.resident import Cache
from service.memory import Memory
from service.messages import Item, Map, Operand
from service.settings import memory_limit

#: What this way of computing is called in requests and replies.
VARIANT = "sharded"
#: Share of a device's memory that shards may take; a worker's own cache has twice as much.
SHARD_SHARE = 0.25
#: All of B stays on every rank where that takes no more than this share of the budget, else each rank's block does.
WHOLE_SHARE = 0.5

#: Roles of a kept shard: rows or columns of a tensor, as it is stored and transposed.
_ROLES = ("rows", "rows of the transpose", "columns", "columns of the transpose")


class OfRanks:
    """What a driver of ranks answers to the rest of service.drivers.base.Driver: D is in the arena at once."""

    _memory: Memory

    def ask(self, what: str, args: dict[str, Any]) -> Any:
        """Ranks answer no questions; workers do."""
        raise ValueError(f"ranks can't answer {what!r}")

    def fetch(self, operand: Operand, fetched: Callable[[str], None]) -> None:
        """D goes to the arena at once."""
        fetched("ranks have no result that the arena hasn't")

    def settled(self, tensors: Sequence[str]) -> None:
        """The arena has what ranks keep."""

    def hung(self) -> None:
        """Which rank held the others up isn't known here; they end together."""

    def map(self, message: Map, descriptor: int) -> None:
        """Map a client's memory; a device's can't be."""
        if message.handle:
            raise ValueError("ranks take no device memory of clients")
        self._memory.map(message, descriptor)

    def unmap(self, region: int) -> None:
        """Let it go."""
        self._memory.unmap(region)


def spans(extent: int, count: int) -> list[slice]:
    """Each rank's part of an extent; none is empty where there are as many elements as ranks."""
    parts = split(extent, count, 128 if extent >= 128 * count else 1)
    starts = [sum(parts[:rank]) for rank in range(count)]
    return [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]


def cut(item: Item, name: str, whole: Any, rank: int, count: int) -> Any:
    """A rank's part of an operand, a view of `whole`: rows of op(A) and C, columns of op(B), a bias along its axis."""
    params, problem = item.params, problem_of(item)
    rows, columns = spans(problem.m, count)[rank], spans(problem.n, count)[rank]
    match name:
        case "a":
            return (whole.t() if params.trans_a else whole)[rows]
        case "b":
            return (whole.t() if params.trans_b else whole)[:, columns]
        case "c":
            return whole.reshape(problem.m, problem.n)[rows]
        case _:
            return whole if params.bias_dim == "n" else whole[rows]


def named(item: Item) -> dict[str, Operand]:
    """The item's operands by field."""
    fields = {"a": item.a, "b": item.b, "c": item.c, "bias": item.bias}
    return {name: operand for name, operand in fields.items() if operand is not None}


def tensor_of(memory: Memory, operand: Operand) -> Any:
    """A view of an operand in the arena or a client's memory: a CPU tensor."""
    import torch

    if not operand.nbytes:
        return torch.empty(operand.shape, dtype=dtype_of(operand.dtype))
    return torch.frombuffer(memory.view(operand), dtype=dtype_of(operand.dtype)).reshape(operand.shape)


def dtype_of(name: str) -> Any:
    """torch's, of the API's name."""
    import torch

    return getattr(torch, {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[name])


def shard_budget(device: Device, sharing: int) -> int:
    """Bytes of shards that a rank keeps unless a setting says so; `sharing` ranks share the device."""
    nbytes = memory_limit() if device.arch == "cpu" else device.memory_bytes
    return int(nbytes * SHARD_SHARE) // sharing


def reason_of(item: Item) -> str:
    """Why the product is sharded."""
    return "asked" if item.params.variant == VARIANT else "only"


@dataclass(slots=True)
class _Columns:
    """A rank's block of B, and those of the others where all of B is kept."""

    block: Any
    gathered: Gathered

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(int(block.nbytes) for block in (self.block, *self.gathered.blocks.values()))


@dataclass(slots=True)
class Parts:
    """What a product is computed from, on the rank's device, and how the bytes came there (see BatchDone.shards)."""

    a: Any
    columns: _Columns
    c: Any
    bias: Any
    shards: dict[str, int]


class Shards:
    """The part of rank `rank` of `count`, on torch's device `place`. `variant`: what computes each block.

    `mapped`: operands that lie in memory which isn't the rank's own, so that they can't be kept, and needn't.
    """

    def __init__(
        self, rank: int, count: int, place: Any, budget: int, variant: str, mapped: Sequence[str] = ()
    ) -> None:
        self.rank = rank
        self.count = count
        self.place = place
        self._variant = variant
        self._mapped = frozenset(mapped)
        self._cache = Cache(budget)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._cache.nbytes

    def verify(self) -> None:
        """A product of random numbers by all ranks, each checking its rows in float64. CannotStart where wrong."""
        import torch

        random = torch.Generator().manual_seed(1)
        m, n, k = 130 * self.count, 70 * self.count, 90
        a, b = torch.randn(m, k, generator=random), torch.randn(k, n, generator=random)
        rows, columns = spans(m, self.count)[self.rank], spans(n, self.count)[self.rank]
        d = gemm_sharded(a[rows].to(self.place), b[:, columns].to(self.place))
        want = a[rows].double() @ b.double()
        if not torch.allclose(d.cpu().double(), want, rtol=1e-4, atol=1e-3):
            raise CannotStart("the ranks compute wrong products together", needs_person=True)

    def lacks(self, item: Item) -> list[str]:
        """Operands of which this rank has no part yet."""
        keys = {name: self._key(item, name) for name in named(item)}
        return [name for name, key in keys.items() if key is None or key not in self._cache]

    def bring(self, item: Item, fetch: Callable[[str], Any]) -> Parts:
        """This rank's part of each operand; `fetch` gives, on the device, those that it `lacks`."""
        keys = {name: self._key(item, name) for name in named(item)}
        found = {name: self._cache.get(key) for name, key in keys.items() if key is not None}
        self._make_room(item, [name for name in self.lacks(item) if name not in self._mapped])
        shards = dict.fromkeys(("copied", "exchanged", "kept"), 0)

        def part(name: str) -> Any:
            if name not in keys:
                return None
            if (there := found.get(name)) is not None:
                shards["kept"] += there.nbytes
                return there
            came = fetch(name)
            if name not in self._mapped:
                shards["copied"] += came.nbytes
                self._keep(item, name, came)
            return came

        a, b, c, bias = map(part, ("a", "b", "c", "bias"))
        if not isinstance(b, _Columns):
            b = _Columns(b.contiguous(), Gathered(keep=self._keeps_whole(item)))
        return Parts(a, b, c, bias, shards)

    def multiply(self, item: Item, parts: Parts, out: Any) -> None:
        """This rank's rows of D into `out`, together with the others. Raises Unsupported, RankLost."""
        params, key = item.params, self._key(item, "b")
        if key is not None:
            self._cache.forget([key])  # which takes its size off, as it is before blocks come
        gemm_sharded(
            parts.a,
            parts.columns.block,
            c=parts.c,
            bias=parts.bias,
            out=out,
            gathered=parts.columns.gathered,
            alpha=params.alpha,
            beta=params.beta,
            bias_dim=params.bias_dim,
            activation=params.activation,
            precision=params.precision,
            batch_invariant=params.batch_invariant,
            variant=self._variant,
        )
        parts.shards["exchanged"] = parts.columns.gathered.received
        if key is not None:
            self._cache.put(key, parts.columns)

    def keep_result(self, item: Item, out: Any) -> bool:
        """Keep this rank's rows of D, which is stored under a name; whether there is room."""
        if not item.out.tensor:
            return False
        key = _named(item.out.tensor, "rows")
        self._cache.put(key, out)
        return key in self._cache

    def forget(self, tensors: Sequence[str]) -> None:
        """Drop what is kept of these tensors."""
        self._cache.forget([_named(tensor, role) for tensor in tensors for role in _ROLES])

    def flops(self, problem: Problem) -> float:
        """Of this rank's rows."""
        rows = spans(problem.m, self.count)[self.rank]
        return 2.0 * float(rows.stop - rows.start) * problem.n * problem.k

    def _key(self, item: Item, name: str) -> str | None:
        """Under which name this rank keeps its part; None where it doesn't: what passes once, what is small."""
        whole = named(item)[name]
        if not whole.tensor or name == "bias" or name in self._mapped:
            return None
        turned = item.params.trans_a if name == "a" else name == "b" and item.params.trans_b
        role = ("columns" if name == "b" else "rows") + (" of the transpose" if turned else "")
        return _named(whole.tensor, role)

    def _keeps_whole(self, item: Item) -> bool:
        return bool(item.b.tensor) and item.b.nbytes <= WHOLE_SHARE * self._cache.budget

    def _keep(self, item: Item, name: str, part: Any) -> None:
        if name != "b" and (key := self._key(item, name)) is not None:
            self._cache.put(key, part)

    def _make_room(self, item: Item, coming: Sequence[str]) -> None:
        """Drop what was used longest ago where a GPU has no room for this product beside it."""
        if self.place.type != "cuda":
            return
        import torch

        sizes = {name: operand.nbytes for name, operand in named(item).items()}
        # Its parts, D, and two blocks of B on their way; or all of them, where they stay.
        blocks = sizes["b"] * (self.count if self._keeps_whole(item) and "b" in coming else 2)
        needed = (sum(sizes[name] for name in coming) + item.out.nbytes + blocks) // self.count
        free, _ = torch.cuda.mem_get_info(self.place)
        if free < needed:
            self._cache.shrink(max(0, self._cache.nbytes - (needed - free)))
            torch.cuda.empty_cache()


def _named(tensor: str, role: str) -> str:
    return f"{tensor} {role}"
