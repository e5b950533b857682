"""Large JSON in pieces: the document is the one that the parser makes of the whole, and so is every refusal."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.errors import ServiceError
from service.formats import elsewhere, numbers, pieces

DICE = random.Random(3)


def in_pieces(text: bytes) -> Any:
    return pieces.Pieces(memoryview(text), numbers.unique, numbers._numbers_slowly).document()


def at_once(text: bytes) -> Any:
    return numbers.whole(text)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes, so that every place is one where a piece may end."""
    monkeypatch.setattr(pieces, "PIECE", 100)


def matrix(rows: int, columns: int) -> list[list[float]]:
    return [[DICE.choice((0, -7, 1.5e-9, DICE.random(), 1e300)) for _ in range(columns)] for _ in range(rows)]


DOCUMENTS = [
    {"a": matrix(9, 31), "b": matrix(31, 2), "alpha": 2.5, "out": {"handle": "x"}, "activation": "relu"},
    {"a": [matrix(3, 4) for _ in range(30)], "b": matrix(1, 400), "c": None, "trans_a": True},
    {"a": matrix(400, 1), "b": [[]] * 60, "bias": [DICE.random() for _ in range(200)]},
    {
        "a": [[["NaN", "Infinity"], [1, "-Infinity"]]] * 40,
        "b": {"b64": "QUJD" * 200, "dtype": "fp32", "shape": [3]},
    },
    {"steps": [{"id": f"s{n}", "a": matrix(5, 9), "b": {"step": 'é\\n"'}} for n in range(20)]},
    {"a": ["x", None, True, [1, [2, [3, "y"]]], []] * 30},
    {"a": {"b64": "\n/".join(["QUJD" * 30] * 4), "dtype": "fp32", "shape": [3]}, "b": {"handle": "😀" * 40}},
    {},
    {"": [], "x": [[]], "y": {}},
]


