"""Conditional requests and ranges: receives header text, hands on ETags to compare and bytes to send.

Pure. A tensor's ETag is its content's hash; a representation in another form has a suffix, since its bytes
differ: "hash" raw, "hash.npy", "hash.safetensors", "hash.json".
"""

from __future__ import annotations

import re
from collections.abc import Collection

from service.decode import Form
from service.errors import ServiceError
from service.store import ANY, Conditions

_TAG = re.compile(r'(W/)?"([\x21\x23-\x7e\x80-\xff]*)"')
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def etag(content: str, form: Form = "raw") -> str:
    """The header's value."""
    return f'"{content}"' if form == "raw" else f'"{content}.{form}"'


def conditions(if_match: str | None, if_none_match: str | None) -> Conditions:
    """What a change of a tensor depends on: contents, whatever form their ETags name."""
    return Conditions(
        None if if_match is None else _contents(if_match, weak=False),
        None if if_none_match is None else _contents(if_none_match, weak=True),
    )


def unchanged(if_none_match: str | None, content: str, form: Form) -> bool:
    """Whether the client has this representation, or says that it has this content."""
    if if_none_match is None:
        return False
    tags = _tags(if_none_match, weak=True)
    return ANY in tags or content in tags or f"{content}.{form}" in tags


def range_of(text: str | None, if_range: str | None, tag: str, length: int) -> tuple[int, int] | None:
    """Bytes [start, end) of a representation that a Range asks for; None for all of it.

    A form of Range that isn't known, several ranges, or an If-Range that doesn't match: all of it, as HTTP
    allows. ServiceError range_not_satisfiable where it lies outside.
    """
    match = _RANGE.fullmatch((text or "").strip())
    if match is None or (if_range is not None and if_range.strip() != tag):
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:
        start, end = max(0, length - int(last)), length
    else:
        start, end = int(first), min(int(last) + 1, length) if last else length
        if last and int(last) < start:
            return None
    if start >= length or start >= end:
        raise ServiceError(
            "range_not_satisfiable",
            f"the representation has {length} bytes",
            field="Range",
            headers={"Content-Range": f"bytes */{length}"},
        )
    return start, end


def _tags(text: str, *, weak: bool) -> set[str]:
    """Opaque tags of a header, "*" for any; weak ones only where they may match."""
    if text.strip() == ANY:
        return {ANY}
    return {match[2] for match in _TAG.finditer(text) if weak or not match[1]}


def _contents(text: str, *, weak: bool) -> Collection[str]:
    return {tag.partition(".")[0] for tag in _tags(text, weak=weak)}
