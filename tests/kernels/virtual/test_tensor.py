"""Tensor cores and tensor memory, from descriptors to accumulators."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kernels.virtual.launch import EARLY, LATE, Schedule
from kernels.virtual.report import Run
from kernels.virtual.tensormap import swizzle
from tests.kernels.virtual.snippet import STORE_D, execute, good, kinds, stage

SCHEDULES = [EARLY, LATE, Schedule("random", 2)]


def staged(values: np.ndarray, offset: int, dtype: object = np.float16) -> np.ndarray:
    """Bytes of a K-major operand of 32 bytes a row under the 128-byte swizzle, rows at a pitch of 128 bytes."""
    rows = values.shape[0]
    out = np.zeros(rows * 128, np.uint8)
    logical = np.arange(rows)[:, None] * 128 + np.arange(32)[None, :] + offset
    out[swizzle(logical, 128) - offset] = values.astype(dtype).view(np.uint8).reshape(rows, 32)  # type: ignore[call-overload]
    return out


def descriptor(offset: int) -> int:
    return offset >> 4 | 1 << 16 | (1024 >> 4) << 32 | 2 << 61


A_AT, B_AT = 1024, 1024 + 128 * 128
IDESC = 1 << 4 | (64 >> 3) << 17 | (128 >> 4) << 24  # fp16, fp32 accumulator, 128 x 64
COPY = (
    stage(24576, 64, "{fence}")
    + """
    @%p2 bra $LOAD;
    elect.sync %r21|%p3, -1; @!%p3 bra $LOAD;
    mov.b64 %d30, {a}; mov.b64 %d31, {b}; mov.b32 %r11, {idesc}; setp.ne.u32 %p4, %r1, %r1; setp.eq.u32 %p5, %r1, %r1;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %d30, %d31, %r11, %p4;
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %d30, %d31, %r11, %p5;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];
    $LOAD:
    {wait}
    tcgen05.fence::after_thread_sync;
"""
    + STORE_D
    + """
    {free}
    $END:
"""
)
PARTS = {
    "fence": "fence.proxy.async.shared::cta;",
    "wait": "$W: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra $W;",
    "free": "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;",
    "a": str(descriptor(A_AT)),
    "b": str(descriptor(B_AT)),
    "idesc": str(IDESC),
}


def multiply(schedule: Schedule = LATE, **changes: str) -> tuple[Run, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    a, b = random.integers(-3, 4, (128, 16)), random.integers(-3, 4, (64, 16))
    data = np.concatenate([staged(a, A_AT), staged(b, B_AT)])
    out = np.zeros((128, 64), np.float32)
    run = execute(COPY.format(**(PARTS | changes)), out, data, block=128, smem=24_700, schedule=schedule)
    return run, out, 2 * (a @ b.T)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_mmas_accumulate(schedule: Schedule) -> None:
    run, out, expected = multiply(schedule)
    good(run)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("part", "text", "kind"),
    [
        ("fence", "", "proxy fence"),
        ("wait", "", "race"),
        ("free", "", "tensor memory"),
        ("free", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;", "tensor memory"),
        ("idesc", str(IDESC & ~(31 << 24) | 6 << 24), "protocol"),
        ("idesc", str(IDESC & ~(63 << 17) | 16 << 17), "bounds"),
    ],
)
def test_faults(part: str, text: str, kind: str) -> None:
    run, *_ = multiply(EARLY, **{part: text})
    assert kind in kinds(run)


@pytest.mark.parametrize(
    ("kind", "dtype", "code"),
    [
        ("tf32", np.float32, 2),
        ("f8f6f4", ml_dtypes.float8_e4m3fn, 0),
        ("f8f6f4", ml_dtypes.float8_e5m2, 1),
        ("f16", ml_dtypes.bfloat16, 1),
    ],
)
def test_other_types_multiply(kind: str, dtype: type, code: int) -> None:
    random = np.random.default_rng(1)
    columns = 32 // np.dtype(dtype).itemsize
    a, b = random.integers(-3, 4, (128, columns)), random.integers(-3, 4, (64, columns))
    data = np.concatenate([staged(a, A_AT, dtype), staged(b, B_AT, dtype)])
    out = np.zeros((128, 64), np.float32)
    text = COPY.replace("kind::f16", f"kind::{kind}").format(
        **PARTS | {"idesc": str(IDESC | code << 7 | code << 10)}
    )
    good(execute(text, out, data, block=128, smem=24_700))
    np.testing.assert_array_equal(out, 2 * (a @ b.T))


def test_a_from_tensor_memory() -> None:
    """Each lane stores its row of A, two halves a word, in columns 32 to 40; then it is A of both MMAs."""
    random = np.random.default_rng(2)
    a, b = random.integers(-3, 4, (128, 16)), random.integers(-3, 4, (64, 16))
    data = np.concatenate([staged(np.zeros((128, 16)), A_AT), staged(b, B_AT)])
    rows = a.astype(np.float16).view(np.uint32)  # [128, 8]
    registers = ", ".join(f"%r{60 + n}" for n in range(8))
    store = f"""
    mul.wide.u32 %d50, %r0, 32; add.s64 %d51, %d2, %d50;
    ld.global.v4.b32 {{%r60, %r61, %r62, %r63}}, [%d51]; ld.global.v4.b32 {{%r64, %r65, %r66, %r67}}, [%d51+16];
    shl.b32 %r70, %r2, 21; add.s32 %r70, %r70, %r10; add.s32 %r70, %r70, 64; add.s32 %r71, %r10, 64;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r70], {{{registers}}}; tcgen05.wait::st.sync.aligned;
    tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    @%p2 bra $LOAD;"""
    text = COPY.replace("\n    @%p2 bra $LOAD;", store.replace("{", "{{").replace("}", "}}"), 1)
    text = text.replace("[%r10], %d30", "[%r10], [%r71]").replace("[%r8], 64;", "[%r8], 128;")
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 128;"
    out = np.zeros((128, 64), np.float32)
    good(execute(text.format(**PARTS | {"free": free}), out, data, rows, block=128, smem=24_700))
    np.testing.assert_array_equal(out, 2 * (a @ b.T))


def test_queues_of_two_threads_are_independent() -> None:
    """Warp 1 commits for what warp 0 issued: a random order shows that it doesn't hold."""
    body = PARTS | {
        "wait": """
        setp.ne.u32 %p10, %r2, 1; @%p10 bra $W; elect.sync %r21|%p3, -1; @!%p3 bra $W;
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];
        $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra $W;"""
    }
    first = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];\n    $LOAD:"
    text = COPY.replace(first, "$LOAD:").format(**body)
    data = np.zeros(24576, np.uint8)
    run = execute(text, np.zeros((128, 64), np.float32), data, block=128, smem=24_700)
    assert "race" in kinds(run)


