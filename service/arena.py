"""Shared memory of front and worker: receives sizes, hands on slots of one sealed memfd that both map.

No name under /dev/shm: nothing to leak after kill -9. Only the front allocates; the worker reads and writes at
the offsets it is told. Pages are taken from the lowest free address, so a quiet service touches few of them.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from service.errors import ServiceError

PAGE = 4096
_MADV_POPULATE_WRITE = 23  # of Linux 5.14
_PIECE = 32 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """One mapping of `size` bytes of the memfd `fd`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size: int) -> Arena:
        """Make and seal the memfd; `size` bytes, rounded up to pages."""
        size = -(-size // PAGE) * PAGE
        fd = os.memfd_create("gemm-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, size)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes)."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside the arena of {self.size}")
        return self.memory[offset : offset + nbytes]

    def populate(self) -> threading.Thread:
        """Begin to take all pages on a thread, so that locking them later finds them there; join it before."""

        def take() -> None:
            libc = ctypes.CDLL(None)
            begin = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            # In pieces: who maps something meanwhile waits for a piece. An old kernel refuses, and locking does it.
            for at in range(0, self.size, _PIECE):
                nbytes = min(_PIECE, self.size - at)
                libc.madvise(ctypes.c_void_p(begin + at), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)

        thread = threading.Thread(target=take, name="populate", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Unmap and close; views that are still held keep the mapping alive."""
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


class Slot:
    """A piece of the arena, `capacity` bytes at `offset`, counted references; freed when the last is dropped."""

    __slots__ = ("_refs", "capacity", "offset", "owner", "slots", "state")

    def __init__(self, slots: Slots, offset: int, capacity: int, owner: str, state: str) -> None:
        self.slots = slots
        self.offset = offset
        self.capacity = capacity
        self.owner = owner
        self.state = state
        self._refs = 1

    def view(self, nbytes: int | None = None) -> memoryview:
        """The slot's bytes, or its first `nbytes`."""
        n = self.capacity if nbytes is None else nbytes
        if n > self.capacity:
            raise ValueError(f"{n} bytes asked of a slot of {self.capacity}")
        return self.slots.arena.view(self.offset, n)

    def hold(self) -> Slot:
        """One more reference."""
        assert self._refs > 0, "slot was freed"
        self._refs += 1
        return self

    def release(self) -> None:
        """Drop a reference."""
        assert self._refs > 0, "slot was freed"
        self._refs -= 1
        if self._refs == 0:
            self.slots._free(self)

    def become(self, state: str) -> None:
        """Move the slot's bytes to another state of `gemm_arena_bytes{state}`."""
        self.slots._move(self, state)


#: What of a request is at fault where a slot can't be had, by the slot's state.
_FIELDS = {"request": "body", "reply": "out"}

#: What goes into one slot: bytes by the field of a request that they are of.
Sizes = Mapping[str, int]


def check_fits(own: Sequence[Sizes], stored: Sequence[Sizes], *, share: int, size: int) -> int:
    """Bytes of a request's `own` slots; ServiceError too_large where they can never be had at once.

    They are bounded by the `share` of one owner, and together with the `stored` tensors that it reads by the
    arena's `size`. The largest part is the field at fault.
    """
    needed = _total(own)
    for slots, total, limit in ((own, needed, share), ([*own, *stored], needed + _total(stored), size)):
        if total > limit:
            parts = [part for slot in slots for part in slot.items()]
            told = ", ".join(f"{field} {nbytes}" for field, nbytes in parts)
            detail = f"{told}: these bytes together are above what may be held at once"
            raise ServiceError(
                "too_large", detail, field=max(parts, key=lambda part: part[1])[0], limit=limit
            )
    return needed


def _total(slots: Iterable[Sizes]) -> int:
    return sum([_capacity(sum(parts.values())) for parts in slots])


def _capacity(nbytes: int) -> int:
    return max(-(-nbytes // PAGE) * PAGE, PAGE)


class Slots:
    """Allocator over an arena, for one thread (the front's loop): lowest address first, neighbours merged.

    `share` bounds the bytes that one owner (API key) may hold at once.
    """

    STATES = ("request", "reply", "tensor")

    def __init__(self, arena: Arena, *, share: int | None = None) -> None:
        self.arena = arena
        self.share = share or arena.size
        self._starts: list[int] = [0]
        self._sizes: dict[int, int] = {0: arena.size}
        self.bytes_by_state: dict[str, int] = dict.fromkeys(self.STATES, 0)
        self._by_owner: defaultdict[str, int] = defaultdict(int)

    @property
    def free(self) -> int:
        """Bytes not allocated (they need not be contiguous)."""
        return self.arena.size - sum(self.bytes_by_state.values())

    def check(self, owner: str, own: Sequence[Sizes], stored: Sequence[Sizes] = ()) -> None:
        """Whether a request of `owner` can have its `own` slots at once, while it reads `stored` tensors.

        To be asked before the first is allocated. Raises ServiceError too_large where it never can, no_room where
        other requests of the owner hold too much of its share now.
        """
        share = self.share if owner else self.arena.size
        needed = check_fits(own, stored, share=share, size=self.arena.size)
        if owner:
            self._check_share(owner, needed)

    def _check_share(self, owner: str, need: int) -> None:
        held = self._by_owner.get(owner, 0)
        if held + need > self.share:
            raise ServiceError(
                "no_room",
                f"requests of this owner hold {held} bytes of its share now, {need} more are above it",
                limit=self.share,
                retry_after=1.0,
            )

    def allocate(self, nbytes: int, *, owner: str = "", state: str = "request") -> Slot:
        """A slot of at least `nbytes` (zero takes one page).

        Raises ServiceError no_room where no free piece is large enough or the owner's share is used up, too_large
        where it never will be.
        """
        need = _capacity(nbytes)
        largest = self.share if owner and state != "tensor" else self.arena.size
        if need > largest:
            detail = f"{nbytes} bytes are above what may be held at once"
            raise ServiceError("too_large", detail, field=_FIELDS.get(state), limit=largest)
        if owner and state != "tensor":
            self._check_share(owner, need)
        for index, start in enumerate(self._starts):
            size = self._sizes[start]
            if size >= need:
                del self._sizes[start]
                if size == need:
                    del self._starts[index]
                else:
                    self._starts[index] = start + need
                    self._sizes[start + need] = size - need
                self.bytes_by_state[state] += need
                if state != "tensor":
                    self._by_owner[owner] += need
                return Slot(self, start, need, owner, state)
        raise ServiceError(
            "no_room",
            f"the arena has no free piece of {need} bytes now",
            limit=self.arena.size,
            retry_after=1.0,
        )

    def _free(self, slot: Slot) -> None:
        self.bytes_by_state[slot.state] -= slot.capacity
        self._disown(slot)
        start, size = slot.offset, slot.capacity
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(self._starts[index])
            del self._starts[index]
        if index > 0 and self._starts[index - 1] + self._sizes[self._starts[index - 1]] == start:
            self._sizes[self._starts[index - 1]] += size
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size

    def _disown(self, slot: Slot) -> None:
        if slot.state != "tensor":
            self._by_owner[slot.owner] -= slot.capacity
            if not self._by_owner[slot.owner]:
                del self._by_owner[slot.owner]

    def _move(self, slot: Slot, state: str) -> None:
        self._disown(slot)
        self.bytes_by_state[slot.state] -= slot.capacity
        slot.state = state
        self.bytes_by_state[state] += slot.capacity
        if state != "tensor":
            self._by_owner[slot.owner] += slot.capacity
