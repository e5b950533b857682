"""The safetensors form: receives a header's bytes, hands on its tensors with their places; and back.

Layout: 8 bytes little-endian length, a JSON object, the elements. As the format demands, the tensors must
tile the buffer: no overlap, no hole, nothing after the last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from service.errors import ServiceError
from service.formats import numbers
from service.formats.base import Tensor, checked_shape

#: Longest header: the format allows 100 MB, for files of many thousands of tensors; here there are four.
MAX_HEADER = 1 << 20

#: Bytes of the length in front of the header.
LENGTH = 8

_READ = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", "F64": "fp64"}
_WRITE = {ours: theirs for theirs, ours in _READ.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor; its elements are bytes [begin, end) after the header."""

    name: str
    tensor: Tensor
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors in the order of their bytes, and the file's metadata."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.entries[-1].end if self.entries else 0

    def entry(self, name: str) -> Entry | None:
        """The tensor called `name`."""
        return next((entry for entry in self.entries if entry.name == name), None)


def header_length(prefix: bytes | memoryview) -> int:
    """Length of the JSON object, from the first 8 bytes."""
    if len(prefix) < LENGTH:
        raise _malformed("the header's length is cut short")
    length = int(struct.unpack_from("<Q", prefix)[0])
    if length > MAX_HEADER:
        raise ServiceError(
            "malformed",
            f"safetensors: a header of {length} bytes is above the limit",
            field="body",
            limit=MAX_HEADER,
        )
    if length < 2:
        raise _malformed(f"a header of {length} bytes can't be a JSON object")
    return length


def parse(text: bytes | memoryview, *, names: Iterable[str] | None = None) -> Header:
    """The header from its JSON object (without the 8 bytes). With `names`, other tensors are refused."""
    document = _document(bytes(text))
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed("__metadata__ must map text to text")
    known = None if names is None else frozenset(names)
    entries = []
    for name, value in document.items():
        if known is not None and name not in known:
            raise ServiceError(
                "invalid",
                f"unknown tensor {name[:64]!r}; {', '.join(sorted(known))} are known",
                field=name[:64],
            )
        entries.append(_entry(name, value))
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_tiling(entries)
    return Header(tuple(entries), metadata)


def emit(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of a file whose elements follow in the mapping's order; padded to 8 bytes."""
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        document[name] = {
            "dtype": _WRITE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _document(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _malformed("the header must begin with {")
    try:
        document = json.loads(text.decode(), object_pairs_hook=_unique, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"the header isn't JSON: {numbers.why(error)}") from None
    assert isinstance(document, dict)
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _malformed("the header holds a name twice")
    return document


def _whole(digits: str) -> int:
    """A whole number; the format's are 64-bit."""
    if len(digits) > 20:
        raise _malformed("a number in the header has more than 20 digits")
    return int(digits)


def _entry(name: str, value: Any) -> Entry:
    field = name[:64]
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _malformed(f"tensor {field!r} must have dtype, shape and data_offsets", field)
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in _READ:
        raise ServiceError(
            "invalid", f"{field}: dtype {str(dtype)[:16]} isn't one of {', '.join(_READ)}", field=field
        )
    tensor = Tensor(_READ[dtype], checked_shape(value["shape"], field=field))
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(at) is not int for at in offsets):
        raise _malformed(f"data_offsets of {field!r} must be two whole numbers", field)
    begin, end = offsets
    # Python's integers don't overflow, so these comparisons are exact whatever was sent.
    if begin < 0 or end < begin or end - begin != tensor.nbytes:
        raise _malformed(
            f"data_offsets of {field!r} don't span the {tensor.nbytes} bytes of its shape", field
        )
    return Entry(name, tensor, begin, end)


def _check_tiling(entries: list[Entry]) -> None:
    at = 0
    for entry in entries:
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise _malformed(f"tensor {entry.name[:64]!r} {what}", entry.name[:64])
        at = entry.end


def _malformed(detail: str, field: str = "body") -> ServiceError:
    return ServiceError("malformed", f"safetensors: {detail}", field=field)
