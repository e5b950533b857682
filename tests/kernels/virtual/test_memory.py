"""Loads, stores, atomics, matrices, and what lanes tell each other."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.virtual.snippet import each_lane, execute, good, kinds

LANE = np.arange(32, dtype=np.uint32)
MINE = "mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d0, %d60;"  # %d61: this lane's word of array 0


def test_vectors_of_four_go_through_shared_memory() -> None:
    out = np.zeros((32, 4), np.uint32)
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2;
    add.s32 %r4, %r0, 100; add.s32 %r5, %r0, 200; add.s32 %r6, %r0, 300;
    st.shared.v4.b32 [%r3], {%r0, %r4, %r5, %r6};
    ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];
    mul.wide.u32 %d60, %r0, 16; add.s64 %d61, %d0, %d60;
    st.global.v4.b32 [%d61], {%r13, %r12, %r11, %r10};
    """
    good(execute(body, out))
    np.testing.assert_array_equal(out, LANE[:, None] + np.array([300, 200, 100, 0], np.uint32))


def test_narrow_loads_extend() -> None:
    out = np.zeros(2, np.uint32)
    data = np.array([0x80FF], np.uint32)
    good(
        execute(
            "ld.global.s16 %r1, [%d1]; ld.global.u8 %r2, [%d1]; st.global.v2.b32 [%d0], {%r1, %r2};",
            out,
            data,
        )
    )
    assert out.tolist() == [0xFFFF80FF, 0xFF]


def test_only_active_lanes_store() -> None:
    out = np.full(32, 7, np.uint32)
    body = f"{MINE} setp.lt.u32 %p1, %r0, 5; @%p1 st.global.b32 [%d61], %r0; setp.gt.u32 %p2, %r0, 29; @!%p2 bra $X;"
    good(execute(body + "st.global.b32 [%d61], %r0; $X:", out))
    np.testing.assert_array_equal(out, np.where((LANE < 5) | (LANE > 29), LANE, 7))


def test_atomics_add_lane_by_lane() -> None:
    out = np.zeros(1, np.uint32)
    olds = np.zeros(32, np.uint32)
    body = """
    atom.global.add.u32 %r1, [%d0], 2;
    mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d1, %d60; st.global.b32 [%d61], %r1;
    """
    good(execute(body, out, olds))
    assert out[0] == 64
    np.testing.assert_array_equal(olds, 2 * LANE)


def test_compare_and_swap_and_float_add() -> None:
    out = np.array([5, 0x3F800000], np.uint32)
    body = """
    setp.eq.u32 %p1, %r0, 3; @!%p1 bra $X;
    atom.global.cas.b32 %r1, [%d0], 5, 9; red.global.add.f32 [%d0+4], 0f3f000000;
    $X:
    """
    good(execute(body, out))
    assert out.tolist() == [9, 0x3FC00000]


def test_stmatrix_and_ldmatrix_are_inverse_and_transpose() -> None:
    out = np.zeros(32, np.uint32)
    body = f"""
    {MINE} mov.b32 %r1, smem; and.b32 %r2, %r0, 7; shl.b32 %r2, %r2, 4; add.s32 %r3, %r1, %r2;
    stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {{%r0}};
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {{%r4}}, [%r3];
    st.global.b32 [%d61], %r4;
    """
    good(execute(body, out))
    matrix = LANE.view(np.uint16).reshape(8, 8)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), matrix.T)


