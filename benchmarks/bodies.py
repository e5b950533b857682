"""Bodies as clients send them, right and nearly right: receives hypothesis' draw, hands on bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from service.formats import Tensor, safetensors
from service.inference.proto import pb
from service.query import JSON, RAW, SAFETENSORS

DTYPES = ("fp16", "bf16", "fp32", "fp64")

whole = st.one_of(
    st.integers(-2, 9), st.sampled_from([1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 70, -(1 << 63)])
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), whole, st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
shapes = st.one_of(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.lists(whole, max_size=9), anything)
datatypes = st.one_of(st.sampled_from(["FP16", "BF16", "FP32", "FP64", "INT8", ""]), anything)
parameters = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "binary_data_size": whole,
            "shared_memory_region": st.sampled_from(["r", "none", ""]),
            "shared_memory_offset": whole,
            "shared_memory_byte_size": whole,
            "handle": st.text(max_size=4),
        },
    ),
    anything,
)
inputs = st.fixed_dictionaries(
    {"name": st.sampled_from(["A", "B", "C", "bias", "D", ""]), "shape": shapes, "datatype": datatypes},
    optional={"parameters": parameters, "data": anything},
)
documents = st.one_of(
    st.fixed_dictionaries(
        {"inputs": st.lists(inputs, max_size=5)},
        optional={
            "id": anything,
            "outputs": anything,
            "parameters": st.one_of(
                anything,
                st.dictionaries(
                    st.sampled_from(
                        ["alpha", "trans_a", "timeout", "priority", "b", "out", "bias_dim", "beta"]
                    ),
                    anything,
                ),
            ),
        },
    ),
    anything,
)


def message(draw: Callable[[Any], Any]) -> tuple[bytes, int]:
    """A body and the length of its JSON: of a right request, changed, or of any document."""
    if draw(st.booleans()):
        m, k, n = (draw(st.integers(0, 3)) for _ in range(3))
        document: Any = {
            "inputs": [
                {
                    "name": "A",
                    "shape": [m, k],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 4 * m * k},
                },
                {
                    "name": "B",
                    "shape": [k, n],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 4 * k * n},
                },
            ]
        }
        tail = bytes(4 * (m * k + k * n))
    else:
        document, tail = draw(documents), draw(st.binary(max_size=64))
    head = json.dumps(document).encode()
    return changed(draw, head + tail), len(head)


def call(draw: Callable[[Any], Any]) -> bytes:
    """A ModelInferRequest of gRPC: a right one, or nearly, changed, or cut short."""
    asked = pb.ModelInferRequest(id=draw(st.text(max_size=4)))
    extents = [draw(st.integers(0, 3)) for _ in range(3)]
    kind = draw(st.sampled_from(["FP16", "BF16", "FP32", "FP64"]))
    raw = draw(st.booleans())
    for name, rows, columns in (("A", *extents[:2]), ("B", *extents[1:])):
        one = asked.inputs.add(name=name, datatype=kind, shape=[rows, columns])
        if raw:
            asked.raw_input_contents.append(bytes(Tensor(kind.lower(), (rows, columns)).nbytes))
        else:
            one.contents.fp32_contents.extend([1.5] * (rows * columns))
    for _ in range(draw(st.integers(0, 2))):
        _change(draw, asked)
    return changed(draw, asked.SerializeToString())


def _change(draw: Callable[[Any], Any], asked: Any) -> None:
    """One thing of a request is another, or more."""
    one = draw(st.sampled_from(list(asked.inputs))) if asked.inputs else asked.inputs.add()
    match draw(st.integers(0, 8)):
        case 0:
            one.name = draw(st.sampled_from(["A", "C", "bias", "D", ""]))
        case 1:
            one.datatype = draw(st.sampled_from(["FP32", "FP64", "INT8", ""]))
        case 2:
            del one.shape[:]
            one.shape.extend(draw(st.lists(_int64, max_size=9)))
        case 3:
            asked.raw_input_contents.append(draw(st.binary(max_size=16)))
        case 4:
            del asked.inputs[draw(st.integers(0, len(asked.inputs) - 1)) :]
        case 5:
            one.contents.fp64_contents.extend(draw(st.lists(st.floats(), max_size=4)))
        case 6:
            output = asked.outputs.add(name=draw(st.sampled_from(["D", "X"])))
            _parameter(draw, output.parameters)
        case 7:
            _parameter(draw, one.parameters)
        case 8:
            _parameter(draw, asked.parameters)


_int64 = st.integers(0, 4) | st.sampled_from([-1, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)])
_names = st.sampled_from(
    [
        *("alpha", "beta", "trans_a", "timeout", "priority", "b", "out", "handle", "binary_data"),
        *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "binary_data_size", "x"),
    ]
)


def _parameter(draw: Callable[[Any], Any], parameters: Any) -> None:
    """A parameter of any kind, or of none."""
    one = parameters[draw(_names)]
    match draw(st.integers(0, 4)):
        case 0:
            one.bool_param = draw(st.booleans())
        case 1:
            one.int64_param = draw(_int64)
        case 2:
            one.string_param = draw(st.sampled_from(["r", "handle:x", "inline", "NaN", ""]))
        case 3:
            one.double_param = draw(st.floats())
        case 4:
            one.SetInParent()


def changed(draw: Callable[[Any], Any], content: bytes) -> bytes:
    """The bytes as they are, some changed, or cut short."""
    body = bytearray(content)
    for _ in range(draw(st.integers(0, 2))):
        if body:
            body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    del body[draw(st.integers(0, len(body))) if draw(st.booleans()) else len(body) :]
    return bytes(body)


def gemm_body(draw: Callable[[Any], Any]) -> tuple[str, bytes, bytes]:
    """Media type, query and body of a product: of a right one, or nearly."""
    m, k, n = (draw(st.integers(0, 3)) for _ in range(3))
    dtype = draw(st.sampled_from(list(DTYPES)))
    a, b = Tensor(dtype, (m, k)), Tensor(dtype, (k, n))
    more = draw(
        st.sampled_from(
            ["", "&trans_b=true", "&bias_dim=m", "&c_shape=3x3", "&bias_dtype=fp32", "&b=handle:x"]
        )
    )
    match draw(st.sampled_from(["raw", "safetensors", "json"])):
        case "raw":
            query = f"a_shape={m}x{k}&b_shape={k}x{n}&dtype={dtype}{more}"
            return RAW, query.encode(), bytes(a.nbytes + b.nbytes)
        case "safetensors":
            header = safetensors.emit({"a": a, "b": b})
            return SAFETENSORS, more.removeprefix("&").encode(), header + bytes(a.nbytes + b.nbytes)
    operand = st.one_of(
        st.lists(st.lists(st.floats(width=16), min_size=k, max_size=k), min_size=m, max_size=m),
        st.fixed_dictionaries({"b64": st.text(max_size=8), "dtype": st.just(dtype), "shape": shapes}),
        st.fixed_dictionaries({"handle": st.text(max_size=4)}),
        anything,
    )
    document = {
        name: draw(operand) for name in draw(st.sets(st.sampled_from(["a", "b", "c", "bias", "alpha"])))
    }
    return JSON, b"", json.dumps(document).encode()


def upload_body(draw: Callable[[Any], Any]) -> tuple[str, dict[str, Any], bytes]:
    """Media type, query and body of a tensor to be kept: of a right one, or nearly."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
    tensor = Tensor(dtype, shape)
    match draw(st.sampled_from(["raw", "safetensors", "npy"])):
        case "raw":
            query = {"dtype": dtype, "shape": "x".join(map(str, shape))}
            return RAW, query, bytes(tensor.nbytes)
        case "safetensors":
            query = draw(st.sampled_from([{}, {"tensor": "x"}, {"tensor": "y"}]))
            header = safetensors.emit({"x": tensor, "y": Tensor("fp32", (2,))})
            return SAFETENSORS, query, header + bytes(tensor.nbytes + 8)
    written = io.BytesIO()
    array = np.zeros(shape, draw(st.sampled_from(["<f4", ">f4", "<f8", ">f2", "V2", "<i4"])))
    np.save(written, np.asfortranarray(array) if draw(st.booleans()) else array)
    query = {"dtype": "bf16"} if array.dtype.kind == "V" else {}
    return "application/x-npy", query, written.getvalue()
