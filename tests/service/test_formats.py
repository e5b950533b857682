"""Forms on the wire: round trips, what other libraries write and read, and bytes that mean nothing."""

from __future__ import annotations

import contextlib
import io
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as library
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import ServiceError
from service.formats import DTYPES, MAX_DIM, Tensor, npy, numbers, numpy_dtype, raw
from service.formats import safetensors as st_form

dtypes = st.sampled_from(sorted(DTYPES))
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).standard_normal(shape).astype(numpy_dtype(dtype))


def refused(code: str, call: Callable[..., Any], *args: Any, **more: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call(*args, **more)
    assert caught.value.code == code, caught.value.detail
    return caught.value


# -- .npy ------------------------------------


def read_npy(data: bytes, **more: Any) -> np.ndarray[Any, Any]:
    header = npy.parse(data[: npy.header_length(data[:12])], **more)
    out = bytearray(header.tensor.nbytes)
    npy.convert(header, memoryview(data)[header.offset :], memoryview(out))
    if header.plain:
        assert bytes(out) == data[header.offset :]
    return np.frombuffer(out, numpy_dtype(header.tensor.dtype)).reshape(header.tensor.shape)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("descr", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 1), (2, 3, 4), (0, 7)])
@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_npy_of_numpy_is_read(
    version: tuple[int, int], order: str, descr: str, shape: tuple[int, ...]
) -> None:
    array = np.asarray(np.random.default_rng(0).standard_normal(shape)).astype(descr, order=order)
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    read = read_npy(file.getvalue())
    assert read.shape == shape
    np.testing.assert_array_equal(read, array)


def test_npy_of_bf16_is_read_where_the_request_says_so() -> None:
    array = values((2, 3), "bf16")
    file = io.BytesIO()
    np.save(file, array.view("V2"))
    error = refused("invalid", read_npy, file.getvalue())
    assert "dtype=bf16" in error.detail
    read = read_npy(file.getvalue(), dtype="bf16")
    assert read.dtype == ml_dtypes.bfloat16
    assert read.tobytes() == array.tobytes()


@given(dtypes.filter(lambda dtype: dtype != "bf16"), shapes)
@settings(max_examples=50)
def test_npy_is_written_as_numpy_reads_it(dtype: str, shape: tuple[int, ...]) -> None:
    array = values(shape, dtype)
    data = npy.emit(Tensor(dtype, shape)) + array.tobytes()
    assert npy.header_length(data) % 64 == 0
    read = np.load(io.BytesIO(data))
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)
    assert npy.parse(data).tensor == Tensor(dtype, shape)


def test_npy_refuses_what_it_cannot_hold() -> None:
    refused("not_acceptable", npy.emit, Tensor("bf16", (1, 1)))
    for array in (
        np.array([{}], dtype=object),
        np.arange(3),
        np.array([1j]),
        np.array(["a"]),
        np.array([True]),
    ):
        file = io.BytesIO()
        np.save(file, array)
        refused("invalid", npy.parse, file.getvalue())
    file = io.BytesIO()
    np.save(file, np.zeros(2, [("x", "<f4"), ("y", "<f4")]))
    refused("invalid", npy.parse, file.getvalue())
    file = io.BytesIO()
    np.save(file, np.zeros(2, "f4"))
    assert refused("invalid", npy.parse, file.getvalue(), dtype="fp64").field == "dtype"


def npy_with(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x04\x00" + bytes(200),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(200),
        b"PK\x03\x04" + bytes(100),
        npy_with("{'descr': '<f4'}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'x': True}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'shape': (4,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': 'no', 'shape': (3,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (3 4)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}"),
        npy_with("{'descr': '<f4', 'fortran_order': False, 'shape': (__import__('os'),)}"),
        npy_with("{" + "(" * 5000),
    ],
)
def test_npy_that_cannot_be_parsed_is_400(data: bytes) -> None:
    refused("malformed", npy.parse, data)


def test_npy_of_absurd_size_is_refused() -> None:
    text = "{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999, 9999999999999999999)}"
    assert refused("invalid", npy.parse, npy_with(text)).limit == MAX_DIM


# -- safetensors ------------------------------------


def parse_file(data: bytes, **more: Any) -> st_form.Header:
    length = st_form.header_length(data[:8])
    header = st_form.parse(data[8 : 8 + length], **more)
    if len(data) < 8 + length + header.nbytes:
        raise ServiceError("malformed", "cut short")
    return header


def test_safetensors_of_its_library_is_read() -> None:
    arrays = {
        "a": values((2, 3), "fp16"),
        "b": values((3, 4), "fp32"),
        "bias": values((4,), "fp64"),
        "c": values((0, 4), "bf16"),
    }
    data = safetensors_save(arrays)
    header = parse_file(data, names=("a", "b", "c", "bias"))
    start = len(data) - header.nbytes
    for name, array in arrays.items():
        entry = header.entry(name)
        assert entry is not None
        assert entry.tensor.shape == array.shape
        assert data[start + entry.begin : start + entry.end] == array.tobytes()
    assert header.metadata == {"made": "here"}


