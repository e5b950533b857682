"""From accumulators to D: receives a consumer's registers, hands on elements in global memory.

All that may follow a product, any type and stride of D: `put_rows`, registers → 64×64 tile of fp32; `store_any`, a
loop in which consecutive threads take consecutive elements of D. Where only alpha follows there is a quicker way
(boxes.py); each element is rounded once in either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kernels.call import BIAS_ALONG_M

__all__ = [
    "TYPES",
    "Terms",
    "clear_sixteen",
    "consumer_barrier",
    "element",
    "is_simple",
    "load",
    "pack_pair",
    "peer_address",
    "put_rows",
    "send_four",
    "store_any",
    "store_pair",
    "store_words",
]

TYPES = {Float16: 1, BFloat16: 2, Float32: 3}  # as `code` has them (kernels/call.py)


@dataclass(frozen=True)
class Terms:
    """What follows the product, as run-time values. Strides are along the kernel's p and q, in elements."""

    d: Int64
    d_batch: Int64
    d_p: Int64
    d_q: Int64
    c: Int64
    c_batch: Int64
    c_p: Int64
    c_q: Int64
    bias: Int64
    alpha: Float32
    beta: Float32
    code: Int32
    p: Int32
    q: Int32

    def values(self) -> list[Any]:
        """All of them in order."""
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def __extract_mlir_values__(self) -> list[Any]:
        return [value.ir_value() for value in self.values()]

    def __new_from_mlir_values__(self, values: list[Any]) -> Terms:
        return Terms(*(type(old)(new) for old, new in zip(self.values(), values, strict=True)))


def consumer_barrier(consumer: Int32) -> None:
    """Synchronize the 128 threads of one consumer: named barrier 10 + consumer."""
    cute.arch.barrier(barrier_id=10 + consumer, number_of_threads=128)