def test_stmatrix_of_bytes_stores_columns() -> None:
    """Two matrices of 16 x 8 bytes: byte b of lane t is element [t/4 + 8(b/2), 2(t%4) + b%2]."""
    out, registers = np.zeros(64, np.uint32), np.random.default_rng(3).integers(0, 256, (2, 32, 4), np.uint8)
    body = f"""
    {MINE} mov.b32 %r1, smem; and.b32 %r2, %r0, 15; shl.b32 %r2, %r2, 4; add.s32 %r3, %r1, %r2;
    mul.wide.u32 %d40, %r0, 4; add.s64 %d41, %d1, %d40; ld.global.b32 %r5, [%d41]; ld.global.b32 %r6, [%d41+128];
    stmatrix.sync.aligned.m16n8.x2.trans.shared.b8 [%r3], {{%r5, %r6}};
    shl.b32 %r7, %r0, 2; add.s32 %r7, %r7, %r1; ld.shared.b32 %r8, [%r7]; ld.shared.b32 %r9, [%r7+128];
    st.global.b32 [%d61], %r8; st.global.b32 [%d61+128], %r9;
    """
    good(execute(body, out, registers))
    expected = np.zeros((2, 8, 16), np.uint8)
    for matrix in range(2):
        for lane in range(32):
            for byte in range(4):
                row, column = lane // 4 + 8 * (byte // 2), 2 * (lane % 4) + byte % 2
                expected[matrix, column, row] = registers[matrix, lane, byte]
    np.testing.assert_array_equal(out.view(np.uint8), expected.ravel())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("shfl.sync.idx.b32 %r31|%p1, %r1, 5, 31, -1;", np.full(32, 50)),
        ("shfl.sync.bfly.b32 %r31|%p1, %r1, 4, 31, -1;", 10 * (LANE ^ 4)),
        ("shfl.sync.up.b32 %r31|%p1, %r1, 2, 0, -1;", 10 * np.where(LANE >= 2, LANE - 2, LANE)),
        ("shfl.sync.down.b32 %r31|%p1, %r1, 3, 31, -1;", 10 * np.where(LANE <= 28, LANE + 3, LANE)),
        ("shfl.sync.idx.b32 %r31, %r1, %r0, 0x181f, -1;", 10 * LANE),
        ("setp.gt.u32 %p1, %r0, 20; vote.sync.ballot.b32 %r31, %p1, -1;", np.full(32, 0xFFE00000)),
        ("redux.sync.add.u32 %r31, %r0, -1;", np.full(32, 496)),
        ("redux.sync.max.s32 %r31, %r0, -1;", np.full(32, 31)),
        ("elect.sync %r31|%p1, -1; @%p1 add.s32 %r31, %r31, 100;", np.where(LANE == 0, 100, 0)),
    ],
)
def test_lanes_exchange(code: str, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(each_lane(f"mul.lo.s32 %r1, %r0, 10; {code}"), expected)


def test_shared_memory_starts_as_nan() -> None:
    out = np.zeros(1, np.uint32)
    good(execute("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1]; st.global.b32 [%d0], %r2;", out))
    assert np.isnan(out.view(np.float32))[0]


def test_bounds_and_alignment_are_faults() -> None:
    out = np.zeros(32, np.uint32)
    run = execute("st.global.b32 [%d0+128], %r0;", out)
    assert kinds(run) == {"bounds"}
    assert "array 0" in str(run.findings[0])
    assert kinds(execute("st.global.b32 [%d0+2], %r0;", out)) == {"alignment"}
    assert kinds(execute("mov.b32 %r1, smem; st.shared.b32 [%r1+8192], %r0;", out)) == {"bounds"}
    assert kinds(execute("mov.b32 %r1, smem; ld.shared.v2.b32 {%r2, %r3}, [%r1+4];", out)) == {"alignment"}


def test_an_index_that_the_compiler_folded_wraps() -> None:
    out = np.zeros(1, np.uint32)
    body = """
    mov.b32 %r1, smem; mov.b32 %r5, 77; st.shared.b32 [%r1], %r5;
    sub.s32 %r2, 0, 2048; add.s32 %r2, %r2, %r1; ld.shared.b32 %r3, [%r2+2048];
    st.global.b32 [%d0], %r3;
    """
    good(execute(body, out))
    assert out[0] == 77


def test_a_cta_reaches_the_memory_of_another() -> None:
    out = np.zeros(2, np.uint32)
    body = """
    mov.u32 %r1, %cluster_ctarank; mov.b32 %r2, smem; add.s32 %r3, %r1, 40;
    st.shared.b32 [%r2], %r3;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r4, %r1, 1; mapa.shared::cluster.u32 %r5, %r2, %r4;
    ld.shared::cluster.b32 %r6, [%r5];
    mul.wide.u32 %d60, %r1, 4; add.s64 %d61, %d0, %d60; st.global.b32 [%d61], %r6;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    good(execute(body, out, grid=(2, 1, 1), cluster=(2, 1, 1)))
    assert out.tolist() == [41, 40]


def test_generic_addresses_find_their_space() -> None:
    out = np.zeros(1, np.uint32)
    body = """
    mov.b32 %r1, smem; cvt.u64.u32 %d1, %r1; cvta.shared.u64 %d2, %d1;
    mov.b32 %r2, 5; st.b32 [%d2], %r2; ld.b32 %r3, [%d2]; st.b32 [%d0], %r3;
    """
    good(execute(body, out))
    assert out[0] == 5


@pytest.mark.parametrize(
    ("what", "expected"), [("min", -3.5), ("max", 3.0), ("max.abs", 3.5), ("max.NaN", np.nan)]
)
def test_floats_reduce_over_the_warp(what: str, expected: float) -> None:
    values = np.linspace(-3.5, 3.0, 32, dtype=np.float32)
    values[5] = np.nan
    out = each_lane(f"redux.sync.{what}.f32 %r31, %r1, -1;", values.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(out, np.full(32, expected, np.float32))


def test_every_lane_has_its_own_local_memory() -> None:
    """An array that is indexed by a value that differs from lane to lane."""
    out = np.zeros(32, np.uint32)
    body = f"""
    .local .align 16 .b8 depot[64];
    mov.b64 %d20, depot; cvta.local.u64 %d21, %d20; cvta.to.local.u64 %d22, %d21;
    add.s32 %r1, %r0, 100; add.s32 %r2, %r0, 200;
    st.local.v2.b32 [%d22+8], {{%r1, %r2}};
    and.b32 %r3, %r0, 1; mul.wide.u32 %d23, %r3, 4; add.s64 %d24, %d22, %d23; ld.local.b32 %r4, [%d24+8];
    {MINE} st.global.b32 [%d61], %r4;
    """
    good(execute(body, out))
    np.testing.assert_array_equal(out, LANE + 100 + 100 * (LANE & 1))
    generic = body.replace("ld.local.b32 %r4, [%d24+8]", "add.s64 %d25, %d21, %d23; ld.b32 %r4, [%d25+8]")
    good(execute(generic, out))
    np.testing.assert_array_equal(out, LANE + 100 + 100 * (LANE & 1))
    beyond = body.replace("ld.local.b32 %r4, [%d24+8]", "ld.local.b32 %r4, [%d24+64]")
    assert kinds(execute(beyond, out)) == {"bounds"}
