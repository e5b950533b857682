"""One product over several devices: receives each rank's rows of A and columns of B, hands on its rows of D.

The schedule is an all-gather of B in a ring, hidden behind the products: while a rank multiplies its rows of A by
the block of B that it has, that block goes on to its left neighbour and the next one comes from its right. After
as many steps as there are ranks every rank has met every block. No rank ever holds more than two blocks besides
its own, K is never split (so bits are those of one device's kernel class), and D needs no reduction.

    step 0        rank 0: A0·B0    rank 1: A1·B1    rank 2: A2·B2      each sends its block left, receives from right
    step 1        rank 0: A0·B1    rank 1: A1·B2    rank 2: A2·B0
    step 2        rank 0: A0·B2    rank 1: A1·B0    rank 2: A2·B1      nothing left to send

A caller that comes again with the same B hands in what it gathered: then no block moves at all.

It runs over torch.distributed: NCCL between GPUs (of one node or several), gloo between CPU processes. Who starts
the ranks is not this module's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.api import gemm, separate

Product = Callable[..., Any]


class RankLost(RuntimeError):
    """Another rank died or didn't answer in time; D is not complete, and the process group is of no more use."""


@dataclass(slots=True)
class Gathered:
    """Blocks of B that came from other ranks, by rank; with `keep` a product leaves there what it received.

    `received`: bytes that came in the last product.
    """

    keep: bool = True
    blocks: dict[int, Any] = field(default_factory=dict)
    received: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How the operands lie over the ranks: rows of A (and of D) and columns of B that each rank has.

    `gathered`: every rank has every block of B.
    """

    rank: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    k: int
    gathered: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    def owner(self, step: int) -> int:
        """The rank whose block of B this rank multiplies at `step`."""
        return (self.rank + step) % self.world

    def columns_of(self, rank: int) -> slice:
        """Where a rank's block of B lies among the columns of D."""
        start = sum(self.columns[:rank])
        return slice(start, start + self.columns[rank])


def split(extent: int, world: int, multiple: int = 128) -> tuple[int, ...]:
    """`extent` cut into `world` parts as even as multiples of `multiple` allow; the last ones may be smaller."""
    tiles = -(-extent // multiple)
    parts, left = [], extent
    for rank in range(world):
        part = min(left, (tiles // world + (rank < tiles % world)) * multiple)
        parts.append(part)
        left -= part
    return tuple(parts)


def gemm_sharded(
    a: Any,
    b: Any,
    *,
    group: Any = None,
    c: Any = None,
    bias: Any = None,
    out: Any = None,
    product: Product = gemm,
    gathered: Gathered | None = None,
    **options: Any,
) -> Any:
    """This rank's rows of D = act(alpha · A·B + beta · C + bias); every rank of `group` calls it.

    a [M_r, K]: this rank's rows of A. b [K, N_r]: its columns of B, row-major. c and out [M_r, N]: its rows. bias: of
    length N, the whole of it, on every rank (or of length M_r with bias_dim="m"). `options` are those of
    kernels.gemm. The bounds of each element are those of kernels.gemm. `gathered`: what earlier products with this
    very B received; where no rank lacks a block, none is sent. Raises ValueError where the ranks' shapes don't fit,
    RankLost where one is gone.
    """
    import torch

    gathered = Gathered(keep=False) if gathered is None else gathered
    gathered.received = 0
    layout = _agree(a, b, gathered, group)
    if out is None:
        shape = (len(a), sum(layout.columns))
        out = torch.empty(shape, dtype=options.get("out_dtype") or a.dtype, device=a.device)
    # A block of D that is written may lie where the next block's C or bias does.
    c, bias = (None if x is None else separate(x, out) for x in (c, bias))
    along_n = options.get("bias_dim", "n") == "n"
    block = b.contiguous()
    for step in range(layout.world):
        here = layout.columns_of(layout.owner(step))
        coming, moving = _next_block(layout, step, block, gathered, group)
        product(
            a,
            block,
            c=None if c is None else c[:, here],
            bias=bias[here] if bias is not None and along_n else bias,
            out=out[:, here],
            **options,
        )
        if moving:
            with _neighbours(layout.rank):
                for transfer in moving:
                    transfer.wait()
            gathered.received += coming.nbytes
            if gathered.keep:
                gathered.blocks[layout.owner(step + 1)] = coming
        block = coming
    return out


def _next_block(
    layout: Layout, step: int, block: Any, gathered: Gathered, group: Any
) -> tuple[Any, Sequence[Any]]:
    """The block of the next step (None after the last), and the transfers to wait for until it is there."""
    import torch
    from torch import distributed

    if step + 1 == layout.world:
        return None, ()
    owner = layout.owner(step + 1)
    if layout.gathered:
        return gathered.blocks[owner], ()
    left, right = (layout.rank - 1) % layout.world, (layout.rank + 1) % layout.world
    coming = torch.empty((layout.k, layout.columns[owner]), dtype=block.dtype, device=block.device)
    with _neighbours(layout.rank):
        moving = distributed.batch_isend_irecv(
            [
                distributed.P2POp(distributed.isend, block, _global(group, left), group),
                distributed.P2POp(distributed.irecv, coming, _global(group, right), group),
            ]
        )
    return coming, moving


@contextlib.contextmanager
def _neighbours(rank: int) -> Iterator[None]:
    """RankLost where the block's way to another rank is gone."""
    from torch import distributed

    try:
        yield
    except (RuntimeError, distributed.DistBackendError) as error:
        raise RankLost(f"rank {rank} lost a neighbour: {error}") from error


def _agree(a: Any, b: Any, gathered: Gathered, group: Any) -> Layout:
    """Everyone's shapes, checked to fit, and whether everyone has every block."""
    import torch
    from torch import distributed

    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(f"a and b have {a.dim()} and {b.dim()} dimensions; shards have 2")
    world = distributed.get_world_size(group)
    has_all = len(gathered.blocks) == world - 1
    mine = torch.tensor([*a.shape, *b.shape, has_all], device=a.device)
    all_shapes = [torch.empty_like(mine) for _ in range(world)]
    try:
        distributed.all_gather(all_shapes, mine, group=group)
    except (RuntimeError, distributed.DistBackendError) as error:
        raise RankLost(f"the ranks can't agree on shapes: {error}") from error
    shapes = [tuple(int(x) for x in each) for each in all_shapes]
    for rank, (_, k_of_a, k_of_b, _, _) in enumerate(shapes):
        if not k_of_a == k_of_b == a.shape[1]:
            raise ValueError(
                f"rank {rank} has K = {k_of_a} in a and {k_of_b} in b; this rank has {a.shape[1]}"
            )
    return Layout(
        distributed.get_rank(group),
        tuple(shape[0] for shape in shapes),
        tuple(shape[3] for shape in shapes),
        int(a.shape[1]),
        all(shape[4] for shape in shapes),
    )


def _global(group: Any, rank: int) -> int:
    from torch import distributed

    return rank if group is None else int(distributed.get_global_rank(group, rank))
