"""What crosses between front and worker: frozen structs over the link; tensors stay in the arena.

Each struct is a tagged msgspec message. Offsets are bytes into the arena, which both sides map, or into a region
that a client on this machine lent.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: Region of an operand that only the device has which computed it; its place in the arena isn't written yet.
ON_DEVICE = -1


class Operand(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the arena: row-major, little-endian, `nbytes` written from `offset` on.

    `tensor` names stored content (name and ETag) that a device cache may keep; "" for what passes through once.
    D with a name may stay on the device (see ItemDone.kept). `region` is 0 for the arena, ON_DEVICE, else the
    number of a client's memory (see Map).
    """

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    tensor: str = ""
    region: int = 0


class Params(msgspec.Struct, frozen=True, array_like=True):
    """The request's arithmetic, as in the API: D = act(alpha · op(A) · op(B) + beta · C + bias)."""

    out_dtype: str
    trans_a: bool = False
    trans_b: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    bias_dim: str = "n"
    activation: str = "none"
    precision: str = "ieee"
    batch_invariant: bool = True
    variant: str = "auto"


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One request: where its operands lie and where D goes. `deadline` is CLOCK_MONOTONIC seconds, 0 for none."""

    id: int
    a: Operand
    b: Operand
    out: Operand
    params: Params
    c: Operand | None = None
    bias: Operand | None = None
    deadline: float = 0.0


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Work for the worker. `stacked`: all items share B and parameters and differ in rows of A only.

    `reference_only`: it died with a worker once, so it runs on the reference.
    """

    id: int
    items: tuple[Item, ...]
    stacked: bool = False
    reference_only: bool = False


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by Pong from the thread that reads the worker's link; tells a live process from a stopped one."""

    number: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question: `what` is "variants", "choose", "predict", "trace", or of memory; args are plain data."""

    id: int
    what: str
    args: dict[str, Any] = {}


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Stored content that a device cache may drop: it was deleted or replaced."""

    tensors: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Write a tensor that only the device has to its place in the arena. Answered by Answer with this id."""

    id: int
    operand: Operand


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """These are in the arena now: a device cache may drop them. No later batch says that only the device has them."""

    tensors: tuple[str, ...]


class Map(msgspec.Struct, frozen=True, tag="map"):
    """A client's memory that operands will name by number: `nbytes` of a sealed memfd, or of device memory.

    The memfd's descriptor is the next one on the socket beside the link. Device memory is named by a CUDA IPC
    handle instead, 64 bytes.
    """

    region: int
    nbytes: int
    handle: bytes = b""


class Unmap(msgspec.Struct, frozen=True, tag="unmap"):
    """No operand names this region any more."""

    region: int


class Hung(msgspec.Struct, frozen=True, tag="hung"):
    """The batch that runs outlasted its limit: note what is to blame for it, and end. Whoever doesn't is killed."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what was sent, then leave with exit status 0."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Why the worker leaves before it was ready."""

    why: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, after a verified GEMM on the reference. `device` holds the fields of kernels.device.Device."""

    pid: int
    device: dict[str, Any]
    versions: dict[str, str]
    stacking: bool


class ItemDone(msgspec.Struct, frozen=True, array_like=True):
    """How one item ended. `code` is "" where D was computed, else a code of service.errors with its detail.

    `kept`: D stays in the device's memory, under its tensor's name, until it is fetched and settled, or forgotten. A
    rank of a sharded product keeps its rows so, which the arena has too.
    """

    id: int
    code: str = ""
    detail: str = ""
    variant: str = ""
    reason: str = ""
    why: str = ""
    kept: bool = False


class BatchDone(msgspec.Struct, frozen=True, tag="batch_done"):
    """A batch ended. Seconds by stage word: copy_in, kernel, copy_out. `flops` were executed by `variant`s.

    `host`: further seconds of the worker, from the batch's arrival to this: taking it apart, launching, and what is
    before it in the lanes.

    `shards`: bytes of operands of a sharded product by how its ranks had them: copied (to a rank), exchanged
    (between ranks), kept (from a product before).
    """

    id: int
    items: tuple[ItemDone, ...]
    seconds: dict[str, float]
    flops: dict[str, float]
    busy: dict[str, float]
    host: float = 0.0
    shards: dict[str, int] = {}


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to a Ping."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to an Ask: plain data, or a code of service.errors with its detail."""

    id: int
    value: Any = None
    code: str = ""
    detail: str = ""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """What the worker tells unasked, for metrics: the device's memory by state (cached, only, reserved; a rank's
    shards), variants that are quarantined and why, and what was read of the device.
    """

    device_bytes: dict[str, int] = {}
    quarantined: dict[str, str] = {}
    tensor_active: float | None = None
    tensor_source: str = ""
    tensor_detail: str = ""
    sm_clock_mhz: float | None = None


ToWorker = Batch | Ping | Ask | Forget | Fetch | Settled | Map | Unmap | Hung | Drain
ToFront = Ready | Failed | BatchDone | Pong | Answer | Report