def safetensors_save(arrays: dict[str, Any]) -> bytes:
    return library.save(arrays, metadata={"made": "here"})


@given(st.lists(st.tuples(dtypes, shapes), max_size=4))
@settings(max_examples=50)
def test_safetensors_is_written_as_its_library_reads_it(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    named = {f"t{i}": Tensor(*tensor) for i, tensor in enumerate(tensors)}
    arrays = {name: values(tensor.shape, tensor.dtype) for name, tensor in named.items()}
    data = st_form.emit(named) + b"".join(array.tobytes() for array in arrays.values())
    assert (len(data) - sum(t.nbytes for t in named.values())) % 8 == 0
    read = dict(safetensors.deserialize(data))
    for name, tensor in named.items():
        assert read[name]["shape"] == list(tensor.shape)
        assert (
            read[name]["dtype"] == {"fp16": "F16", "bf16": "BF16", "fp32": "F32", "fp64": "F64"}[tensor.dtype]
        )
        assert bytes(read[name]["data"]) == arrays[name].tobytes()
    assert {e.name: e.tensor for e in parse_file(data).entries} == named


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "b"),
        ({"a": entry(), "b": entry(offsets=(16, 24))}, "b"),
        ({"a": entry(offsets=(8, 16))}, "a"),
        ({"a": entry(offsets=(8, 0))}, "a"),
        ({"a": entry(offsets=(-8, 0))}, "a"),
        ({"a": entry(offsets=(0, 4))}, "a"),
        ({"a": entry(offsets=(0, 2**64 + 8))}, "a"),
        ({"a": entry(offsets=(0, 8.0))}, "a"),
        ({"a": entry(offsets=(False, 8))}, "a"),
        ({"a": entry(offsets=(0, 8, 16))}, "a"),
        ({"a": entry(extra=1)}, "a"),
        ({"a": []}, "a"),
        ({"__metadata__": {"x": 1}}, "body"),
        ({"__metadata__": 3}, "body"),
    ],
)
def test_safetensors_places_that_do_not_tile_the_body_are_400(document: Any, field: str) -> None:
    assert refused("malformed", st_form.parse, json.dumps(document).encode()).field == field


@pytest.mark.parametrize(
    "bad",
    [
        entry(dtype="I64"),
        entry(dtype="F8_E4M3"),
        entry(dtype=3),
        entry(shape=(-2,)),
        entry(shape=(2.0,)),
        entry(shape=2),
    ],
)
def test_safetensors_of_other_types_and_shapes_are_422(bad: dict[str, Any]) -> None:
    assert refused("invalid", st_form.parse, json.dumps({"a": bad}).encode()).field == "a"


def test_safetensors_size_is_compared_without_overflow() -> None:
    # 2³¹-1 squared times 4 bytes wraps to a small number in 64 bits.
    bad = entry(shape=(2**31 - 1, 2**31 - 1, 4), offsets=(0, 16))
    assert refused("malformed", st_form.parse, json.dumps({"a": bad}).encode()).field == "a"


def test_safetensors_headers_are_bounded_and_named_once() -> None:
    assert refused("malformed", st_form.header_length, struct.pack("<Q", 2**63)).limit == st_form.MAX_HEADER
    refused("malformed", st_form.header_length, b"\0\0\0")
    refused("malformed", st_form.header_length, bytes(8))
    refused("malformed", st_form.parse, b' {"a": 1}')
    refused("malformed", st_form.parse, b'{"a": ' + b"[" * 100_000)
    refused("malformed", st_form.parse, b'{"__metadata__": {"a": "x", "a": "y"}}')
    refused("malformed", st_form.parse, b'{"a": ' + b"9" * 5000 + b"}")
    assert refused("invalid", st_form.parse, json.dumps({"q": entry()}).encode(), names="ab").field == "q"


# -- raw shapes ------------------------------------


@given(st.lists(st.integers(0, MAX_DIM), min_size=1, max_size=8).map(tuple))
def test_shapes_round_trip(shape: tuple[int, ...]) -> None:
    assert raw.parse_shape(raw.emit_shape(shape), field="a_shape") == shape
    assert raw.parse_shape(",".join(map(str, shape)), field="a_shape") == shape


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "-1x2", "2 x3", "2x٣", "+2x3", "1e3", "2" * 30, "1x" * 9 + "1", str(MAX_DIM + 1)]
)
def test_shapes_that_mean_nothing_are_422(text: str) -> None:
    assert refused("invalid", raw.parse_shape, text, field="b_shape").field == "b_shape"


# -- JSON ------------------------------------


