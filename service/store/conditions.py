"""Conditions on a change: receives sets of hashes, hands on whether a tensor meets them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from service.errors import ServiceError

#: Stands for any tensor.
ANY = "*"


@dataclass(frozen=True, slots=True)
class Conditions:
    """If-Match and If-None-Match as sets of hashes, {"*"} for any tensor; None where not given."""

    if_match: Collection[str] | None = None
    if_none_match: Collection[str] | None = None

    def check(self, etag: str | None) -> None:
        """ServiceError precondition_failed unless a tensor with `etag` (None: no tensor) meets them."""
        if self.if_match is not None and not _matches(self.if_match, etag):
            what = (
                "there is no tensor, and If-Match names one"
                if etag is None
                else "the tensor isn't one that If-Match names"
            )
            raise ServiceError("precondition_failed", what, field="If-Match")
        if self.if_none_match is not None and _matches(self.if_none_match, etag):
            some = "there is a tensor of this name already, and If-None-Match excludes any"
            what = some if ANY in self.if_none_match else "the tensor is one that If-None-Match excludes"
            raise ServiceError("precondition_failed", what, field="If-None-Match")


def _matches(tags: Collection[str], etag: str | None) -> bool:
    return etag is not None and (ANY in tags or etag in tags)


UNCONDITIONAL = Conditions()
