"""What a request and its reply say beside bytes: receives operands, options and heads, hands on texts and values."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from service.client import tensors
from service.client.device import Bytes
from service.client.errors import GemmError
from service.client.tensors import Handle
from service.client.wire import Head

RAW = "application/octet-stream"
JSON = "application/json"
NAMES = ("a", "b", "c", "bias")
_OPTIONAL = ("c", "bias")
#: Fields for the shapes of what a body holds; a bias has the product's.
_SHAPES = {"a": "a_shape", "b": "b_shape", "c": "c_shape"}

#: Fields of a request in texts: what is derived from them is found again by them.
Query = tuple[tuple[str, str], ...]


@lru_cache(256)  # the same products are asked for again and again
def gemm_path(query: Query) -> str:
    """Path and query; of a field that is there twice the later one counts."""
    return f"/gemm?{urlencode(dict(query))}"


def operands(given: Iterable[Any], options: Mapping[str, Any]) -> tuple[Query, tuple[Bytes, ...]]:
    """Query fields and body of a raw request for a, b, c and bias."""
    handles: list[tuple[str, str]] = []
    sent: list[_Sent] = []
    body: list[Bytes] = []  # in this order
    for name, value in zip(NAMES, given, strict=True):
        if value is None and name in _OPTIONAL:
            continue
        if (handle := handle_of(value)) is not None:
            handles.append((name, f"handle:{handle}"))
            continue
        trans = ""
        if name in _OPTIONAL:
            one = tensors.tensor(tensors.adopt(value), name)
        else:
            one, turned = tensors.matrix(tensors.adopt(value), name)
            trans = _text(not options.get(f"trans_{name}")) if turned else ""
        sent.append((name, one.dtype, one.shape, trans))
        body.append(one.data)
    texts = [(name, _text(value)) for name, value in options.items() if value is not None]
    return _query(tuple(texts), tuple(handles), tuple(sent)), tuple(body)


#: An operand that is sent: its name, dtype and shape, and what is told of its transposition, "" for nothing.
_Sent = tuple[str, str, tuple[int, ...], str]


@lru_cache(256)  # the same products are asked for again and again
def _query(options: Query, handles: Query, sent: tuple[_Sent, ...]) -> Query:
    query = dict(options)
    query |= {f"trans_{name}": trans for name, _, _, trans in sent if trans}
    query |= handles
    dtypes = {name: dtype for name, dtype, _, _ in sent}
    query |= {f"{name}_dtype": dtype for name, dtype in dtypes.items() if name in _OPTIONAL}
    matrices = {name: dtype for name, dtype in dtypes.items() if name not in _OPTIONAL}
    if len(set(matrices.values())) > 1:
        raise TypeError(f"a is {dtypes['a']} and b is {dtypes['b']}; they must share a dtype")
    if matrices:
        query["dtype"] = next(iter(matrices.values()))
    query |= {_SHAPES[name]: shape_text(shape) for name, _, shape, _ in sent if name in _SHAPES}
    return tuple(query.items())


def handle_of(value: Any) -> str | None:
    """The name of an operand that the service keeps; None of another."""
    if isinstance(value, Handle):
        return value.name
    return value.removeprefix("handle:") if isinstance(value, str) else None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return str(value)


def dtype_and_shape(head: Head) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of D by a reply's head."""
    if "x-gemm-shape" not in head.headers:
        raise GemmError("the reply doesn't say its shape; is this a GEMM service?")
    return head.headers.get("x-gemm-dtype", ""), parse_shape(head.headers["x-gemm-shape"])


def server_timing(text: str) -> dict[str, float]:
    """Seconds by name, of a Server-Timing header (which has milliseconds)."""
    times = {}
    for entry in text.split(","):
        name, _, duration = entry.strip().partition(";dur=")
        if duration.replace(".", "", 1).isdigit():
            times[name] = float(duration) / 1e3
    return times


def kept(told: Mapping[str, Any]) -> Handle:
    """A Handle from what the service says of a kept tensor, in a list or in a reply to a product."""
    inner = told.get("out") if isinstance(told.get("out"), Mapping) else {}
    whole = {**told, **(inner or {})}
    shape = whole.get("shape")
    return Handle(
        str(whole.get("handle") or whole.get("name")),
        whole.get("etag"),
        whole.get("dtype"),
        None if shape is None else tuple(shape),
        whole.get("durable"),
        whole.get("expires"),
    )


def tensor_path(name: str, query: Mapping[str, Any] | None = None) -> str:
    """Path and query of a stored tensor."""
    path = f"/tensors/{quote(name, safe='')}"
    return f"{path}?{urlencode(query)}" if query else path


def mapped(path: Path) -> tuple[memoryview | bytes, str]:
    """A file's bytes, mapped, and their media type by its suffix."""
    media = {".npy": "application/x-npy", ".safetensors": "application/vnd.safetensors"}.get(path.suffix)
    if media is None:
        raise ValueError(f"{path.name} must end in .npy or .safetensors")
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b"", media
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), media


@lru_cache(256)
def shape_text(shape: tuple[int, ...]) -> str:
    """As 2x3."""
    return "x".join(map(str, shape))


@lru_cache(256)
def parse_shape(text: str) -> tuple[int, ...]:
    """From 2x3 or 2,3."""
    return tuple(int(extent) for extent in text.replace(",", "x").split("x") if extent.strip())