@given(dtypes, st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.randoms())
@settings(max_examples=50)
def test_json_numbers_round_trip_bit_for_bit(dtype: str, shape: tuple[int, ...], dice: Any) -> None:
    array = values(shape, dtype)
    flat = array.reshape(-1)
    for special in (math.nan, math.inf, -math.inf, -0.0, 0.0):
        flat[dice.randrange(flat.size)] = special
    text = b"".join(numbers.dumps(array))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    read = numbers.array(numbers.loads(text), dtype, field="a")
    assert read.shape == shape
    np.testing.assert_array_equal(read.astype("f8"), array.astype("f8"))
    there = ~np.isnan(array)
    np.testing.assert_array_equal(np.signbit(read[there]), np.signbit(array[there]))


@pytest.mark.parametrize("shape", [(300, 200), (3, 200, 200), (2, 3, 40000), (100_000,), (2, 0, 3), (0, 4)])
def test_large_arrays_are_written_in_pieces(shape: tuple[int, ...]) -> None:
    array = values(shape, "fp32")
    pieces = list(numbers.dumps(array))
    assert array.ndim == 1 or max(map(len, pieces)) < 45000 * 25
    assert json.loads(b"".join(pieces)) == array.tolist()


def test_json_takes_bare_and_written_specials_and_saturates() -> None:
    value = numbers.loads(
        b'[[NaN, Infinity, -Infinity, 1e999], ["NaN", "Infinity", "-Infinity", -1e999], [1, 2, 3, '
        + b"9" * 4500
        + b"]]"
    )
    read = numbers.array(value, "fp32", field="a")
    assert np.isnan(read[:2, 0]).all()
    assert read[0, 1:].tolist() == [math.inf, -math.inf, math.inf]
    assert read[1, 1:].tolist() == [math.inf, -math.inf, -math.inf]
    assert read[2].tolist() == [1, 2, 3, math.inf]
    assert numbers.array([[10**400, -(10**400)]], "fp64", field="a").tolist() == [[math.inf, -math.inf]]
    assert numbers.array([[1e6, 65519.0]], "fp16", field="a").tolist() == [[math.inf, 65504.0]]


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [3]],
        [[1, 2], 3],
        [1, [2]],
        [[[1], [2]], [[3]]],
        [[[1], [2]], [[3], 4]],
        [[True, 1]],
        [[None, 1]],
        [["1", 2]],
        [["nan", 2]],
        [[{}, 2]],
        [[[[[[[[[1]]]]]]]]],
    ],
)
def test_ragged_lists_and_foreign_elements_name_the_field(value: Any) -> None:
    error = refused("invalid", numbers.array, value, "fp32", field="bias")
    assert error.field == "bias"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([[1, 2], [3, None]], "c[1][1] is null"),
        ([[1, True]], "c[0][1] is true or false"),
        ([[[1], ["nan"]]], "c[0][1][0] is a string"),
        ([[1, {}]], "c[0][1] is an object"),
    ],
)
def test_foreign_elements_are_named_by_place(value: Any, told: str) -> None:
    assert told in refused("invalid", numbers.array, value, "fp32", field="c").detail


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'"\xff"', "UTF-8"),
        (b"{", "line 1 column 2"),
        (b"", "column 1"),
    ],
)
def test_what_is_no_json_is_told_why(text: bytes, why: str) -> None:
    assert why in refused("malformed", numbers.loads, text).detail


def test_a_shape_of_many_dimensions_is_told_the_limit() -> None:
    assert refused("invalid", raw.parse_shape, "1x" * 8 + "1", field="shape").limit == 8


def test_ragged_rows_are_named_by_place() -> None:
    assert "c[1][0]" in refused("invalid", numbers.array, [[[1, 2]], [[3]]], "fp32", field="c").detail


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"a": 1, "a": 2}', "a"),
        (b'{"a": 1, "\\u0061": 2}', "a"),
        (b'{"a": NaN, "a": 2}', "a"),
        (b'{"x": {"long": ":", "y": [{"b" : 1}, {"b":1, "c": [1], "b"\n: 2}]}}', "b"),
        (b'{"x": [[{"d": 1, "d": 2}]]}', "d"),
        (b'{"x": [1, {"d": 1, "d": 2}]}', "d"),
        (b'{"' + b"k" * 100 + b'": 1, "' + b"k" * 100 + b'": 2}', "k" * 64),
    ],
)
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_json_with_a_key_twice_is_refused_by_that_key(text: bytes, key: str, form: Any) -> None:
    assert refused("invalid", numbers.loads, form(text)).field == key


def test_json_that_looks_as_if_a_key_came_twice_is_read() -> None:
    for text in (b'{":": ":", "\\":": [":", {"\\"": 1}, [{"a": 1}]]}', b'[{"a": 1}, {"a": 2}]'):
        assert numbers.loads(text) == json.loads(text)


