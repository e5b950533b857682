"""Stored tensors lent to processes on this machine: receives device tensors, hands on CUDA IPC handles.

A handle opens a whole allocation, for writing too, and torch's allocations hold many tensors. So each loan is a copy
in an allocation of its own (a device copies terabytes a second): who has it sees nothing else, and harms only itself.
"""

from __future__ import annotations

import itertools
from typing import Any

from service import ipc


class Loans:
    """Loans of one GPU by number, `budget` bytes in all. For one thread."""

    def __init__(self, torch: Any, place: Any, stream: Any, budget: int) -> None:
        self._torch = torch
        self._place = place
        self._stream = stream
        self.budget = budget
        self.nbytes = 0
        self._numbers = itertools.count(1)
        self._lent: dict[int, tuple[int, int]] = {}

    def lend(self, source: Any) -> dict[str, Any] | None:
        """Number, handle and size of a new loan with the bytes of `source`; None where there is no room."""
        torch = self._torch
        nbytes = int(source.nbytes)
        if not nbytes or self.nbytes + nbytes > self.budget:
            return None
        with torch.cuda.device(self._place):
            try:
                pointer = ipc.allocate(nbytes)
            except ipc.IpcError:
                return None
            try:
                target = torch.as_tensor(ipc.Pointer(pointer, nbytes), device=self._place)
                with torch.cuda.stream(self._stream):
                    target.copy_(source.reshape(-1).view(torch.uint8), non_blocking=True)
                self._stream.synchronize()
                handle = ipc.export(pointer).handle
            except BaseException:
                ipc.free(pointer)
                raise
        number = next(self._numbers)
        self._lent[number] = pointer, nbytes
        self.nbytes += nbytes
        return {"loan": number, "handle": handle, "nbytes": nbytes}

    def end(self, number: int) -> None:
        """Free a loan; again is no harm."""
        pointer, nbytes = self._lent.pop(number, (0, 0))
        if pointer:
            self.nbytes -= nbytes
            with self._torch.cuda.device(self._place):
                ipc.free(pointer)