def test_a_warp_reaches_its_own_quarter_only() -> None:
    body = """
    mov.b32 %r1, smem; shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1;
    setp.ne.u32 %p2, %r2, 0; @%p2 bra $READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    $READY: bar.sync 0; mov.b32 %r3, 0x200000;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3];
    tcgen05.wait::ld.sync.aligned;
    """
    run = execute(body, np.zeros(1, np.uint32), block=64)
    assert "tensor memory" in kinds(run)
    assert "quarter" in str(run.findings[0])


@pytest.mark.parametrize("shape", ["32x32b.x8", "16x128b.x4", "16x256b.x2"])
def test_stores_and_loads_of_tensor_memory_are_inverse(shape: str) -> None:
    out = np.zeros((8, 32), np.uint32)
    regs = ", ".join(f"%r{40 + n}" for n in range(8))
    back = ", ".join(f"%r{60 + n}" for n in range(8))
    fill = "".join(f"add.s32 %r{40 + n}, %r0, {100 * n};" for n in range(8))
    keep = "".join(f"st.global.b32 [%d61+{128 * n}], %r{60 + n};" for n in range(8))
    body = f"""
    mov.b32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r2, [%r1];
    {fill}
    tcgen05.st.sync.aligned.{shape}.b32 [%r2], {{{regs}}}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape}.b32 {{{back}}}, [%r2]; tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d0, %d60; {keep}
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    """
    good(execute(body, out))
    np.testing.assert_array_equal(out, np.arange(32) + 100 * np.arange(8)[:, None])


def test_wgmma_fragments() -> None:
    """m64n8k16: registers 4j+{0,1} hold row lane/4, columns 8j+2(lane%4)+{0,1}; {2,3} row + 8."""
    random = np.random.default_rng(0)
    a, b = random.integers(-3, 4, (64, 16)), random.integers(-3, 4, (8, 16))
    run, out = wgmma("m64n8k16.f32.f16.f16", staged(a, 1024), staged(b, 1024 + 8192), "%d30", True)
    good(run)
    np.testing.assert_array_equal(out, a @ b.T)


