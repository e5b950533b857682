"""Tensor maps: what is written is read, and what tensormap.replace changes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kernels.virtual.host import host, run
from kernels.virtual.tensormap import DRIVER_KINDS, FLOAT_KINDS, decode, encode, replaced


@pytest.mark.parametrize(
    ("kind", "item", "name"),
    [(6, 2, "f16"), (10, 2, "bf16"), (7, 4, "f32"), (9, 8, "f64"), (DRIVER_KINDS[9], 2, "bf16")],
)
def test_a_map_is_read_as_it_was_written(kind: int, item: int, name: str) -> None:
    found = decode(encode(1 << 20, kind, (256, 512, 3), (512, 512 * 512), (128 // item, 128, 1), 3, 0))
    assert (found.address, found.item, FLOAT_KINDS[found.kind]) == (1 << 20, item, name)
    assert (found.dims, found.strides, found.box) == ((256, 512, 3), (512, 512 * 512), (128 // item, 128, 1))
    assert found.span == 128


@pytest.mark.parametrize(("kind", "padded", "shared"), [(13, False, 64 * 8), (14, True, 128 * 8)])
def test_elements_of_4_bits_are_counted_by_two_or_by_sixteen(kind: int, padded: bool, shared: int) -> None:
    found = decode(encode(1 << 20, kind, (256, 64), (128,), (128, 8), 0, 0))
    assert found.padded is padded
    assert found.dims[0] * found.per_item == 256
    assert (found.box_bytes, found.shared_bytes) == (64 * 8, shared)


def test_fields_are_replaced() -> None:
    data = encode(1 << 20, 6, (256, 512), (512,), (64, 128), 3, 0)
    for field, ordinal, value in (
        ("global_address", 0, 1 << 33), ("global_dim", 1, 12), ("box_dim", 1, 16), ("elemtype", 0, 10),
        ("swizzle_mode", 0, 1),
    ):  # fmt: skip
        data = replaced(data, field, ordinal, value)
    found = decode(data)
    assert (found.address, found.dims, found.box) == (1 << 33, (256, 12), (64, 16))
    assert (FLOAT_KINDS[found.kind], found.span) == ("bf16", 32)
    assert decode(replaced(data, "rank", 0, 0)).dims == (256,)


@pytest.mark.parametrize(("field", "value"), [("box_dim", 257), ("global_dim", 0), ("swizzle_mode", 4)])
def test_what_a_field_cannot_hold_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        replaced(encode(1 << 20, 6, (256, 512), (512,), (64, 128), 3, 0), field, 0, value)


GOOD: dict[str, Any] = {
    "address": 1 << 20, "kind": 6, "dims": (256, 512), "strides": (512,), "box": (64, 128), "mode": 3, "interleave": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"box": (64, 0)}, "box"),
        ({"box": (64, 257)}, "box"),
        ({"box": (65, 128)}, "side by side"),
        ({"box": (68, 128), "mode": 0}, "side by side"),
        ({"box": (128, 128)}, "side by side"),
        ({"dims": (256, 0)}, "dimensions"),
        ({"strides": (520,)}, "strides"),
        ({"strides": (1 << 40,)}, "strides"),
        ({"address": (1 << 20) + 8}, "multiple of 16"),
    ],
)
def test_what_the_driver_refuses_is_refused(change: dict[str, Any], said: str) -> None:
    encode(**GOOD)
    with pytest.raises(ValueError, match=said):
        encode(**(GOOD | change))


def test_a_launch_is_told_what_the_driver_refused() -> None:
    def call() -> None:
        two, one = ctypes.c_uint32 * 2, ctypes.c_uint64 * 1
        refused = host().library._cuTensorMapEncodeTiled(
            ctypes.create_string_buffer(128), 6, 2, ctypes.c_void_p(1 << 20), (ctypes.c_uint64 * 2)(256, 512), one(512),
            two(64, 0), two(1, 1), 0, 3, 0, 0,
        )  # fmt: skip
        assert refused == 1  # CUDA_ERROR_INVALID_VALUE

    with pytest.raises(ValueError, match=r"cuTensorMapEncodeTiled: a box of \(64, 0\)"):
        run(call, {}, "")
