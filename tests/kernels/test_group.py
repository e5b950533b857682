"""Tables of groups: their layout, tiles and tensor maps; and kernels.gemm_grouped on the CPU."""

from __future__ import annotations

import struct
from typing import Any

import pytest

import kernels
from kernels.device import H200
from kernels.group import FIELDS, MAP_BYTES, RECORD_BYTES, Place, Product, ends_bytes, table
from kernels.hopper.variants import grouped, variants
from kernels.problem import DType, Epilogue, Problem
from kernels.selector import choose

torch = pytest.importorskip("torch")


class Maps:
    """cuTensorMapEncodeTiled that writes what it was asked for into the map's first bytes."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.asked = error, []

    def __call__(self, room: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        dims, strides, box = (list(each) for each in rest[:3])
        self.asked.append((kind, rank, address, dims, strides, box))
        return self.error


def product(m: int, n: int, k: int, batch: int = 1, **more: Any) -> Product:
    problem = Problem(m, n, k, batch, **more)
    return Product(
        problem, Place(1 << 20, batch, m * k, k, 1), Place(2 << 20, 1, 0, 1, n), 3 << 20, (m * n, n, 1)
    )


def field(data: bytes, count: int, number: int, name: str) -> Any:
    offset, letter = FIELDS[name]
    return struct.unpack_from(f"<{letter}", data, ends_bytes(count) + number * RECORD_BYTES + offset)[0]


def test_ends_and_first_tiles_count_every_product_and_layer() -> None:
    data, total = table([product(130, 64, 8), product(1, 1, 8, 3), product(64, 129, 8)], 64, 64, 8, Maps())
    assert struct.unpack_from("<3i", data) == (3, 6, 9)
    assert total == 9
    assert [field(data, 3, i, "first") for i in range(3)] == [0, 3, 6]
    assert [field(data, 3, i, "tiles_p") for i in range(3)] == [3, 1, 1]
    assert [field(data, 3, i, "batch") for i in range(3)] == [1, 3, 1]
    assert len(data) == 128 + 3 * RECORD_BYTES


def test_records_lie_where_the_driver_wants_tensor_maps() -> None:
    assert RECORD_BYTES % 128 == 0
    assert all(ends_bytes(count) % 128 == 0 for count in (1, 32, 33, 1000))
    assert max(offset for offset, _ in FIELDS.values()) + 8 <= RECORD_BYTES
    assert min(offset for offset, _ in FIELDS.values()) == 2 * MAP_BYTES
    taken = [
        byte
        for offset, letter in FIELDS.values()
        for byte in range(offset, offset + (8 if letter == "q" else 4))
    ]
    assert len(taken) == len(set(taken))


def test_an_operand_along_k_comes_in_one_box_and_across_in_boxes_of_64_rows() -> None:
    maps = Maps()
    table([product(130, 72, 40, dtype=DType.BF16, out_dtype=DType.BF16)], 128, 64, 8, maps)
    (kind, rank, address, dims, strides, box), (_, _, _, dims_b, strides_b, box_b) = maps.asked
    assert (kind, rank, address) == (9, 3, 1 << 20)
    assert (dims, strides, box) == ([40, 130, 1], [80, 130 * 40 * 2], [64, 128, 1])
    assert (dims_b, strides_b, box_b) == ([72, 40, 1], [144, 0], [64, 64, 1])


def test_alpha_zero_reads_nothing_and_a_refused_operand_is_an_error() -> None:
    data, _ = table([product(8, 8, 80), product(8, 8, 80, epilogue=Epilogue(alpha=0.0))], 64, 64, 8, Maps())
    assert [field(data, 2, i, "k_tiles") for i in range(2)] == [2, 0]
    data, _ = table([product(8, 8, 0, epilogue=Epilogue(alpha=float("inf")))], 64, 64, 8, Maps())
    assert (field(data, 1, 0, "k_tiles"), field(data, 1, 0, "alpha")) == (0, 0.0)
    data, _ = table([product(8, 8, 8, epilogue=Epilogue(alpha=1e39))], 64, 64, 8, Maps())
    assert field(data, 1, 0, "alpha") == float("inf")
    with pytest.raises(ValueError, match="can't address"):
        table([product(8, 8, 8)], 64, 64, 8, Maps(error=1))


def test_many_small_products_are_expected_to_gain_and_large_ones_are_not() -> None:
    def gain(problems: list[Problem]) -> float:
        alone = sum(choose(p, H200, variants=variants()).seconds for p in problems)
        return alone / min(g.seconds_together(problems, H200) for g in grouped())

    small = [Problem(64 + 8 * i, 256, 512, batch_invariant=False) for i in range(32)]
    assert gain(small) > 3
    assert gain([Problem(8192, 8192, 8192), Problem(8192, 8192, 4096)]) < 1


def test_gemm_grouped_computes_each_product() -> None:
    shapes = [(3, 5, 7), (1, 2, 3), (16, 8, 40)]
    a = [torch.randn(m, k) for m, _, k in shapes]
    b = [torch.randn(k, n) for _, n, k in shapes]
    bias = [torch.randn(n) for _, n, _ in shapes]
    out = [torch.empty(m, n) for m, n, _ in shapes]
    found = kernels.gemm_grouped(a, b, bias=bias, alpha=2.0, activation="relu", out=out)
    for x, y, z, d, mine in zip(a, b, bias, found, out, strict=True):
        assert d is mine
        torch.testing.assert_close(d, torch.relu(2 * x @ y + z))
    assert kernels.gemm_grouped([], []) == []


def test_gemm_grouped_refuses_what_cannot_be_meant() -> None:
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="b has 1 tensors, a has 2"):
        kernels.gemm_grouped([x, x], [x])
    room = torch.zeros(2, 4, 4)
    with pytest.raises(ValueError, match="out of product 0 overlaps a of product 1"):
        kernels.gemm_grouped([x, room[0]], [x, x], out=[room[0], room[1]])
    with pytest.raises(ValueError, match="out of product 0 overlaps d of product 1"):
        kernels.gemm_grouped([x, x], [x, x], out=[room[0], room[0]])
