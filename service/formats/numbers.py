"""Tensors inside JSON: receives nested lists or base64 text, hands on arrays; and arrays as JSON text.

NaN and infinities come bare (as Python and JavaScript libraries write them) or as the strings "NaN",
"Infinity", "-Infinity", and leave as strings, which every JSON parser reads.
"""

from __future__ import annotations

import binascii
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import ServiceError
from service.formats import elsewhere, pieces
from service.formats.base import MAX_DIMS, Tensor, checked, checked_shape, numpy_dtype

T = TypeVar("T")

SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

#: What JSON calls values that aren't numbers.
_KINDS = {bool: "true or false", str: "a string", NoneType: "null", dict: "an object", list: "a list"}

#: Elements that one piece of emitted JSON holds: bounds memory and the time the event loop is held.
PIECE = 16384

#: Elements that are looked at or converted at once.
RUN = 1 << 16
#: Bytes of JSON beyond which it is read in pieces.
LARGE = 1 << 20

_decoder = msgspec.json.Decoder()

#: An escape that may be half of a pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


#: Where a key ends, or a string begins with a colon.
_KEY_END = re.compile(rb'"[ \t\r\n]*:')


def loads(text: bytes | bytearray | memoryview) -> Any:
    """A JSON document, bare NaN, Infinity and numbers beyond fp64 included; a key given twice is refused.

    A large one is read in pieces: in a thread, it lets others have their turn.
    """
    if len(text) > LARGE:
        try:
            return pieces.Pieces(memoryview(text), unique, _numbers_slowly).document()
        except pieces.Whole:
            return elsewhere.document(memoryview(text))
    return whole(text)


def whole(text: bytes | bytearray | memoryview) -> Any:
    """`loads`, all at once."""
    try:
        document = _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        # The strict parser knows neither bare NaN nor 1e999.
        return _loads_slowly(text)
    # It keeps the last of two equal keys. A text with more ends of keys than the document has keys may hold such.
    surplus = itertools.islice(_KEY_END.finditer(text), _keys(document), None)
    return document if next(surplus, None) is None else _loads_slowly(text)


def _keys(document: Any) -> int:
    """Keys of objects in objects and in lists of objects; where others stand, the text just seems to have more."""
    count, rest = 0, [document]
    while rest:
        value = rest.pop()
        if type(value) is dict:
            count += len(value)
            rest += value.values()
        elif type(value) is list and value and type(value[0]) is dict:
            rest += value
    return count


