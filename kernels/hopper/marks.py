"""What a traced Step 9 notes: receives nothing, hands on the names and places of its marks. No compiler needed.

Marks are clock values in an array of int64 [tile of the cluster, rank in the cluster, k, MARKS].
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

CONSUMER = 6
MARKS = 24
FUNCTION = "trace_step9_128x256_2x1_fp16_fp16_nt"  # what traced.py compiles


class Mark(IntEnum):
    """Moments; those of consumer 1 stand CONSUMER further. Marks of a whole tile stand at k = 0."""

    LOAD_WAITS = 0  # the producer comes to mma2tma
    LOAD_MAY = 1  # it has passed
    LOAD_ASKED = 2  # both TMA loads are issued
    LOADED = 3  # tma2mma has flipped, as an idle warp sees it
    MMA_WAITS = 4  # a consumer comes to tma2mma
    MMA_MAY = 5
    MMA_ASKED = 6  # its wgmma group is committed
    MMA_DONE = 7  # the group before is complete; at k = 0: the last of the tile before is, long since
    LAST_DONE = 8  # the last group of the tile is complete
    WRITTEN = 9  # its part of the tile is handed to TMA
    STARTED = 16  # the warp that watches comes to the tile; for the first: the cluster is assembled
    ENDED = 17  # all loads of the tile have landed
    NANOSECONDS_AT_START = 18  # %globaltimer beside STARTED
    NANOSECONDS_AT_END = 19
    SM = 20  # which, as the device numbers them


def nothing(*_: Any) -> None:
    """The product's clock: notes nothing, so nothing of it is in the machine code."""


class Silent:
    """The same, for a whole kernel. See traced.py for the other."""

    mark = watch = staticmethod(nothing)


SILENT = Silent()


def mark(clock: Any, *where: Any) -> None:
    """Let `clock` note a moment. A function: a method called in a loop would make the clock part of its state."""
    clock.mark(*where)
