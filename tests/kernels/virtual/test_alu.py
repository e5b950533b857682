"""Arithmetic: each instruction over 32 lanes and over uniform values, against exact expectations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kernels.virtual import lanes
from kernels.virtual.emit import Unknown
from kernels.virtual.translate import translate
from tests.kernels.virtual.snippet import each_lane, execute, good, module

RNG = np.random.default_rng(1)
A = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
B = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
A[:4], B[:4] = (0, 1, 0x80000000, 0xFFFFFFFF), (0xFFFFFFFF, 0, 0x80000000, 1)
WIDE = RNG.integers(0, 1 << 63, 32, dtype=np.uint64)
F = RNG.standard_normal(32).astype(np.float32)
G = RNG.standard_normal(32).astype(np.float32)


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32).astype(np.int64)


INTEGER = {
    "add.s32 %r31, %r1, %r2;": A + B,
    "sub.s32 %r31, %r1, %r2;": A - B,
    "mul.lo.s32 %r31, %r1, %r2;": A * B,
    "mul.hi.u32 %r31, %r1, %r2;": (A.astype(np.uint64) * B >> np.uint64(32)).astype(np.uint32),
    "mul.hi.s32 %r31, %r1, %r2;": (signed(A) * signed(B) >> 32).astype(np.int32).view(np.uint32),
    "mad.lo.s32 %r31, %r1, %r2, %r1;": A * B + A,
    "and.b32 %r31, %r1, %r2;": A & B,
    "or.b32 %r31, %r1, 255;": A | 255,
    "xor.b32 %r31, %r1, -1;": ~A,
    "not.b32 %r31, %r1;": ~A,
    "shl.b32 %r31, %r1, 5;": A << 5,
    "shr.u32 %r31, %r1, 5;": A >> 5,
    "shr.s32 %r31, %r1, 5;": (A.view(np.int32) >> 5).view(np.uint32),
    "shl.b32 %r31, %r1, 32;": np.zeros(32, np.uint32),
    "shr.s32 %r31, %r1, 40;": (A.view(np.int32) >> 31).view(np.uint32),
    "and.b32 %r3, %r2, 63; shl.b32 %r31, %r1, %r3;": np.where(
        (B & 63) < 32, A.astype(np.uint64) << (B & 31), 0
    ).astype(np.uint32),
    "min.s32 %r31, %r1, %r2;": np.minimum(A.view(np.int32), B.view(np.int32)).view(np.uint32),
    "max.u32 %r31, %r1, %r2;": np.maximum(A, B),
    "neg.s32 %r31, %r1;": (-A.view(np.int32)).view(np.uint32),
    "abs.s32 %r31, %r1;": np.abs(A.view(np.int32)).view(np.uint32),
    "popc.b32 %r31, %r1;": np.array([int(x).bit_count() for x in A], np.uint32),
    "clz.b32 %r31, %r1;": np.array([32 - int(x).bit_length() for x in A], np.uint32),
    "brev.b32 %r31, %r1;": np.array([int(f"{x:032b}"[::-1], 2) for x in A], np.uint32),
    "bfe.u32 %r31, %r1, 4, 8;": A >> 4 & 255,
    "bfe.s32 %r31, %r1, 4, 8;": (A << 20).view(np.int32).__rshift__(24).view(np.uint32),
    "bfi.b32 %r31, %r1, %r2, 4, 8;": (B & ~np.uint32(0xFF0)) | (A & 255) << 4,
    "lop3.b32 %r31, %r1, %r2, 15, 0x96;": A ^ B ^ 15,
    "lop3.b32 %r31, %r1, %r2, 15, 0xe8;": (A & B) | (A & 15) | (B & 15),
    "prmt.b32 %r31, %r1, %r2, 0x5410;": (A & 0xFFFF) | (B & 0xFFFF) << 16,
    "shf.l.wrap.b32 %r31, %r1, %r2, 8;": B << 8 | A >> 24,
    "shf.r.clamp.b32 %r31, %r1, %r2, 8;": B << 24 | A >> 8,
    "setp.lt.s32 %p1, %r1, %r2; selp.b32 %r31, 7, %r2, %p1;": np.where(signed(A) < signed(B), 7, B),
    "setp.ge.u32 %p1, %r1, %r2; @%p1 mov.b32 %r2, 9; mov.b32 %r31, %r2;": np.where(A >= B, 9, B),
    "cvt.u64.u32 %d9, %r1; shr.u64 %d9, %d9, 8; cvt.u32.u64 %r31, %d9;": A >> 8,
    "cvt.s16.s32 %h1, %r1; cvt.s32.s16 %r31, %h1;": A.astype(np.uint16)
    .view(np.int16)
    .astype(np.int32)
    .view(np.uint32),
    "mov.b64 %d9, {%r1, %r2}; mov.b64 {%r3, %r31}, %d9;": B,
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r31, {%h2, %h1};": A >> 16 | A << 16,
}


@pytest.mark.parametrize("code", INTEGER)
def test_integer_instructions(code: str) -> None:
    np.testing.assert_array_equal(each_lane(code, A, B), INTEGER[code].astype(np.uint32))


@pytest.mark.parametrize("code", INTEGER)
def test_uniform_operands_give_what_vectors_give(code: str) -> None:
    """The same code with all operands uniform runs on Python integers."""
    out = np.zeros(1, np.uint32)
    values = np.array([A[7], B[7]], np.uint32)
    body = f"ld.global.b32 %r1, [%d1]; ld.global.b32 %r2, [%d1+4];\n{code}\nst.global.b32 [%d0], %r31;"
    good(execute(body, out, values))
    assert out[0] == INTEGER[code].astype(np.uint32)[7]


def test_wide_products_and_64_bits() -> None:
    product = each_lane("mul.wide.u32 %d40, %r1, %r2;", A, B, bits=64, result="%d40")
    np.testing.assert_array_equal(product, A.astype(np.uint64) * B)
    product = each_lane("mul.wide.s32 %d40, %r1, %r2;", A, B, bits=64, result="%d40")
    np.testing.assert_array_equal(product, (signed(A) * signed(B)).view(np.uint64))
    shifted = each_lane("shr.u64 %d40, %d33, 7; add.s64 %d40, %d40, 1;", WIDE, bits=64, result="%d40")
    np.testing.assert_array_equal(shifted, (WIDE >> np.uint64(7)) + np.uint64(1))


def test_division() -> None:
    b = B | 1
    np.testing.assert_array_equal(each_lane("div.u32 %r31, %r1, %r2;", A, b), A // b)
    np.testing.assert_array_equal(each_lane("rem.u32 %r31, %r1, %r2;", A, b), A % b)
    quotient = np.fix(signed(A) / signed(b)).astype(np.int64).astype(np.uint32)
    np.testing.assert_array_equal(each_lane("div.s32 %r31, %r1, %r2;", A, b), quotient)


FLOAT = {
    "add.f32 %r31, %r1, %r2;": F + G,
    "sub.rn.f32 %r31, %r1, %r2;": F - G,
    "mul.rn.f32 %r31, %r1, %r2;": F * G,
    "fma.rn.f32 %r31, %r1, %r2, %r1;": (F.astype(np.float64) * G + F).astype(np.float32),
    "div.rn.f32 %r31, %r1, %r2;": F / G,
    "min.f32 %r31, %r1, %r2;": np.fmin(F, G),
    "max.NaN.f32 %r31, %r1, %r2;": np.maximum(F, G),
    "abs.f32 %r31, %r1;": np.abs(F),
    "neg.f32 %r31, %r1;": -F,
    "ex2.approx.f32 %r31, %r1;": np.exp2(F),
    "rcp.approx.f32 %r31, %r1;": np.float32(1) / F,
    "mul.f32 %r31, %r1, 0f40000000;": F * 2,
    "cvt.rzi.s32.f32 %r3, %r1; cvt.rn.f32.s32 %r31, %r3;": np.trunc(F),
    "cvt.rn.f16.f32 %h1, %r1; cvt.f32.f16 %r31, %h1;": F.astype(np.float16).astype(np.float32),
    "fma.rm.f32 %r31, %r1, 0f3f800000, 0f4b400001;": np.floor(F) + np.float32(12582913),
}


@pytest.mark.parametrize("code", FLOAT)
def test_float_instructions(code: str) -> None:
    out = each_lane(code, F.view(np.uint32), G.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(out, FLOAT[code])


def test_packed_halves() -> None:
    halves = np.stack([F, G], 1).astype(np.float16)
    words = each_lane("cvt.rn.f16x2.f32 %r31, %r2, %r1;", F.view(np.uint32), G.view(np.uint32))
    np.testing.assert_array_equal(words.view(np.float16).reshape(32, 2), halves)
    doubled = each_lane("add.f16x2 %r31, %r1, %r1;", words)
    np.testing.assert_array_equal(doubled.view(np.float16).reshape(32, 2), halves + halves)


def test_bf16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0x7FC00001, 0xFF7FFFFF] + [0] * 26, np.uint32
    )
    words = each_lane("cvt.rn.bf16x2.f32 %r31, %r1, %r1;", bits)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FFF, 0xFF80]
    assert [int(w & 0xFFFF) for w in words[:6]] == expected
    assert [int(w >> 16) for w in words[:6]] == expected


def test_two_fp32_at_once() -> None:
    pairs = (F.view(np.uint32).astype(np.uint64) << np.uint64(32)) | G.view(np.uint32)
    out = each_lane("fma.rn.f32x2 %d40, %d33, %d33, %d33;", pairs, bits=64, result="%d40")
    got = out.view(np.float32).reshape(32, 2)
    expected = np.stack([G, F], 1).astype(np.float64)
    np.testing.assert_array_equal(got, (expected * expected + expected).astype(np.float32))


def test_comparisons_know_nan() -> None:
    a = np.array([1, 2, np.nan, 3] * 8, np.float32)
    b = np.array([1, 3, 1, np.nan] * 8, np.float32)
    for compare, expected in {
        "lt": a < b,
        "geu": ~(a < b),
        "ne": (a < b) | (a > b),
        "nan": np.isnan(a + b),
    }.items():
        code = f"setp.{compare}.f32 %p1, %r1, %r2; selp.b32 %r31, 1, 0, %p1;"
        np.testing.assert_array_equal(each_lane(code, a.view(np.uint32), b.view(np.uint32)), expected)


def test_divergent_branches_meet_again() -> None:
    """Lanes that took different ways hold different values in one register, with a loop of a count a lane."""
    code = """
    mov.b32 %r31, 0; and.b32 %r3, %r0, 7; mov.b32 %r4, 0;
    setp.gt.u32 %p1, %r0, 15; @%p1 bra $HIGH;
    $LOOP: setp.ge.u32 %p2, %r4, %r3; @%p2 bra $JOIN;
    add.s32 %r31, %r31, 10; add.s32 %r4, %r4, 1; bra $LOOP;
    $HIGH: add.s32 %r31, %r0, 1000;
    $JOIN: add.s32 %r31, %r31, 1;
    """
    lane = np.arange(32)
    np.testing.assert_array_equal(each_lane(code), np.where(lane > 15, lane + 1001, lane % 8 * 10 + 1))


def test_scopes_have_labels_and_registers_of_their_own() -> None:
    """As inline assembly writes loops, twice with the same names."""
    loop = """
    { .reg .pred P1; .reg .b32 count; mov.b32 count, 0;
    AGAIN: add.s32 count, count, 1; setp.eq.u32 P1, count, @N@; @P1 bra.uni DONE; bra.uni AGAIN;
    DONE: add.s32 %r31, %r31, count; }
    """
    code = "mov.b32 %r31, 0;" + loop.replace("@N@", "3") + loop.replace("@N@", "4")
    np.testing.assert_array_equal(each_lane(code), 7)


def test_unknown_instructions_are_named_with_their_line() -> None:
    text = module("mov.b32 %r1, 0;\nvset4.u32.u32.eq %r2, %r1, %r1, %r1;", 1)
    with pytest.raises(Unknown, match=r"vset4.u32.u32.eq at PTX line \d+"):
        translate(text)
    with pytest.raises(Unknown, match=r"add.rz.f64"):
        translate(module("add.rz.f64 %d1, %d1, %d1;", 1))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)]
)
def test_two_fp32_become_fp8_clamped(kind: str, dtype: type) -> None:
    high = np.linspace(-3, 5, 32, dtype=np.float32)
    low = np.full(32, 1e6, np.float32)
    out = each_lane(
        f"cvt.rn.satfinite.{kind}.f32 %h1, %r1, %r2; cvt.u32.u16 %r31, %h1;",
        high.view(np.uint32),
        low.view(np.uint32),
    )
    np.testing.assert_array_equal((out >> 8).astype(np.uint8), high.astype(dtype).view(np.uint8))
    largest = {"e4m3x2": 448.0, "e5m2x2": 57344.0}[kind]
    np.testing.assert_array_equal((out & 255).astype(np.uint8).view(dtype).astype(np.float32), largest)


def test_two_fp32_become_fp4_clamped() -> None:
    """The first source in the upper half of the byte; ties go to even, NaN to the largest."""
    high = np.linspace(-7, 7, 32, dtype=np.float32)
    low = np.where(np.arange(32) % 2, np.nan, 2.5).astype(np.float32)
    out = each_lane(
        "{ .reg .b8 %b1; cvt.rn.satfinite.e2m1x2.f32 %b1, %r1, %r2; cvt.u32.u8 %r31, %b1; }",
        high.view(np.uint32),
        low.view(np.uint32),
    )
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = np.clip(high, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(values[out >> 4], expected)
    np.testing.assert_array_equal(values[out & 15], np.where(np.isnan(low), 6.0, 2.0))


def test_an_elements_bits_do_not_depend_on_the_shape_of_its_product() -> None:
    random = np.random.default_rng(3)
    for k in (16, 32):
        x, y = (random.standard_normal((n, k)).astype(np.float16).astype(np.float32) for n in (64, 256))
        whole = lanes.dot(x, y)
        for m, n in ((16, 8), (64, 24), (5, 256), (1, 1)):
            np.testing.assert_array_equal(lanes.dot(x[-m:], y[-n:]), whole[-m:, -n:])


def test_an_elements_bits_do_not_depend_on_its_lane() -> None:
    x = np.random.default_rng(4).standard_normal(32).astype(np.float32)
    for function in (np.exp2, np.sin, np.cos, np.tanh):
        np.testing.assert_array_equal([lanes.smooth(function, each) for each in x], lanes.smooth(function, x))
