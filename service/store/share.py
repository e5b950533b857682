"""An owner's share of the disk: receives what the owner keeps, admits a tensor or says why not.

A tensor that takes another's place counts by what it adds: of a name's versions (what it means, and those on their
way to it) one stays, so the largest of them counts, once. A version that a job keeps stays besides, and so counts
with everything else. Others that are read at the moment go with their last reader; until then they count too, once
they lost their name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Stock:
    """What an owner keeps: `used` bytes in all; of names with tensors on their way, bytes of the versions by id."""

    used: int
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def staying(self) -> int:
        """Bytes that stay when all that is on its way has arrived, at most."""
        sizes = [list(versions.values()) for versions in self.versions.values()]
        return self.used - sum(sum(several) - max(several, default=0) for several in sizes)

    def admit(self, nbytes: int, share: int, *, name: str = "", size: int | None = None) -> int:
        """Take a tensor of `nbytes`, `size` on disk, under a name; the bytes that may stay from here on.

        ServiceError quota, or too_large where it never will be taken.
        """
        if nbytes > share:
            detail = f"{nbytes} bytes are above what this key's owner may keep"
            raise ServiceError("too_large", detail, field="body", limit=share)
        replaced = self.versions.get(name)
        taken = size or nbytes
        more = max(0, taken - max(replaced.values())) if replaced else nbytes
        if more and self.staying + more > share:
            raise self._full(share)
        return max(share, self.staying + (more if replaced else taken))

    def check(self, bound: int) -> None:
        """ServiceError quota where more would stay than was admitted."""
        if self.staying > bound:
            raise self._full(bound)

    def _full(self, share: int) -> ServiceError:
        detail = f"this key's owner keeps {self.used} bytes of tensors and results"
        return ServiceError("quota", detail, field="body", limit=share)
