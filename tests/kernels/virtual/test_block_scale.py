"""Block-scaled products: scales come to tensor memory by tcgen05.cp, and every value is scaled by its own."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kernels.virtual.launch import EARLY, LATE, Schedule
from kernels.virtual.report import Run
from tests.kernels.virtual.snippet import STORE_D, execute, good, kinds, stage
from tests.kernels.virtual.test_tensor import descriptor, staged

A_AT, B_AT, SFA_AT, SFB_AT = 1024, 17408, 25600, 26112
BODY = (
    stage(25600, 128, "fence.proxy.async.shared::cta;")
    + """
    add.s32 %r16, %r10, 64; add.s32 %r17, %r10, 68;
    @%p2 bra $LOAD;
    elect.sync %r21|%p3, -1; @!%p3 bra $LOAD;
    mov.b64 %d30, {a}; mov.b64 %d31, {b}; mov.b64 %d32, {sfa}; mov.b64 %d33, {sfb};
    mov.b32 %r11, {idesc}; setp.ne.u32 %p4, %r1, %r1;
    {copy}
    tcgen05.mma.cta_group::1.{kind} [%r10], %d30, %d31, %r11, [%r16], [%r17], %p4;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];
    $LOAD:
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra $W;
"""
    + STORE_D
    + """
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 128;
    $END:
