"""The .npy form (versions 1 to 3): receives a file's first bytes, hands on type, shape and order; and back.

Any byte order and Fortran order are taken in; what is written is version 1, little-endian, C order. bf16 has
no .npy type: numpy stores it as 2-byte void, which is read as bf16 only where the request says dtype=bf16.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.errors import ServiceError
from service.formats.base import Tensor, checked_shape, numpy_dtype

MAGIC = b"\x93NUMPY"

#: Longest header text that is read, as numpy's own reader bounds it.
MAX_HEADER = 10_000

_FLOATS = {"f2": "fp16", "f4": "fp32", "f8": "fp64"}
_DESCR = {name: descr for descr, name in _FLOATS.items()}
# One `'key': value` of the header: True or False, a string, a tuple of whole numbers, or a record type's "[".
_ITEM = re.compile(
    r"""\s*(?P<q>['"])(?P<key>\w{1,32})(?P=q)\s*:\s*
        (?: (?P<flag>True|False)
          | (?P<r>['"])(?P<text>[^'"\\]{0,64})(?P=r)
          | \((?P<dims>[0-9L,\s]*)\)
          | (?P<record>\[) )\s*(?(record)|(?:,|(?=\})))""",
    re.ASCII | re.VERBOSE,
)
_DIMS = re.compile(r"\s*(?:[0-9]{1,19}L?\s*(?:,\s*[0-9]{1,19}L?\s*)*,?\s*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Header:
    """What a .npy header says. `offset`: where the elements begin."""

    tensor: Tensor
    fortran: bool
    swapped: bool
    offset: int

    @property
    def plain(self) -> bool:
        """The elements can be used as they lie: little-endian, C order."""
        return not (self.swapped or (self.fortran and sum(dim > 1 for dim in self.tensor.shape) > 1))


def header_length(prefix: bytes | memoryview) -> int:
    """Bytes before the elements, from the first 12 bytes (fewer only where the whole file is shorter)."""
    start = bytes(prefix[:12])
    if start[:6] != MAGIC:
        raise _malformed("the magic bytes of .npy are missing")
    if len(start) < 12:
        raise _malformed("the header is cut short")
    major, minor = start[6], start[7]
    if major not in (1, 2, 3) or minor != 0:
        raise _malformed(f"version {major}.{minor} isn't known; 1.0, 2.0 and 3.0 are")
    length = (
        struct.unpack_from("<H", start, 8)[0] + 10
        if major == 1
        else struct.unpack_from("<I", start, 8)[0] + 12
    )
    if length > MAX_HEADER:
        raise ServiceError(
            "malformed",
            f".npy: a header of {length} bytes is above the limit",
            field="body",
            limit=MAX_HEADER,
        )
    return int(length)


def parse(prefix: bytes | memoryview, *, dtype: str | None = None, field: str = "body") -> Header:
    """The header in the first `header_length(prefix)` bytes. `dtype` is what the request says it holds."""
    offset = header_length(prefix)
    if len(prefix) < offset:
        raise _malformed("the header is cut short")
    begin = 10 if prefix[6] == 1 else 12
    text = bytes(prefix[begin:offset]).decode("utf-8" if prefix[6] == 3 else "latin-1", "replace")
    entries = _entries(text)
    if set(entries) != {"descr", "fortran_order", "shape"}:
        raise _malformed("the header must hold descr, fortran_order and shape")
    fortran, shape = entries["fortran_order"], entries["shape"]
    if not isinstance(fortran, bool) or not isinstance(shape, tuple):
        raise _malformed("fortran_order must be True or False and shape a tuple")
    name, swapped = _element_type(entries["descr"], dtype, field)
    return Header(Tensor(name, checked_shape(shape, field=field)), fortran, swapped, offset)


def convert(header: Header, source: memoryview, target: memoryview) -> None:
    """Copy the elements from `source` to `target`, there little-endian and row-major."""
    tensor = header.tensor
    dtype: np.dtype[Any] = numpy_dtype(tensor.dtype)
    # As unsigned integers: byte order can be swapped and no NaN is touched.
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    read = np.frombuffer(source, unsigned.newbyteorder(">") if header.swapped else unsigned)
    written = np.frombuffer(target, unsigned)
    order = "F" if header.fortran else "C"
    written.reshape(tensor.shape)[...] = read.reshape(tensor.shape, order=order)  # type: ignore[call-overload]


def emit(tensor: Tensor) -> bytes:
    """The header of a C-order file; the elements follow as they are. bf16 can't be written: 406."""
    descr = _DESCR.get(tensor.dtype)
    if descr is None:
        raise ServiceError(
            "not_acceptable", f".npy has no {tensor.dtype}; ask for safetensors or raw", field="accept"
        )
    text = f"{{'descr': '<{descr}', 'fortran_order': False, 'shape': {tensor.shape!r}, }}".encode()
    padding = -(len(MAGIC) + 4 + len(text) + 1) % 64
    text += b" " * padding + b"\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text


def _entries(text: str) -> dict[str, Any]:
    text = text.strip()
    if not (text.startswith("{") and text.endswith("}")):
        raise _malformed("the header isn't a dictionary")
    entries: dict[str, Any] = {}
    position = 1
    while text[position:].strip() != "}":
        match = _ITEM.match(text, position)
        if match is None:
            raise _malformed("the header can't be read")
        if match["key"] in entries:
            raise _malformed(f"the header holds {match['key']} twice")
        if match["record"]:
            raise ServiceError("invalid", ".npy: record types aren't taken", field="body")
        entries[match["key"]] = _value(match)
        position = match.end()
    return entries


def _value(match: re.Match[str]) -> bool | str | tuple[int, ...]:
    if match["flag"]:
        return match["flag"] == "True"
    if match["dims"] is None:
        return match["text"]
    if not _DIMS.fullmatch(match["dims"]):
        raise _malformed("the shape can't be read")
    return tuple(int(dim.strip(" \t\r\n\f\vL")) for dim in match["dims"].split(",") if dim.strip())


def _element_type(descr: Any, dtype: str | None, field: str) -> tuple[str, bool]:
    """API name of the elements, and whether their bytes are in the other order."""
    if not isinstance(descr, str) or len(descr) < 2:
        raise _malformed("descr must be a type's text")
    order, kind = (descr[0], descr[1:]) if descr[0] in "<>|=" else ("=", descr)
    if kind.startswith("O"):
        raise ServiceError("invalid", f"{field}: object arrays aren't taken", field=field)
    if kind == "V2":
        if dtype != "bf16":
            raise ServiceError(
                "invalid", f"{field}: 2-byte void needs dtype=bf16 to say what it is", field=field
            )
        return "bf16", order == ">"
    if kind not in _FLOATS:
        raise ServiceError("invalid", f"{field}: .npy type {descr!r} isn't fp16, fp32 or fp64", field=field)
    name = _FLOATS[kind]
    if dtype is not None and dtype != name:
        raise ServiceError(
            "invalid", f"{field}: dtype={dtype} was said, the file holds {name}", field="dtype"
        )
    return name, order == ">"


def _malformed(detail: str) -> ServiceError:
    return ServiceError("malformed", f".npy: {detail}", field="body")