@given(
    st.recursive(
        st.none() | st.integers(-9, 9) | st.text(':"\\a{} ', max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(':"\\a{} ', max_size=4), inner),
    )
)
@settings(max_examples=300, deadline=None)
def test_any_json_without_equal_keys_is_read(value: Any) -> None:
    assert numbers.loads(json.dumps(value).encode()) == value


def test_json_that_cannot_be_parsed_is_400() -> None:
    for text in (b"", b"{", b"[1,]", b"\xff\xfe", b"[" * 100_000, b'{"a": nan}', b"[1] 2"):
        refused("malformed", numbers.loads, text)


def test_half_a_surrogate_pair_is_no_text() -> None:
    """It could be neither echoed in a reply nor logged."""
    for text in (b'"\\ud800"', b'["\\uDFFF", NaN]', b'{"\\uDead": 1}', b'"\\ude00\\ud83d"'):
        refused("malformed", numbers.loads, text)
        refused("malformed", numbers.loads, text.decode().encode("utf-16"))
    assert numbers.loads(b'["\\ud83d\\uDE00", 1e999]') == ["\U0001f600", math.inf]
    assert numbers.loads(b'"\\ud83d\\uDE00"') == "\U0001f600"


def test_base64_holds_exactly_its_shape() -> None:
    array = values((2, 3), "bf16")
    import base64

    text = base64.b64encode(array.tobytes()).decode()
    tensor, data = numbers.base64({"b64": text, "dtype": "bf16", "shape": [2, 3]}, field="a")
    assert tensor == Tensor("bf16", (2, 3))
    assert data == array.tobytes()
    assert numbers.base64({"b64": "", "dtype": "fp32", "shape": [0, 3]}, field="a")[1] == b""
    for bad in (
        {"b64": text[:-4], "dtype": "bf16", "shape": [2, 3]},
        {"b64": text[:-1] + "*", "dtype": "bf16", "shape": [2, 3]},
        {"b64": text[:-1] + "é", "dtype": "bf16", "shape": [2, 3]},
        {"b64": "AA==", "dtype": "bf16", "shape": [1]},
        {"b64": text, "dtype": "bf16", "shape": [2, -3]},
        {"b64": text, "dtype": "int8", "shape": [2, 3]},
        {"b64": 3, "dtype": "bf16", "shape": [2, 3]},
        {"dtype": "bf16", "shape": [2, 3]},
    ):
        assert refused("invalid", numbers.base64, bad, field="b").field == "b"


# -- nothing but ServiceError ------------------------------------


def only_service_errors(call: Callable[..., Any], *args: Any, **more: Any) -> None:
    with contextlib.suppress(ServiceError):
        call(*args, **more)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "c", "bias", "__metadata__", "q"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F16", "BF16", "F32", "F64", "I8"]) | json_values,
            "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
            "data_offsets": st.lists(st.integers(-1, 100), min_size=2, max_size=2) | json_values,
        }
    )
    | json_values,
    max_size=4,
)


def fuzz(data: bytes, value: Any, header: Any) -> None:
    only_service_errors(npy.parse, data)
    only_service_errors(npy.parse, b"\x93NUMPY\x01\x00" + data, dtype="bf16")
    only_service_errors(npy.parse, npy_with("{'descr': " + data.decode("latin-1")[:500]))
    only_service_errors(parse_file, data)
    only_service_errors(st_form.parse, b"{" + data)
    only_service_errors(st_form.parse, json.dumps(header).encode(), names=("a", "b", "c", "bias"))
    only_service_errors(numbers.loads, data)
    only_service_errors(numbers.array, value if isinstance(value, list) else [value], "bf16", field="a")
    only_service_errors(numbers.base64, value if isinstance(value, dict) else {"b64": value}, field="a")
    only_service_errors(raw.parse_shape, data.decode("latin-1"), field="a_shape")


@given(st.binary(max_size=200), json_values, headers)
@settings(max_examples=60)
def test_arbitrary_input_meets_service_errors_only(data: bytes, value: Any, header: Any) -> None:
    fuzz(data, value, header)


@pytest.mark.ci
@given(st.binary(max_size=2000), json_values, headers)
@settings(max_examples=1500, deadline=None)
def test_much_arbitrary_input_meets_service_errors_only(data: bytes, value: Any, header: Any) -> None:
    fuzz(data, value, header)


@given(headers)
@settings(max_examples=100)
def test_accepted_safetensors_headers_tile_from_zero(header: Any) -> None:
    try:
        parsed = st_form.parse(json.dumps(header).encode())
    except ServiceError:
        return
    at = 0
    for one in parsed.entries:
        assert one.begin == at
        assert one.end - one.begin == one.tensor.nbytes
        at = one.end
    assert at == parsed.nbytes