def unique(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Fields by name; ServiceError invalid where one is given twice."""
    document: dict[str, T] = {}
    for name, value in pairs:
        if name in document:
            raise ServiceError("invalid", f"{name[:64]}: is given twice", field=name[:64])
        document[name] = value
    return document


def _loads_slowly(text: bytes | bytearray | memoryview) -> Any:
    """By the standard parser, at a third of the speed: it sees every key."""
    try:
        whole = bytes(text)
        document = json.loads(whole.decode("utf-8-sig"), parse_int=_whole, object_pairs_hook=unique)
        if _SURROGATE.search(whole):  # a half of a pair alone is no text: no reply or log could carry it
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except (ValueError, RecursionError) as error:
        raise ServiceError("malformed", f"the body isn't JSON: {why(error)}", field="body") from None


def _numbers_slowly(piece: bytes) -> Any:
    """Numbers by the standard parser. ValueError where there is anything else."""
    if b"\\" in piece:
        raise ValueError
    return json.loads(piece, parse_int=_whole)


def why(error: Exception) -> str:
    """What keeps a text from being JSON."""
    if isinstance(error, UnicodeError):
        return "its text isn't UTF-8, or holds half a surrogate pair"
    return str(error) if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"


def array(value: Any, dtype: str, *, field: str) -> NDArray[Any]:
    """Nested lists of numbers as an array of `dtype`; ragged or foreign elements are refused by place."""
    shape = shape_of(value, field=field)
    flat: Iterable[Any] = value
    for _ in range(len(shape) - 1):
        flat = itertools.chain.from_iterable(flat)
    out = np.empty(math.prod(shape), numpy_dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        for start, some in _runs(flat):
            out[start : start + len(some)] = _wide(some, start, shape, field)
    return out.reshape(shape)


def taken(value: list[Any], dtype: str, *, field: str) -> NDArray[Any]:
    """As `array`; of many, the lists are empty then: their elements went a run at a time, not all at once."""
    made = array(value, dtype, field=field)
    if made.size > RUN:
        pieces.let_go(value)
    return made


def _wide(flat: list[Any], start: int, shape: Sequence[int], field: str) -> NDArray[Any]:
    """Elements, of which the first is the array's `start`th, as fp64."""
    kinds = set(map(type, flat))
    if not kinds <= {int, float}:
        _check_elements(flat, start, shape, field)
        flat = [SPECIAL[x] if type(x) is str else saturated(x) for x in flat]
    try:
        return np.array(flat, dtype=np.float64)
    except OverflowError:
        return np.array([saturated(x) for x in flat], dtype=np.float64)


def _runs(values: Iterable[T]) -> Iterator[tuple[int, list[T]]]:
    """Values in runs, each with its place: what is done with one at once holds other threads up."""
    rest, start = iter(values), 0
    while some := list(itertools.islice(rest, RUN)):
        yield start, some
        start += len(some)


def shape_of(value: Any, *, field: str) -> tuple[int, ...]:
    """Shape of nested lists, every level checked."""
    shape: list[int] = []
    level: list[Any] = [value]
    while True:
        if not all(type(x) is list for x in level):
            raise ServiceError(
                "invalid", f"{field}: ragged: a list and a number stand side by side", field=field
            )
        lengths = {length for _, some in _runs(level) for length in set(map(len, some))}
        if len(lengths) > 1:
            other = next(index for index, x in enumerate(level) if len(x) != len(level[0]))
            at = _indices(other, shape)
            raise ServiceError(
                "invalid", f"{field}: ragged: {field}{at} differs in length from its neighbours", field=field
            )
        shape.append(lengths.pop() if lengths else 0)
        if len(shape) > MAX_DIMS:
            raise ServiceError(
                "invalid", f"{field}: more than {MAX_DIMS} levels of lists", field=field, limit=MAX_DIMS
            )
        first = next((x[0] for x in level if x), None)
        if type(first) is not list:
            break
        level = [x for _, some in _runs(itertools.chain.from_iterable(level)) for x in some]
    if any(map(_holds_list, level)):
        raise ServiceError("invalid", f"{field}: ragged: a list and a number stand side by side", field=field)
    return checked_shape(shape, field=field)


def base64(value: dict[str, Any], *, field: str) -> tuple[Tensor, bytes]:
    """`{"b64", "dtype", "shape"}` as a tensor and its bytes, which are exactly the shape's."""
    tensor = checked(value.get("dtype"), value.get("shape"), field=field)
    text = value.get("b64")
    if not isinstance(text, str):
        raise ServiceError("invalid", f"{field}: b64 must be text", field=field)
    if len(text) != -(-tensor.nbytes // 3) * 4:
        raise ServiceError(
            "invalid",
            f"{field}: {len(text)} characters of base64 don't hold the {tensor.nbytes} bytes of its shape",
            field=field,
        )
    try:
        data = b"".join(_decoded(text))
    except (binascii.Error, UnicodeEncodeError):
        raise ServiceError(
            "invalid", f"{field}: b64 isn't standard base64 with padding", field=field
        ) from None
    if len(data) != tensor.nbytes:
        raise ServiceError(
            "invalid", f"{field}: {len(data)} bytes came, the shape has {tensor.nbytes}", field=field
        )
    return tensor, data


def _decoded(text: str) -> Iterator[bytes]:
    """Bytes of base64. binascii.Error, UnicodeEncodeError."""
    for start in range(0, len(text), 4 * RUN):
        some = text[start : start + 4 * RUN].encode("ascii")
        if b"=" in some and start + len(some) < len(text):
            raise binascii.Error("padding within")
        yield binascii.a2b_base64(some, strict_mode=True)


def dumps(values: NDArray[Any]) -> Iterator[bytes]:
    """An array of one dimension or more as JSON text, in pieces of about PIECE elements."""
    if values.ndim == 1 or values.size <= PIECE:
        yield _text(values)
        return
    rows = max(1, PIECE // max(1, math.prod(values.shape[1:])))
    yield b"["
    for start in range(0, values.shape[0], rows):
        lead = b"," if start else b""
        if rows == 1 and values.ndim > 2:
            yield lead
            yield from dumps(values[start])
        else:
            yield lead + _text(values[start : start + rows])[1:-1]
    yield b"]"


def bare(values: NDArray[Any]) -> bytes:
    """A flat array's elements, no brackets, NaN and infinities bare: what the inference protocol's clients read."""
    wide = values.astype(np.float64)
    if np.isfinite(wide).all():
        return msgspec.json.encode(wide.tolist())[1:-1]
    return json.dumps(wide.tolist()).encode()[1:-1]


def _text(values: NDArray[Any]) -> bytes:
    wide = values.astype(np.float64)
    if np.isfinite(wide).all():
        return msgspec.json.encode(wide.tolist())
    return msgspec.json.encode(_with_strings(wide.tolist()))


def _with_strings(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_strings(x) for x in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _check_elements(flat: list[Any], start: int, shape: Sequence[int], field: str) -> None:
    """Refuse the first element that is no number and none by name."""
    for at, value in enumerate(flat, start):
        kind = type(value)
        if kind in (int, float) or (kind is str and value in SPECIAL):
            continue
        names = ", ".join(SPECIAL)
        raise ServiceError(
            "invalid",
            f"{field}: {field}{_indices(at, shape)} is {_KINDS[kind]}; "
            f"elements are numbers, or the strings {names}",
            field=field,
        )


def saturated(value: float) -> float:
    """As fp64; a whole number beyond its range is infinite, as 1e999 is."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _whole(digits: str) -> int | float:
    """int() takes quadratic time on long texts, and refuses very long ones."""
    return int(digits) if len(digits) <= 400 else float(digits)


def _holds_list(value: list[Any]) -> bool:
    if len(value) > RUN:
        return any(list in set(map(type, some)) for _, some in _runs(value))
    return list in set(map(type, value))


def _indices(index: int, shape: Sequence[int]) -> str:
    """The place of a flat index in `shape`, as [i][j]."""
    places = []
    for dim in reversed(shape):
        places.append(index % dim)
        index //= dim
    return "".join(f"[{i}]" for i in reversed(places))
