"""Products that a device alone has: receives what workers kept, hands on where each is, and brings it to the arena.

D that POST /gemm keeps by handle stays where it was computed, so that the reply need not wait for a copy. Its slot in
the arena is there but holds nothing until D is brought: on a read, to be written to disk, for a product on
another device, or at the end. What was replaced or deleted before that is never copied.

All state belongs to the front's loop. A copy that went down with its worker is lost, and whoever asks is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from service.errors import ServiceError
from service.messages import ON_DEVICE, Item, Operand


class Owner(Protocol):
    """Whose tensors they are: the store."""

    def hold_copy(self, tensor: str) -> Callable[[], None] | None:
        """Keep the tensor's slot; call what is returned to let go. None where the store doesn't have it (yet)."""
        ...

    def lose_copy(self, tensor: str) -> None:
        """The only copy is gone."""
        ...


class Nobody:
    """An owner of nothing."""

    def hold_copy(self, tensor: str) -> Callable[[], None] | None:
        """None."""
        return None

    def lose_copy(self, tensor: str) -> None:
        """Nothing."""


@dataclass(slots=True)
class _Copy:
    """The only copy: its place in the arena, not written yet, and the worker whose device has it."""

    operand: Operand
    worker: int
    bringing: asyncio.Task[None] | None = None


class Kept:
    """Which worker's device has the only copy of a stored tensor.

    `fetch(worker, operand)` has a worker write the tensor to its place in the arena; ServiceError where it can't.
    """

    def __init__(self, fetch: Callable[[int, Operand], Awaitable[None]] | None = None) -> None:
        self.owner: Owner = Nobody()
        self._fetch = fetch
        self._copies: dict[str, _Copy] = {}
        # Until the store forgets them, so that whoever pinned one is told rather than given what the slot holds.
        self._lost: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes that are on devices alone."""
        return sum(copy.operand.nbytes for copy in self._copies.values())

    # -- where it is ------------------------------------------------------------------------------------------

    def note(self, worker: int, operand: Operand) -> None:
        """A worker kept D on its device."""
        self._copies[operand.tensor] = _Copy(operand, worker)

    def away(self, tensor: str) -> bool:
        """Whether only a device has it."""
        return tensor in self._copies

    def lost(self, tensor: str) -> bool:
        """Whether it went down with its worker."""
        return tensor in self._lost

    def homes(self, operands: Iterable[Operand]) -> set[int]:
        """Workers without which these can't be read now."""
        if not self._copies:
            return set()
        found = (self._copies.get(operand.tensor) for operand in operands if operand.tensor)
        return {copy.worker for copy in found if copy is not None}

    def refusal(self, operands: Iterable[Operand]) -> ServiceError | None:
        """Why they can't be used: one of them was lost."""
        if not self._lost:
            return None
        return next((_lost(x.tensor) for x in operands if x.tensor in self._lost), None)

    def placed(self, item: Item) -> Item:
        """The item, its operands that only a device has marked so."""
        if not self._copies:
            return item
        marked = {
            name: msgspec.structs.replace(operand, region=ON_DEVICE)
            for name in ("a", "b", "c", "bias")
            if (operand := getattr(item, name)) is not None and operand.tensor in self._copies
        }
        return msgspec.structs.replace(item, **marked) if marked else item

    # -- to the arena -----------------------------------------------------------------------------------------

    async def bring(self, tensor: str) -> None:
        """Have the tensor in the arena; at once where it is. ServiceError lost."""
        if tensor in self._lost:
            raise _lost(tensor)
        copy = self._copies.get(tensor)
        if copy is None:
            return
        if copy.bringing is None:
            # Whoever waits may leave; the slot is kept until the device has written to it.
            let_go = self.owner.hold_copy(tensor)
            if let_go is None:
                raise _lost(tensor)
            copy.bringing = asyncio.ensure_future(self._bring(tensor, copy, let_go))
            copy.bringing.add_done_callback(_heard)
        await asyncio.shield(copy.bringing)

    async def gather(self, operands: Iterable[Operand]) -> None:
        """Leave at most one worker without which these can't be read: that with the most bytes of them."""
        away = {x.tensor: self._copies[x.tensor] for x in operands if x.tensor in self._copies}
        nbytes: dict[int, int] = {}
        for copy in away.values():
            nbytes[copy.worker] = nbytes.get(copy.worker, 0) + copy.operand.nbytes
        if len(nbytes) > 1:
            home = max(nbytes, key=lambda worker: nbytes[worker])
            await asyncio.gather(
                *(self.bring(tensor) for tensor, copy in away.items() if copy.worker != home)
            )

    async def bring_all(self, seconds: float) -> None:
        """Bring what the store wants, within `seconds`: the workers are about to end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        with contextlib.suppress(TimeoutError):
            while self._copies:
                async with asyncio.timeout_at(end):
                    await asyncio.gather(*map(self.bring, self._copies), return_exceptions=True)
                    # D of a request that is being answered now is soon the store's, or forgotten.
                    await asyncio.sleep(0.005)

    async def _bring(self, tensor: str, copy: _Copy, let_go: Callable[[], None]) -> None:
        try:
            assert self._fetch is not None
            await self._fetch(copy.worker, copy.operand)
            self._copies.pop(tensor, None)
        except ServiceError:
            self._lose(tensor)
            raise _lost(tensor) from None
        finally:
            let_go()

    # -- ends -------------------------------------------------------------------------------------------------

    def forget(self, tensors: Iterable[str]) -> None:
        """The store needs them no more."""
        for tensor in tensors:
            self._copies.pop(tensor, None)
            self._lost.discard(tensor)

    def ended(self, worker: int) -> None:
        """A worker ended, and its device's memory with it."""
        for tensor in [tensor for tensor, copy in self._copies.items() if copy.worker == worker]:
            self._lose(tensor)

    def _lose(self, tensor: str) -> None:
        if self._copies.pop(tensor, None) is not None:
            self._lost.add(tensor)
            self.owner.lose_copy(tensor)


def _lost(tensor: str) -> ServiceError:
    name = tensor.partition("/")[2].rpartition("@")[0]
    return ServiceError("lost", f"the tensor {name!r} was lost with the worker that computed it")


def _heard(task: asyncio.Task[None]) -> None:
    """Whoever still waits is told; if nobody does, the failure is not news."""
    if not task.cancelled():
        task.exception()