class TestDocument:
    @pytest.mark.parametrize("document", DOCUMENTS)
    @pytest.mark.parametrize(
        "options", [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]
    )
    def test_is_that_of_the_whole(self, document: Any, options: dict[str, Any]) -> None:
        text = json.dumps(document, **options).encode()
        assert in_pieces(text) == at_once(text) == document

    @pytest.mark.parametrize("size", range(70, 140))
    def test_wherever_a_piece_ends(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        monkeypatch.setattr(pieces, "PIECE", size)
        for document in DOCUMENTS[:4]:
            text = json.dumps(document).encode()
            assert in_pieces(text) == document

    def test_bare_words_and_numbers_beyond_all_range(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pieces, "PIECE", 1000)
        text = b'{"a": [[' + b",".join([b"NaN", b"-Infinity", b"1e999", b"9" * 500, b"1"] * 20) + b"]]}"
        got, want = (read(text)["a"][0] for read in (in_pieces, at_once))
        assert [repr(numbers.saturated(x)) for x in got] == [repr(numbers.saturated(x)) for x in want]

    def test_types_of_numbers_stay(self) -> None:
        text = b'{"a": [' + b",".join([b"1", b"1.0", b"-0", b"1e2"] * 50) + b"]}"
        assert list(map(repr, in_pieces(text)["a"])) == list(map(repr, at_once(text)["a"]))


def broken() -> list[bytes]:
    """Texts with a byte too many, too few or another, wherever it may matter."""
    found = []
    for document in DOCUMENTS[:6]:
        text = json.dumps(document).encode()
        places = [at for at, one in enumerate(text) if one in b'[]{},:"']
        for at in DICE.sample(places, min(150, len(places))):
            found += [text[:at] + text[at + 1 :], text[:at] + text[at : at + 1] + text[at:]]
            found.append(
                text[:at] + DICE.choice((b",", b"]", b"[", b"x", b'"', b"\\", b"\x00", b"\xff")) + text[at:]
            )
        found.append(text[: len(text) // 2])
    return [
        *found,
        b"",
        b" ",
        b"[1,]" * 40,
        b'{"a":[1],"a":[2]}',
        b'{"a":[{"x":1,"x":2}]}',
        b'{"a":"\\ud800"}',
    ]


def outcome(read: Callable[[bytes], Any], text: bytes) -> Any:
    """The document, or what is refused and how, or "whole"."""
    try:
        return read(text)
    except pieces.Whole:
        return "whole"
    except ServiceError as error:
        return error.code, error.detail, error.field


class TestRefusals:
    def test_what_is_no_json_is_never_taken(self) -> None:
        refused = 0
        for text in broken():
            want, got = outcome(at_once, text), outcome(in_pieces, text)
            refused += isinstance(want, tuple)
            assert got in (want, "whole"), text
        assert refused > 1000

    def test_are_worded_elsewhere_as_they_are_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "LARGE", 8)
        for text in (b'{"a": [[1, 2,]]}', b'{"a": [1], "b": \xff}', b'{"a": {"x": 1, "x": 2}, "x": [}'):
            with pytest.raises(ServiceError) as here:
                at_once(text)
            with pytest.raises(ServiceError) as there:
                numbers.loads(text)
            assert (there.value.code, there.value.detail) == (here.value.code, here.value.detail)
            assert there.value.field == here.value.field

    def test_where_no_process_can_be_had_there_is_no_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "LARGE", 8)
        monkeypatch.setattr(sys, "executable", "/nowhere")
        with pytest.raises(ServiceError) as caught:
            numbers.loads(b'{"a": [[1, 2,]]}')
        assert (caught.value.code, caught.value.retry_after) == ("no_room", 1.0)

    def test_a_text_that_takes_too_long_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(elsewhere, "MOST_SECONDS", 0.2)
        monkeypatch.setattr(elsewhere, "_PROGRAM", "import time; time.sleep(60)")
        began = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            elsewhere.document(memoryview(b"[1"))
        assert caught.value.code == "no_room"
        assert time.monotonic() - began < 20


class TestElsewhere:
    @pytest.mark.parametrize(
        "text",
        [
            b'{"a": [[1, {}], [2.5, 1e999, NaN]], "b": "\\ud83d\\ude00"}',
            b'[[[[[[[[[[[[[[[[[[[[1, "x", null, true, 123456789012345678901234567890]]]]]]]]]]]]]]]]]]]]',
            b'"text"',
        ],
    )
    def test_a_document_is_the_one_that_is_read_here(self, text: bytes) -> None:
        got = elsewhere.document(memoryview(text))
        assert repr(got) == repr(at_once(text))

    @pytest.mark.parametrize(
        ("value", "taken"),
        [
            ([0] * 199_998, True),
            ([0] * 200_000, False),
            ([{"x": [[]]}] * 70_000, False),
            ("x" * 300_000, True),
        ],
        ids=["numbers", "many numbers", "many objects", "one long text"],
    )
    def test_one_of_many_values_does_not_come_back(self, value: Any, taken: bool) -> None:
        text = memoryview(json.dumps([value]).encode())
        if taken:
            assert elsewhere.document(text) == [value]
            return
        with pytest.raises(ServiceError) as caught:
            elsewhere.document(text)
        assert (caught.value.code, caught.value.limit) == ("invalid", elsewhere.MOST_VALUES)


@pytest.mark.parametrize("count", [0, 7, 100_000])
def test_lists_and_objects_are_let_go(count: int) -> None:
    class Watched(list[Any]):
        pass

    watched = Watched()
    document = {"a": [[1.0, 2.0] for _ in range(count)], "b": [{"x": [list(range(20)), watched]}]}
    alive = weakref.ref(watched)
    del watched
    pieces.let_go(document)
    assert document == {}
    assert alive() is None


class TestArrays:
    def test_many_elements_are_those_of_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "RUN", 7)
        value = [["NaN", 1, 2.5, 10**400], [-(10**400), "-Infinity", 0, 3]] * 5
        got = numbers.array([list(row) for row in value], "fp64", field="a")
        monkeypatch.setattr(numbers, "RUN", 1 << 16)
        np.testing.assert_array_equal(got, numbers.array(value, "fp64", field="a"))

    @pytest.mark.parametrize("bad", [None, "x", True, {}, [1]])
    def test_a_bad_element_is_named_by_its_place_in_whatever_run(
        self, monkeypatch: pytest.MonkeyPatch, bad: Any
    ) -> None:
        value: list[list[Any]] = [[1.0] * 5 for _ in range(9)]
        value[7][3] = bad
        told = []
        for run in (1 << 16, 1, 4, 38):
            monkeypatch.setattr(numbers, "RUN", run)
            with pytest.raises(ServiceError) as caught:
                numbers.array(value, "fp32", field="a")
            told.append(caught.value.detail)
        assert len(set(told)) == 1

    def test_base64_in_runs_is_that_of_the_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = bytes(range(250)) + b"ab"
        text = numbers.binascii.b2a_base64(data, newline=False).decode()
        for run in (1, 2, 5, 1 << 16):
            monkeypatch.setattr(numbers, "RUN", run)
            value = {"b64": text, "dtype": "fp32", "shape": [63]}
            assert numbers.base64(value, field="a")[1] == data
            for at in (3, 7, 100):
                with pytest.raises(ServiceError, match="standard base64"):
                    numbers.base64(value | {"b64": text[:at] + "=" + text[at + 1 :]}, field="a")

    def test_lists_are_empty_after_they_were_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numbers, "RUN", 5)
        value = [[1, 2], [3, 4], [5, 6]]
        assert numbers.taken(value, "fp32", field="a").tolist() == [[1, 2], [3, 4], [5, 6]]
        assert value == []


def test_other_threads_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    row = b"[" + b",".join([b"0.12345678901234567"] * 1000) + b"]"
    text = b'{"a": [' + b",".join([row] * 1000) + b"]}"

    def turns(work: Any) -> int:
        """How often another thread ran meanwhile."""
        done, count = threading.Event(), 0
        thread = threading.Thread(target=lambda: (work(), done.set()))
        thread.start()
        while not done.is_set():
            time.sleep(0)
            count += 1
        thread.join()
        return count

    assert turns(lambda: numbers.array(numbers.loads(text)["a"], "fp32", field="a")) > 20