@dsl_user_op
def pack_pair(high: Float32, low: Float32, dtype: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two fp32 as two 16-bit values in one register, rounded to nearest even."""
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [high.ir_value(loc=loc, ip=ip), low.ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{name}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def _add(a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """a + b, rounded by itself: with `.rn` said, no multiplication before it is drawn in."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip)],
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def store_pair(address: Int32, a: Float32, b: Float32, *, loc: Any = None, ip: Any = None) -> None:
    """Two fp32 to shared memory."""
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip)],
        "st.shared.v2.f32 [$0], {$1, $2};",
        "r,f,f,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _store_one(address: Int32, a: Float32, *, loc: Any = None, ip: Any = None) -> None:
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), a.ir_value(loc=loc, ip=ip)],
        "st.shared.f32 [$0], $1;",
        "r,f,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def clear_sixteen(address: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes of zeros to shared memory."""
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), Int32(0).ir_value(loc=loc, ip=ip)],
        "st.shared.v4.b32 [$0], {$1, $1, $1, $1};",
        "r,r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def peer_address(address: Int32, rank: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same shared-memory address in block `rank` of the cluster."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [address.ir_value(loc=loc, ip=ip), rank.ir_value(loc=loc, ip=ip)],
            "mapa.shared::cluster.u32 $0, $1, $2;",
            "=r,r,r",
            has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def send_four(
    address: Int32, values: list[Float32], barrier: Int32, *, loc: Any = None, ip: Any = None
) -> None:
    """Start storing 16 bytes into another block's shared memory; they count at its barrier."""
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in (address, *values, barrier)],
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];",
        "r,f,f,f,f,r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load(address: Int32, count: int, space: str, *, loc: Any = None, ip: Any = None) -> list[Float32]:
    """One fp32 or four from shared memory; `space` "shared" or "shared::cluster"."""
    vector, places = ("", "$0") if count == 1 else (".v4", "{$0, $1, $2, $3}")
    result = llvm.inline_asm(
        T.f32() if count == 1 else llvm.StructType.get_literal([T.f32()] * count),
        [address.ir_value(loc=loc, ip=ip)],
        f"ld.{space}{vector}.f32 {places}, [${count}];",
        ",".join(["=f"] * count) + ",r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if count == 1:
        return [Float32(result)]
    return [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store_words(address: Int64, words: list[Any], *, loc: Any = None, ip: Any = None) -> None:
    """Two or four 32-bit words to global memory at once."""
    places = ", ".join(f"${i + 1}" for i in range(len(words)))
    kind, letter = ("f32", "f") if isinstance(words[0], Float32) else ("b32", "r")
    llvm.inline_asm(
        None,
        [address.ir_value(loc=loc, ip=ip), *(w.ir_value(loc=loc, ip=ip) for w in words)],
        f"st.global.v{len(words)}.{kind} [$0], {{{places}}};",
        ",".join(["l", *[letter] * len(words)]) + ",~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def put_rows(
    tile: Int32,
    acc: cute.Tensor,
    row: cutlass.Constexpr,
    first: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    swap: cutlass.Constexpr,
    thread: Int32,
) -> None:
    """64×8·blocks elements as fp32, in lines of 256 bytes along the contiguous dimension of D.

    A line is a row of p, or with `swap` a column (q). Pieces of 16 bytes are permuted so that neither these
    stores nor the loads of lines meet in a bank: see `_place`.
    """
    lane, warp = thread % 32, thread // 32
    for half in cutlass.range_constexpr(2):
        p = 16 * warp + lane // 4 + 8 * half
        for block in cutlass.range_constexpr(blocks):
            q = 8 * block + 2 * (lane % 4)
            left, right = acc[(0, half, first + block), row, 0], acc[(1, half, first + block), row, 0]
            if cutlass.const_expr(swap):
                _store_one(_place(tile, q, p, True), left)
                _store_one(_place(tile, q + 1, p, True), right)
            else:
                store_pair(_place(tile, p, q, False), left, right)


def _place(tile: Int32, line: Int32, column: Int32, swap: bool) -> Int32:
    """Address of an element of a staged tile of fp32."""
    turn = 2 * (line // 2 % 4) if swap else 2 * (line % 8)
    return tile + line * 256 + ((column // 4) ^ turn) * 16 + column % 4 * 4


@cute.jit
def store_any(
    tile: Int32,
    p0: Int32,
    q0: Int32,
    layer: Int32,
    columns: cutlass.Constexpr,
    swap: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    stride: cutlass.Constexpr,
    peer: Int32,
    thread: Int32,
    terms: Terms,
) -> None:
    """A staged 64×`columns` tile of fp32, whose corner is (p0, q0), through the epilogue into D.

    With parts > 1 the tile is the sum of those at the same address in the blocks `peer`, `peer + stride` … of
    the cluster, always in this order, so its bits don't depend on which block came first. Elements go four at
    a time where the tile lies inside D and D allows it, else one by one, neighbours by neighbouring threads.
    """
    if is_simple(terms):
        _store_lines(tile, p0, q0, layer, columns, swap, parts, stride, peer, thread, terms, False)
    else:
        _store_lines(tile, p0, q0, layer, columns, swap, parts, stride, peer, thread, terms, True)


@cute.jit
def _store_lines(
    tile: Int32,
    p0: Int32,
    q0: Int32,
    layer: Int32,
    columns: cutlass.Constexpr,
    swap: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    stride: cutlass.Constexpr,
    peer: Int32,
    thread: Int32,
    terms: Terms,
    rich: cutlass.Constexpr,
) -> None:
    """As `store_any`; without `rich` only alpha follows, and several loads are in flight."""
    lines, width = (columns, 64) if swap else (64, columns)
    line0, column0 = (q0, p0) if swap else (p0, q0)
    lines_d, width_d = (terms.q, terms.p) if swap else (terms.p, terms.q)
    d_line, d_column = (terms.d_q, terms.d_p) if swap else (terms.d_p, terms.d_q)
    kind = terms.code >> 7
    size = Int64(2)
    if kind == 3:
        size = Int64(4)
    corner = (
        terms.d + (Int64(layer) * terms.d_batch + Int64(line0) * d_line + Int64(column0) * d_column) * size
    )
    inside = (line0 + lines <= lines_d) & (column0 + width <= width_d)
    aligned = ((corner | (d_line * size)) % (4 * size) == 0) & (d_column == 1)
    if inside & aligned:
        count = lines * width // 512
        depth = 1 if rich else min(4, count)
        for step in cutlass.range(count // depth, unroll=1):
            places = [_spot((step * depth + i) * 128 + thread, width // 4) for i in range(depth)]
            vectors = [_sum(_place(tile, line, 4 * v, swap), 4, parts, stride, peer) for line, v in places]
            for (line, v), values in zip(places, vectors, strict=True):
                if cutlass.const_expr(rich):
                    scaled = [
                        _finish(value, line0 + line, column0 + 4 * v + i, layer, swap, terms)
                        for i, value in enumerate(values)
                    ]
                else:
                    scaled = [value * terms.alpha for value in values]
                _write_four(corner + (Int64(line) * d_line + 4 * v) * size, scaled, kind)
    else:
        count = lines * width // 128
        depth = 1 if rich else min(8, count)
        for step in cutlass.range(count // depth, unroll=1):
            places = [_spot((step * depth + i) * 128 + thread, width) for i in range(depth)]
            singles = [
                _sum(_place(tile, line, column, swap), 1, parts, stride, peer) for line, column in places
            ]
            for (line, column), (value,) in zip(places, singles, strict=True):
                if (line0 + line < lines_d) & (column0 + column < width_d):
                    if cutlass.const_expr(not rich):
                        scaled = value * terms.alpha
                    else:
                        scaled = _finish(value, line0 + line, column0 + column, layer, swap, terms)
                    _write(corner + (Int64(line) * d_line + Int64(column) * d_column) * size, scaled, kind)


def _spot(index: Int32, width: int) -> tuple[Int32, Int32]:
    return index // width, index % width


def _sum(address: Int32, count: int, parts: int, stride: int, peer: Int32) -> list[Float32]:
    """Element or four at an address; the sum over the blocks of the cluster where K is divided."""
    if parts == 1:
        return load(address, count, "shared")
    loads = [
        load(peer_address(address, peer + part * stride), count, "shared::cluster") for part in range(parts)
    ]
    total = loads[0]
    for each in loads[1:]:
        total = [a + b for a, b in zip(total, each, strict=True)]
    return total


@cute.jit
def _finish(
    value: Float32, line: Int32, column: Int32, layer: Int32, swap: cutlass.Constexpr, terms: Terms
) -> Float32:
    """act(alpha · value + (beta · C + bias)).

    Each sum is an explicit fused multiply-add or addition: were it left to the compiler, it could be contracted
    differently from tiling to tiling, and with it the last bit.
    """
    p, q = (column, line) if swap else (line, column)
    addend = Float32(0.0)
    bias_type = (terms.code >> 4) & 3
    if bias_type != 0:
        along_p = ((terms.code & BIAS_ALONG_M) != 0) != swap
        where = q
        if along_p:
            where = p
        addend = _read(terms.bias, Int64(where), bias_type)
    c_type = (terms.code >> 2) & 3
    if c_type != 0:
        offset = Int64(layer) * terms.c_batch + Int64(p) * terms.c_p + Int64(q) * terms.c_q
        addend = cute.math.fma(_read(terms.c, offset, c_type), terms.beta, addend)
    value = cute.math.fma(value, terms.alpha, addend)
    activation = terms.code & 3
    if (activation == 1) & (value < 0.0):
        value = Float32(0.0)
    if activation == 2:
        half = value * 0.5
        value = cute.math.fma(half, cute.math.erf(value * 0.7071067811865476), half)
    if activation == 3:
        value = value / _add(cute.math.exp(-value), Float32(1.0))
    return value


def element(dtype: Any, base: Int64, offset: Int64) -> cute.Tensor:
    """Element `offset` of an array of global memory, as a tensor of one."""
    pointer = cute.make_ptr(dtype, base + offset * (dtype.width // 8), cute.AddressSpace.gmem)
    return cute.make_tensor(pointer, cute.make_layout(1))


@cute.jit
def _read(base: Int64, offset: Int64, kind: Int32) -> Float32:
    """Element at `offset` of the type `kind`: 1 fp16, 2 bf16, 3 fp32."""
    value = Float32(0.0)
    if kind == 1:
        value = element(Float16, base, offset)[0].to(Float32)
    elif kind == 2:
        value = element(BFloat16, base, offset)[0].to(Float32)
    else:
        value = element(Float32, base, offset)[0]
    return value


@cute.jit
def _write(address: Int64, value: Float32, kind: Int32) -> None:
    """One element of the type `kind`."""
    if kind == 3:
        element(Float32, address, Int64(0))[0] = value
    else:
        element(cutlass.Int16, address, Int64(0))[0] = _halves(value, value, kind).to(cutlass.Int16)


@cute.jit
def _write_four(address: Int64, values: list[Float32], kind: Int32) -> None:
    if kind == 3:
        store_words(address, values)
    else:
        store_words(address, [_halves(values[0], values[1], kind), _halves(values[2], values[3], kind)])


@cute.jit
def _halves(low: Float32, high: Float32, kind: Int32) -> Int32:
    """Two fp32 rounded to fp16 (kind 1) or bf16 (kind 2) in one register."""
    word = pack_pair(high, low, Float16)
    if kind == 2:
        word = pack_pair(high, low, BFloat16)
    return word


def is_simple(terms: Terms) -> Boolean:
    """Nothing but alpha follows the product."""
    return (terms.code & 0x7F) == 0