"""
)
COPY = """tcgen05.cp.cta_group::1.32x128b.warpx4 [%r16], %d32;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r17], %d33;"""
SHAPE = (64 >> 3) << 17 | (128 >> 7) << 27


def scales(values: np.ndarray) -> np.ndarray:
    """Bytes of scales [rows, 4] as tcgen05.cp takes them: row r in lane r % 32 and word r / 32."""
    out = np.zeros((32, 4, 4), np.uint8)
    rows = values.shape[0]
    out[:, : rows // 32] = values.view(np.uint8).reshape(rows // 32, 32, 4).transpose(1, 0, 2)
    return out.ravel()


def packed(codes: np.ndarray) -> np.ndarray:
    """Two codes of 4 bits a byte, the first one low."""
    out: np.ndarray = codes[:, ::2] | codes[:, 1::2] << 4
    return out


def product(
    kind: str, idesc: int, a: np.ndarray, b: np.ndarray, sfa: np.ndarray, sfb: np.ndarray, copy: str = COPY,
    schedule: Schedule = LATE,
) -> tuple[Run, np.ndarray]:  # fmt: skip
    data = np.concatenate([staged(a, A_AT, a.dtype), staged(b, B_AT, b.dtype), scales(sfa), scales(sfb)])
    flat = [at >> 4 | 1 << 16 | 8 << 32 for at in (SFA_AT, SFB_AT)]
    out = np.zeros((128, 64), np.float32)
    text = BODY.format(
        a=descriptor(A_AT), b=descriptor(B_AT), sfa=flat[0], sfb=flat[1], idesc=idesc, kind=kind, copy=copy
    )
    run = execute(text, out, data, block=128, smem=28_000, schedule=schedule)
    return run, out


def drawn(rows: int, dtype: type) -> np.ndarray:
    """Scales: powers of two."""
    random = np.random.default_rng(rows)
    values = 2.0 ** random.integers(-2, 3, (rows, 4))
    out: np.ndarray = values.astype(dtype)
    return out


@pytest.mark.parametrize("schedule", [EARLY, LATE, Schedule("random", 3)], ids=str)
@pytest.mark.parametrize("name", [0, 3])
def test_values_of_8_bits_have_one_scale_a_row(schedule: Schedule, name: int) -> None:
    random = np.random.default_rng(5)
    a = random.integers(-3, 4, (128, 32)).astype(ml_dtypes.float8_e4m3fn)
    b = random.integers(-3, 4, (64, 32)).astype(ml_dtypes.float8_e5m2)
    sfa, sfb = drawn(128, ml_dtypes.float8_e8m0fnu), drawn(64, ml_dtypes.float8_e8m0fnu)
    idesc = SHAPE | 1 << 10 | 1 << 23 | name << 29 | name << 4
    run, out = product("kind::mxf8f6f4.block_scale.scale_vec::1X", idesc, a, b, sfa, sfb, schedule=schedule)
    good(run)
    left = a.astype(np.float32) * sfa[:, name : name + 1].astype(np.float32)
    right = b.astype(np.float32) * sfb[:, name : name + 1].astype(np.float32)
    np.testing.assert_array_equal(out, left @ right.T)


@pytest.mark.parametrize(
    ("kind", "scale", "vector", "code", "name"),
    [
        ("kind::mxf4nvf4.block_scale.scale_vec::4X", ml_dtypes.float8_e4m3fn, 4, 0, 0),
        ("kind::mxf4nvf4.block_scale.block16", ml_dtypes.float8_e8m0fnu, 4, 1, 0),
        ("kind::mxf4.block_scale.scale_vec::2X", ml_dtypes.float8_e8m0fnu, 2, 1, 2),
    ],
)
def test_values_of_4_bits_are_scaled_by_16_or_32(
    kind: str, scale: type, vector: int, code: int, name: int
) -> None:
    random = np.random.default_rng(6)
    a, b = (random.integers(0, 16, (rows, 64)).astype(np.uint8) for rows in (128, 64))
    sfa, sfb = drawn(128, scale), drawn(64, scale)
    idesc = SHAPE | 1 << 7 | 1 << 10 | code << 23 | name << 29 | name << 4
    run, out = product(kind, idesc, packed(a), packed(b), sfa, sfb)
    good(run)
    both = []
    for codes, factors in ((a, sfa), (b, sfb)):
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        used = factors[:, name : name + vector].astype(np.float32)
        both.append(values * np.repeat(used, 64 // vector, axis=1))
    np.testing.assert_array_equal(out, both[0] @ both[1].T)


def test_scales_have_to_be_in_all_four_quarters() -> None:
    """A copy of 128 rows puts other words into each quarter of the lanes."""
    a, b = np.zeros((128, 32), ml_dtypes.float8_e4m3fn), np.zeros((64, 32), ml_dtypes.float8_e4m3fn)
    ones = np.ones((128, 4), ml_dtypes.float8_e8m0fnu)
    other = COPY.replace("32x128b.warpx4 [%r16]", "128x128b [%r16]")
    run, _ = product("kind::mxf8f6f4.block_scale", SHAPE | 1 << 23, a, b, ones, 2 * ones[:64], other)
    assert any("quarters" in finding.text for finding in run.findings)


def test_scales_that_nobody_wrote_are_nan() -> None:
    a, b = np.ones((128, 32), ml_dtypes.float8_e4m3fn), np.ones((64, 32), ml_dtypes.float8_e4m3fn)
    ones = np.ones((128, 4), ml_dtypes.float8_e8m0fnu)
    run, out = product("kind::mxf8f6f4.block_scale", SHAPE | 1 << 23, a, b, ones, ones[:64], "")
    good(run)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    "idesc", [SHAPE | 1 << 23 | 1 << 15, SHAPE, SHAPE | 1 << 23 | 3 << 7, SHAPE & ~(3 << 27) | 1 << 23]
)
def test_what_is_not_modelled_is_said(idesc: int) -> None:
    """MN-major, scales of another type, six bits, M = 0."""
    a, b = np.ones((128, 32), ml_dtypes.float8_e4m3fn), np.ones((64, 32), ml_dtypes.float8_e4m3fn)
    ones = np.ones((128, 4), ml_dtypes.float8_e8m0fnu)
    run, _ = product("kind::mxf8f6f4.block_scale", idesc, a, b, ones, ones[:64])
    assert kinds(run) == {"protocol"}
