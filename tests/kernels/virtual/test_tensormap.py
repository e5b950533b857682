"""Tensor maps: what is written is read, by the driver's numbers of types and by the compiler's own."""

from __future__ import annotations

import pytest

from kernels.virtual.tensormap import FLOAT_KINDS, decode, encode


@pytest.mark.parametrize(
    ("kind", "item", "name"), [(6, 2, "f16"), (9, 2, "bf16"), (10, 2, "bf16"), (7, 4, "f32"), (8, 8, "f64")]
)
def test_a_map_is_read_as_it_was_written(kind: int, item: int, name: str) -> None:
    found = decode(encode(1 << 20, kind, (256, 512, 3), (512, 512 * 512), (64, 128, 1), 3, 0))
    assert (found.address, found.item, FLOAT_KINDS[found.kind]) == (1 << 20, item, name)
    assert (found.dims, found.strides, found.box) == ((256, 512, 3), (512, 512 * 512), (64, 128, 1))
    assert found.span == 128
