"""Memory that clients on this machine lend: receives descriptors, hands on regions that operands may name.

A region lives while its session or any work refers to it. Its descriptor goes to each worker that needs it, once;
when the last reference is dropped the descriptor is closed and the workers are told.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
from collections import defaultdict
from collections.abc import Callable

from service.errors import ServiceError

#: Without these a client could cut its memory short under a reader, which raises SIGBUS there.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Against these the service couldn't write D.
_UNWRITABLE = fcntl.F_SEAL_WRITE | 0x0010  # F_SEAL_FUTURE_WRITE, which Python doesn't name
_TMPFS_MAGIC = 0x01021994
_STATFS_BYTES = 256  # struct statfs is 120 bytes on 64-bit Linux; f_type comes first

_libc = ctypes.CDLL(None, use_errno=True)


class Region:
    """A client's memory: `nbytes` of the memfd `descriptor`, or device memory by its IPC `handle`."""

    def __init__(
        self, number: int, nbytes: int, owner: str, drop: Callable[[Region], None], *, descriptor: int = -1
    ) -> None:
        self.number = number
        self.nbytes = nbytes
        self.owner = owner
        self.descriptor = descriptor
        self.handle = b""
        self._drop = drop
        self._refs = 1

    @property
    def uses(self) -> int:
        """References to it."""
        return self._refs

    def hold(self) -> Region:
        """One more reference."""
        assert self._refs > 0, "region was dropped"
        self._refs += 1
        return self

    def release(self) -> None:
        """Drop a reference."""
        assert self._refs > 0, "region was dropped"
        self._refs -= 1
        if self._refs == 0:
            self._drop(self)


class Regions:
    """All regions of one front. `most` bounds their number, `share` the bytes of one owner's."""

    def __init__(self, *, most: int, share: int) -> None:
        self.most = most
        self.share = share
        #: Called with the number of a region that is gone.
        self.on_gone: Callable[[int], None] = lambda number: None
        self._regions: dict[int, Region] = {}
        self._numbers = 0
        self._by_owner: defaultdict[str, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, number: int) -> Region:
        return self._regions[number]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(region.nbytes for region in self._regions.values())

    def add(self, descriptor: int, owner: str) -> Region:
        """A region over a sealed memfd. Takes the descriptor over, also where it is refused (ServiceError)."""
        try:
            nbytes = sealed_bytes(descriptor)
            return self._add(nbytes, owner, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def add_device(self, handle: bytes, nbytes: int, owner: str) -> Region:
        """A region over device memory; only a worker can tell whether the handle is right."""
        region = self._add(nbytes, owner, -1)
        region.handle = handle
        return region

    def _add(self, nbytes: int, owner: str, descriptor: int) -> Region:
        if len(self._regions) >= self.most:
            raise ServiceError(
                "no_room", "clients lend as much memory, in pieces, as they may", limit=self.most
            )
        if nbytes > self.share:
            detail = f"{nbytes} bytes are above what one key may lend of its memory at once"
            raise ServiceError("too_large", detail, field="region", limit=self.share)
        if self._by_owner[owner] + nbytes > self.share:
            raise ServiceError(
                "no_room", "this owner lends as many bytes of its memory as it may", limit=self.share
            )
        self._numbers += 1
        region = Region(self._numbers, nbytes, owner, self._gone, descriptor=descriptor)
        self._regions[region.number] = region
        self._by_owner[owner] += nbytes
        return region

    def _gone(self, region: Region) -> None:
        del self._regions[region.number]
        self._by_owner[region.owner] -= region.nbytes
        if not self._by_owner[region.owner]:
            del self._by_owner[region.owner]
        if region.descriptor >= 0:
            os.close(region.descriptor)
        self.on_gone(region.number)


def sealed_bytes(descriptor: int) -> int:
    """The size of a memfd that can't shrink; ServiceError invalid for any other descriptor."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise _refused("isn't a memfd") from None
    if seals & SEALS != SEALS:
        raise _refused("must be sealed against shrinking and growing")
    if seals & _UNWRITABLE:
        raise _refused("is sealed against writing")
    status = os.fstat(descriptor)
    # Huge pages can run out under a reader, which raises SIGBUS as well.
    if not stat.S_ISREG(status.st_mode) or _filesystem(descriptor) != _TMPFS_MAGIC:
        raise _refused("must lie in ordinary shared memory")
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise _refused("must be open for reading and writing")
    if status.st_size <= 0:
        raise _refused("is empty")
    return status.st_size


def _filesystem(descriptor: int) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, buffer):
        raise OSError(ctypes.get_errno(), "fstatfs")
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little")


def _refused(detail: str) -> ServiceError:
    return ServiceError("invalid", f"region: the memory {detail}", field="region")
