"""Bodies as clients send them, right and nearly right: receives hypothesis' draw, hands on bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from service.formats import Tensor, safetensors
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