@pytest.mark.parametrize(("name", "dtype", "k"), [("tf32", np.float32, 8), ("bf16", ml_dtypes.bfloat16, 16)])
def test_wgmma_of_other_types(name: str, dtype: type, k: int) -> None:
    random = np.random.default_rng(3)
    a, b = random.integers(-3, 4, (64, k)), random.integers(-3, 4, (8, k))
    run, out = wgmma(
        f"m64n8k{k}.f32.{name}.{name}", staged(a, 1024, dtype), staged(b, 1024 + 8192, dtype), "%d30", k == 16
    )
    good(run)
    np.testing.assert_array_equal(out, a @ b.T)


def test_wgmma_with_a_from_registers() -> None:
    """Register 2h+r of a lane: row lane/4 + 8r of the warp's 16, K columns 8h + 2(lane%4) and the next."""
    random = np.random.default_rng(4)
    a, b = random.integers(-3, 4, (64, 16)), random.integers(-3, 4, (8, 16))
    halves = a.astype(np.float16).view(np.uint32).reshape(4, 2, 8, 2, 4)  # warp, r, row, h, lane % 4
    fragments = np.ascontiguousarray(
        halves.transpose(0, 2, 4, 3, 1)
    )  # thread: warp, lane / 4, lane % 4; h, r
    run, out = wgmma(
        "m64n8k16.f32.f16.f16", np.zeros(8192, np.uint8), staged(b, 1024 + 8192),
        "{%r80, %r81, %r82, %r83}", False, fragments,
    )  # fmt: skip
    good(run)
    np.testing.assert_array_equal(out, a @ b.T)


def wgmma(
    what: str, a: np.ndarray, b: np.ndarray, left: str, trans: bool, fragments: np.ndarray | None = None
) -> tuple[Run, np.ndarray]:
    """One wgmma of 64 x 8 over operands as staged in shared memory; a thread's fragment in %r80 to %r83."""
    data, out = np.concatenate([a, b]), np.zeros((64, 8), np.float32)
    given = np.zeros((128, 4), np.uint32) if fragments is None else fragments.reshape(128, 4)
    sm90 = [(at >> 4) | 1 << 16 | 64 << 32 | 1 << 62 for at in (1024, 1024 + 8192)]
    tail = "1, 1, 0, 0" if trans else "1, 1, 0" if left[0] == "{" else "1, 1"
    body = f"""
    mov.b32 %r1, smem; shl.b32 %r3, %r0, 2; mov.b32 %r4, 0;
    $C: add.s32 %r5, %r3, %r4; cvt.u64.u32 %d20, %r5; add.s64 %d21, %d1, %d20; ld.global.b32 %r6, [%d21];
    add.s32 %r7, %r5, %r1; st.shared.b32 [%r7], %r6;
    add.s32 %r4, %r4, 512; setp.lt.u32 %p1, %r4, 9216; @%p1 bra $C;
    mul.wide.u32 %d50, %r0, 16; add.s64 %d51, %d2, %d50; ld.global.v4.b32 {{%r80, %r81, %r82, %r83}}, [%d51];
    fence.proxy.async.shared::cta; bar.sync 0;
    mov.b64 %d30, {sm90[0]}; mov.b64 %d31, {sm90[1]}; setp.ne.u32 %p4, %r1, %r1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.{what} {{%r40, %r41, %r42, %r43}}, {left}, %d31, %p4, {tail};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    shr.u32 %r8, %r0, 5; shl.b32 %r8, %r8, 4; and.b32 %r9, %r0, 31; shr.u32 %r10, %r9, 2; add.s32 %r8, %r8, %r10;
    shl.b32 %r8, %r8, 3; and.b32 %r9, %r0, 3; shl.b32 %r9, %r9, 1; add.s32 %r8, %r8, %r9;
    mul.wide.u32 %d40, %r8, 4; add.s64 %d40, %d40, %d0;
    st.global.v2.b32 [%d40], {{%r40, %r41}}; st.global.v2.b32 [%d40+256], {{%r42, %r43}};
    """
    return execute(body, out, data, given, block=128, smem=10_240, target="sm_90a"), out


def test_registers_are_not_read_before_the_wait_of_their_load() -> None:
    body = """
    mov.b32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r2, [%r1];
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r0}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r2]; mov.b32 %r4, %r3;
    @WAIT@
    add.s32 %r5, %r4, 1; st.global.b32 [%d0], %r5;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    """
    wait = "tcgen05.wait::ld.sync.aligned;"
    good(execute(body.replace("@WAIT@", wait), np.zeros(1, np.uint32)))
    run = execute(body.replace("@WAIT@", ""), np.zeros(1, np.uint32))
    good(run)  # a lint: published kernels leave it to the compiler
    assert "without tcgen05.wait::ld" in str(run.lints[0])


