"""A large JSON text in pieces: receives bytes, hands on the document that the parser would make of the whole.

The parser keeps the interpreter to itself until it is done, and so an event loop in another thread waiting. Here it
is given some hundred KiB of numbers at a time; between pieces others have their turn. `Whole` where the text isn't of
the kind that becomes large: fields, objects, and lists of lists of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

#: Bytes that the parser is given at a time: a few milliseconds.
PIECE = 1 << 17
#: Bytes of a text that are looked through at a time.
_LOOK = 1 << 20
#: Levels of lists or objects, and values beside numbers, beyond which a text is left to the parser.
_DEEPEST = 16
_MOST_VALUES = 1_000_000

#: Values that are let go at a time, with all in those that hold few.
_RUN = 1 << 14
_FEW = 8

_SPACE = b" \t\r\n"
_GAP = re.compile(rb"[ \t\r\n]*+")
#: What lists of numbers are written with; other words and short strings too, which are refused by their place.
_NUMBERS = re.compile(rb'(?:[0-9A-Za-z+\-.,\[\] \t\r\n]++|"[^"\\,\[\]\x00-\x1f]{0,64}+")*+')
_LONGEST_WORD = 66
_STRING = re.compile(rb'["\\\x00-\x1f]')
#: A value that is neither list, object nor string.
_SCALAR = re.compile(rb"[^,\[\]{}\x00-\x20\"]++")

_decoder = msgspec.json.Decoder()


class Whole(Exception):
    """The parser must see the text as a whole, be it to say what is wrong with it."""


def let_go(document: Any) -> None:
    """Empty lists and objects a run at a time: freed all at once, they would hold other threads up."""
    rest = [document]
    while rest:
        value = rest.pop()
        if type(value) is dict:
            rest += value.values()
            value.clear()
        elif type(value) is list:
            while value:
                some = value[-_RUN:]
                del value[-_RUN:]
                rest += [inner for inner in some if type(inner) in (list, dict) and len(inner) > _FEW]


class Pieces:
    """One text. `unique` makes an object of its fields; `slowly` reads numbers that the strict parser doesn't."""

    def __init__(
        self,
        text: memoryview,
        unique: Callable[[Iterable[tuple[str, Any]]], dict[str, Any]],
        slowly: Callable[[bytes], Any],
    ) -> None:
        self._text = text
        self._unique = unique
        self._slowly = slowly
        self._values = 0
        self._lists: list[list[Any]] = []

    def document(self) -> Any:
        """The document; raises Whole."""
        try:
            value, at = self._value(0, 0)
            if self._gap(at) != len(self._text):
                raise Whole
        except BaseException:
            let_go(self._lists)
            raise
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        self._values += 1
        if self._values > _MOST_VALUES or depth > _DEEPEST:
            raise Whole
        at = self._gap(at)
        match self._at(at):
            case b"{":
                return self._object(at + 1, depth)
            case b"[":
                objects = self._at(self._gap(at + 1)) == b"{"
                return self._list(at + 1, depth) if objects else self._numbers(at)
            case b'"':
                return self._string(at)
        found = _SCALAR.match(self._text, at, at + _LOOK)
        if found is None:
            raise Whole
        return self._decode(found[0]), found.end()

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        fields: list[tuple[str, Any]] = []
        while True:
            at = self._gap(at)
            if self._at(at) == b"}" and not fields:
                return {}, at + 1
            if self._at(at) != b'"':
                raise Whole
            name, at = self._string(at)
            at = self._gap(at)
            if self._at(at) != b":":
                raise Whole
            value, at = self._value(at + 1, depth + 1)
            fields.append((name, value))
            at, ended = self._next(at, b"}")
            if ended:
                return self._unique(fields), at

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        """A list of objects, or that begins with one."""
        values = []
        while True:
            value, at = self._value(at, depth + 1)
            values.append(value)
            at, ended = self._next(at, b"]")
            if ended:
                return values, at

    def _string(self, at: int) -> tuple[str, int]:
        """A string."""
        end, plain = at + 1, True
        while True:
            found = _STRING.search(self._text, end, end + _LOOK)
            if found is None:
                end = min(end + _LOOK, len(self._text))
                if end == len(self._text):
                    raise Whole
            elif found[0] == b'"':
                end = found.end()
                break
            elif found[0] == b"\\":
                end, plain = found.end() + 1, False
            else:
                raise Whole
        try:
            if plain:
                return str(self._text[at + 1 : end - 1], "utf-8"), end
            return _decoder.decode(self._text[at:end]), end
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Whole from None

    def _numbers(self, at: int) -> tuple[list[Any], int]:
        """Lists of numbers, or of such lists: a piece ends at a comma, and the next goes on in the lists open there.

        A bracket for each of these is put before a piece, and after it one for each that is open at its end.
        """
        whole: list[Any] = []
        self._lists.append(whole)
        opened, ended, first = [whole], False, True
        while not ended:
            piece, depth, ended = self._piece(at, len(opened) - 1)
            inside = piece.strip(_SPACE)
            # A comma that was cut out stood between two values.
            if not first and inside[:1] in (b"", b",", b"]"):
                raise Whole
            if not ended and inside[-1:] in (b"", b",", b"["):
                raise Whole
            if depth > _DEEPEST or (depth != 0 if ended else depth < 1):
                raise Whole
            value = self._decode(b"[" * len(opened) + piece + b"]" * (depth + 1))
            opened = _joined(opened, value, depth)
            at += len(piece) + (not ended)
            first = False
        if len(whole) != 1:
            raise Whole
        return whole[0], at

    def _piece(self, at: int, depth: int) -> tuple[bytes, int, bool]:
        """What stands up to a comma, or up to the last bracket; lists open then; whether it is the bracket."""
        data = bytes(self._text[at : at + PIECE])
        found = _NUMBERS.match(data)
        assert found is not None
        n = found.end()
        last = at + len(data) == len(self._text)
        ended = n < len(data) - (0 if last else _LONGEST_WORD) or (last and n == len(data))
        cut = data.rfind(b"]", 0, n) + 1 if ended else data.rfind(b",", 0, n)
        if cut <= 0:
            raise Whole
        depth += data.count(b"[", 0, cut) - data.count(b"]", 0, cut)
        if depth == 0 and not ended:  # the comma is one after the last bracket
            cut, ended = data.rfind(b"]", 0, cut) + 1, True
        return data[:cut], depth, ended

    def _decode(self, piece: bytes) -> Any:
        try:
            return _decoder.decode(piece)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        try:
            return self._slowly(piece)
        except (ValueError, RecursionError):
            raise Whole from None

    def _next(self, at: int, end: bytes) -> tuple[int, bool]:
        """Past a comma, or past the end."""
        at = self._gap(at)
        found = self._at(at)
        if found not in (b",", end):
            raise Whole
        return at + 1, found == end

    def _at(self, at: int) -> bytes:
        return bytes(self._text[at : at + 1])

    def _gap(self, at: int) -> int:
        """Past white space."""
        while True:
            found = _GAP.match(self._text, at, at + _LOOK)
            assert found is not None
            if found.end() < at + _LOOK:
                return found.end()
            at = found.end()


def _joined(opened: list[list[Any]], value: list[Any], depth: int) -> list[list[Any]]:
    """Put a piece's values into the lists that were open; the lists that are open then, the outermost first."""
    for outer in opened[:-1]:
        outer.extend(value[1:])
        value = value[0]
    opened[-1] += value
    still = [opened[0]]
    for _ in range(depth):
        still.append(still[-1][-1])
    return still