def test_two_halves_are_packed_into_a_register() -> None:
    """Columns 0 and 1 hold lane + 5 and lane + 7, with something above them."""
    body = """
    mov.b32 %r1, smem; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r2, [%r1];
    add.s32 %r3, %r0, 0x30005; add.s32 %r4, %r0, 0x40007;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r2], {%r3, %r4}; tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r5}, [%r2]; tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d0, %d60; st.global.b32 [%d61], %r5;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    """
    out = np.zeros(32, np.uint32)
    good(execute(body, out))
    np.testing.assert_array_equal(out, np.arange(32) + 5 | np.arange(32) + 7 << 16)


def test_fp16_accumulators_lie_in_the_low_halves() -> None:
    run, out, expected = multiply(idesc=str(IDESC & ~(3 << 4)))
    good(run)
    low = out.view(np.uint32).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(low, expected)


COPIED = (
    stage(4096, 32, "fence.proxy.async.shared::cta;")
    + """
    shl.b32 %r12, %r2, 21; add.s32 %r12, %r12, %r10; mov.b32 %r13, 0;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12], {%r13, %r13, %r13, %r13, %r13, %r13, %r13, %r13};
    tcgen05.wait::st.sync.aligned; bar.sync 0;
    @%p2 bra $LOAD;
    elect.sync %r21|%p3, -1; @!%p3 bra $LOAD;
    mov.b64 %d30, @DESCRIPTOR@;
    tcgen05.cp.cta_group::1.@SHAPE@ [%r10], %d30;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9];
    $LOAD: @WAIT@
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {%r30, %r31, %r32, %r33, %r34, %r35, %r36, %r37}, [%r12];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %d22, %r0, 32; add.s64 %d22, %d22, %d0;
    st.global.v4.b32 [%d22], {%r30, %r31, %r32, %r33}; st.global.v4.b32 [%d22+16], {%r34, %r35, %r36, %r37};
    bar.sync 0; @%p2 bra $END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;
    $END:
"""
)
COPIED_WAIT = "$W: mbarrier.try_wait.parity.shared.b64 %p9, [%r9], 0; @!%p9 bra $W;"


def copied(
    shape: str, data: np.ndarray, wait: str = COPIED_WAIT, schedule: Schedule = LATE
) -> tuple[Run, np.ndarray]:
    """One tcgen05.cp of rows of 16 bytes that follow one another, halves of 32-byte rows 2,048 bytes apart."""
    out = np.zeros((128, 8), np.uint32)
    text = COPIED.replace("@DESCRIPTOR@", str(1024 >> 4 | (2048 >> 4) << 16 | (128 >> 4) << 32))
    text = text.replace("@SHAPE@", shape).replace("@WAIT@", wait)
    return execute(text, out, data, block=128, smem=4200, schedule=schedule), out


LANES = np.arange(128)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("shape", "row", "words"),
    [
        ("128x256b", LANES, 8),
        ("128x128b", LANES, 4),
        ("4x256b", np.where(LANES % 32 == 0, LANES // 32, -1), 8),
        ("64x128b.warpx2::02_13", LANES % 64, 4),
        ("64x128b.warpx2::01_23", LANES // 64 * 32 + LANES % 32, 4),
        ("32x128b.warpx4", LANES % 32, 4),
    ],
)
def test_a_copy_to_tensor_memory(shape: str, row: np.ndarray, words: int, schedule: Schedule) -> None:
    data = np.arange(1024, dtype=np.uint32) + 7
    run, out = copied(shape, data, schedule=schedule)
    good(run)
    rows = data.reshape(2, 128, 4).transpose(1, 0, 2).reshape(128, 8).copy()
    rows[:, words:] = 0
    np.testing.assert_array_equal(out, np.where(row[:, None] >= 0, rows[row], 0))


def test_values_of_4_bits_are_unpacked_to_the_middle_of_their_bytes() -> None:
    data = np.random.default_rng(9).integers(0, 1 << 32, 1024, np.uint32)
    run, out = copied("128x256b.b8x16.b4x16_p64", data)
    good(run)
    packed = data.view(np.uint8).reshape(2, 128, 16)[..., :8].transpose(1, 0, 2)
    expected = np.stack([packed & 15, packed >> 4], axis=-1) << 2
    np.testing.assert_array_equal(out.view(np.uint8), expected.reshape(128, 32))


def test_a_copy_is_not_waited_for_by_the_wait_of_stores() -> None:
    run, _ = copied("128x128b", np.zeros(1024, np.uint32), "tcgen05.wait::st.sync.aligned;", EARLY)
    assert kinds(run) == {"race"}
