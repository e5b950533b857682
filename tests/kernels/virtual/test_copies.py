"""TMA, bulk copies and cluster launch control, under every schedule."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.virtual import tensormap
from kernels.virtual.launch import EARLY, LATE, Schedule
from kernels.virtual.report import Run
from tests.kernels.virtual.snippet import execute, good, kinds

SCHEDULES = [EARLY, LATE, Schedule("random", 1)]
F16 = 6

LOAD = """
    mov.b32 %r1, smem; add.s32 %r2, %r1, 8192;
    elect.sync %r21|%p2, -1; @!%p2 bra $READY;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], {bytes};
    mov.b32 %r3, {x}; mov.b32 %r4, {y}; mov.b64 %d10, m0;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%d10, {{%r3, %r4}}], [%r2];
    $READY: bar.warp.sync -1;
    {wait}
"""
WAIT = "$W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra $W;"
DUMP = """
    mov.b32 %r30, 0;
    $D: shl.b32 %r31, %r0, 2; add.s32 %r32, %r30, %r31; add.s32 %r33, %r32, %r1; ld.shared.b32 %r34, [%r33];
    cvt.u64.u32 %d40, %r32; add.s64 %d41, %d0, %d40; st.global.b32 [%d41], %r34;
    add.s32 %r30, %r30, 128; setp.lt.u32 %p8, %r30, {bytes}; @%p8 bra $D;
"""


def source(rows: int = 16, columns: int = 64) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.uint16).reshape(rows, columns).view(np.float16)


def map_of(array: np.ndarray, box: tuple[int, int], mode: int = 0) -> bytes:
    rows, columns = array.shape
    return tensormap.encode(array.ctypes.data, F16, (columns, rows), (array.strides[0],), box, mode, 0)


def load(
    array: np.ndarray, x: int, y: int, box: tuple[int, int], mode: int, **options: object
) -> tuple[Run, np.ndarray]:
    nbytes = box[0] * box[1] * 2
    out = np.zeros(nbytes // 2, np.uint16)
    body = LOAD.format(bytes=options.pop("count", nbytes), x=x, y=y, wait=options.pop("wait", WAIT))
    run = execute(
        body + DUMP.format(bytes=nbytes), out, array, maps=[map_of(array, box, mode)], smem=9000, **options
    )
    return run, out.reshape(box[1], box[0])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("x", "y"), [(0, 0), (16, 4), (48, 12), (-8, -3), (64, 0)])
def test_a_box_with_its_edges(schedule: Schedule, x: int, y: int) -> None:
    """What lies outside the tensor arrives as zeros, and its bytes count."""
    array = source()
    run, out = load(array, x, y, (32, 8), 0, schedule=schedule)
    good(run)
    whole = np.zeros((64, 160), np.uint16)
    whole[16:32, 48:112] = array.view(np.uint16)
    np.testing.assert_array_equal(out, whole[16 + y : 24 + y, 48 + x : 80 + x])


@pytest.mark.parametrize(("mode", "mask", "columns"), [(3, 7, 64), (2, 3, 32), (1, 1, 16)])
def test_swizzles(mode: int, mask: int, columns: int) -> None:
    """128B: 16-byte chunk c of row r lies at c ^ (r % 8); 64B: c ^ (r/2 % 4); 32B: c ^ (r/4 % 2)."""
    array = source()
    run, out = load(array, 0, 0, (columns, 16), mode)
    good(run)
    expected = np.zeros((16, columns // 8, 8), np.uint16)
    per_128 = 128 // (columns * 2)
    for row in range(16):
        for chunk in range(columns // 8):
            place = chunk ^ (row // per_128 & mask)
            expected[row, place] = array.view(np.uint16)[row, chunk * 8 : chunk * 8 + 8]
    np.testing.assert_array_equal(out, expected.reshape(16, columns))


def test_a_dropped_wait_is_a_race_and_wrong_bytes_a_deadlock() -> None:
    run, _ = load(source(), 0, 0, (32, 8), 0, wait="", schedule=EARLY)
    assert "race" in kinds(run)
    run, _ = load(source(), 0, 0, (32, 8), 0, count=1024)
    assert kinds(run) == {"deadlock"}
    assert "512 bytes outstanding" in str(run.findings[0])


def test_padded_elements_of_4_bits() -> None:
    """16 elements are 8 bytes of the tensor and 16 in shared memory; the barrier counts those of the tensor."""
    array = np.random.default_rng(2).integers(0, 256, (8, 64), np.uint8)
    data = tensormap.encode(array.ctypes.data, 14, (128, 8), (64,), (64, 4), 0, 0)
    out = np.zeros((4, 4, 16), np.uint8)
    body = LOAD.format(bytes=4 * 32, x=64, y=2, wait=WAIT) + DUMP.format(bytes=4 * 64)
    good(execute(body, out, array, maps=[data], smem=9000))
    np.testing.assert_array_equal(out[..., :8], array[2:6, 32:].reshape(4, 4, 8))
    assert not out[..., 8:].any()


REPLACE = """
    mov.b64 %d10, m0; mov.b32 %r40, 0;
    elect.sync %r21|%p2, -1; @!%p2 bra $COPIED;
    $M: cvt.u64.u32 %d11, %r40; add.s64 %d12, %d10, %d11; ld.param.b64 %d13, [%d12]; add.s64 %d14, %d2, %d11;
    st.global.b64 [%d14], %d13; add.s32 %r40, %r40, 8; setp.lt.u32 %p3, %r40, 128; @%p3 bra $M;
    add.s64 %d15, %d1, 512;
    tensormap.replace.tile.global_address.global.b1024.b64 [%d2], %d15;
    tensormap.replace.tile.global_dim.global.b1024.b32 [%d2], 1, 5;
    {release}
    {acquire}
    $COPIED: bar.warp.sync -1;
"""
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;"


def through_a_replaced_map(release: str, acquire: str) -> tuple[Run, np.ndarray, np.ndarray]:
    """The map moves four rows down and ends after five."""
    array, out, room = source(), np.zeros((8, 32), np.uint16), np.zeros(32, np.uint64)
    at = -(room.ctypes.data // 8) % 16
    load = LOAD.replace("mov.b64 %d10, m0;", "mov.b64 %d10, %d2;").format(bytes=512, x=0, y=0, wait=WAIT)
    body = REPLACE.format(release=release, acquire=acquire) + load + DUMP.format(bytes=512)
    run = execute(body, out, array, room[at : at + 16], maps=[map_of(array, (32, 8))], smem=9000)
    return run, out, array


def test_a_map_is_replaced_field_by_field() -> None:
    run, out, array = through_a_replaced_map(RELEASE, ACQUIRE)
    good(run)
    expected = np.zeros((8, 32), np.uint16)
    expected[:5] = array.view(np.uint16)[4:9, :32]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("release", "acquire"), [("", ACQUIRE), (RELEASE, ""), ("", "")])
def test_a_replaced_map_needs_both_fences(release: str, acquire: str) -> None:
    run, *_ = through_a_replaced_map(release, acquire)
    assert kinds(run) == {"proxy fence"}
    assert "fence.proxy.tensormap" in str(run.findings[0])


STORE = """
    mov.b32 %r1, smem; shl.b32 %r5, %r0, 4; add.s32 %r5, %r5, %r1;
    st.shared.v4.b32 [%r5], {{%r0, %r0, %r0, %r0}};
    {fence}
    bar.warp.sync -1;
    elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mov.b32 %r3, 8; mov.b32 %r4, 12; mov.b64 %d10, m0;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d10, {{%r3, %r4}}], [%r1];
    cp.async.bulk.commit_group;
    {wait}
    $END:
"""
FENCE, ALL = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_store_is_clipped(schedule: Schedule) -> None:
    out = np.zeros((16, 64), np.float16)
    body = STORE.format(fence=FENCE, wait=ALL)
    good(execute(body, out, maps=[map_of(out, (32, 8))], schedule=schedule))
    words = np.repeat(np.arange(32, dtype=np.uint32), 4).view(np.uint16).reshape(8, 32)
    expected = np.zeros((16, 64), np.uint16)
    expected[12:16, 8:40] = words[:4]
    np.testing.assert_array_equal(out.view(np.uint16), expected)


def test_a_store_needs_its_proxy_fence_and_its_wait() -> None:
    out = np.zeros((16, 64), np.float16)
    run = execute(STORE.format(fence="", wait=ALL), out, maps=[map_of(out, (32, 8))])
    assert kinds(run) == {"proxy fence"}
    assert "fence.proxy.async" in str(run.findings[0])
    run = execute(STORE.format(fence=FENCE, wait=""), out, maps=[map_of(out, (32, 8))])
    assert kinds(run) == {"protocol"}
    assert "without waiting" in str(run.findings[0])


def test_reusing_a_staging_buffer_needs_the_read_to_have_ended() -> None:
    again = "st.shared.b32 [%r1], %r0;"
    out = np.zeros((16, 64), np.float16)
    for wait, expected in (("cp.async.bulk.wait_group.read 0;", set()), ("", {"race"})):
        body = STORE.format(fence=FENCE, wait=wait + again + ALL)
        assert kinds(execute(body, out, maps=[map_of(out, (32, 8))])) == expected


def test_bytes_in_a_row_both_ways() -> None:
    data, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    body = """
    mov.b32 %r1, smem; add.s32 %r2, %r1, 4096; elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mbarrier.init.shared.b64 [%r2], 1; mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], 256, [%r2];
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra $W;
    cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 256;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    $END:
    """
    good(execute(body, out, data))
    np.testing.assert_array_equal(out, data)


def test_multicast_reaches_both_ctas() -> None:
    data, out = np.arange(64, dtype=np.uint32), np.zeros(128, np.uint32)
    body = """
    mov.b32 %r1, smem; add.s32 %r2, %r1, 4096; mov.u32 %r3, %cluster_ctarank;
    elect.sync %r21|%p2, -1; @!%p2 bra $INIT;
    mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 256;
    $INIT: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.ne.u32 %p1, %r3, 0; @%p1 bra $W;
    elect.sync %r21|%p2, -1; @!%p2 bra $W; mov.b16 %h1, 3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r1], [%d1], 256, [%r2], %h1;
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra $W;
    shl.b32 %r4, %r0, 3; add.s32 %r5, %r4, %r1; ld.shared.v2.b32 {%r6, %r7}, [%r5];
    mul.wide.u32 %d20, %r3, 256; cvt.u64.u32 %d21, %r4; add.s64 %d20, %d20, %d21; add.s64 %d20, %d20, %d0;
    st.global.v2.b32 [%d20], {%r6, %r7};
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    for schedule in SCHEDULES:
        good(execute(body, out, data, grid=(2, 1, 1), cluster=(2, 1, 1), schedule=schedule))
        np.testing.assert_array_equal(out.reshape(2, 64), np.stack([data, data]))


def test_cluster_launch_control_hands_out_every_cluster_once() -> None:
    """Two SMs, six CTAs: whoever runs takes over those that have not started."""
    out = np.zeros(6, np.uint32)
    body = """
    mov.b32 %r1, smem; add.s32 %r2, %r1, 64; mov.u32 %r10, %ctaid.x; mov.b32 %r11, 0;
    elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mbarrier.init.shared.b64 [%r2], 1;
    $LOOP: mul.wide.u32 %d60, %r10, 4; add.s64 %d61, %d0, %d60;
    red.global.add.u32 [%d61], 1;
    mbarrier.arrive.expect_tx.shared.b64 %d9, [%r2], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r2], %r11; @!%p9 bra $W;
    xor.b32 %r11, %r11, 1;
    ld.shared.v2.b64 {%d20, %d21}, [%r1]; mov.b128 %q1, {%d20, %d21};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q1;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r10, %r12, %r13, %r14}, %q1;
    fence.proxy.async.shared::cta;
    @%p3 bra $LOOP;
    $END:
    """
    for schedule in SCHEDULES:
        out[:] = 0
        good(execute(body, out, grid=(6, 1, 1), sms=2, schedule=schedule))
        assert out.tolist() == [1] * 6


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_polling_sees_what_is_in_flight(schedule: Schedule) -> None:
    """test_wait never blocks: late work is done while somebody polls for it."""
    poll = "$W: mbarrier.test_wait.parity.shared.b64 %p9, [%r2], 0; @!%p9 bra $W;"
    run, _ = load(source(), 0, 0, (32, 8), 0, wait=poll, schedule=schedule)
    good(run)


def test_several_warps_may_store_the_same_box() -> None:
    """In no order, but with equal bytes: a lint. With other bytes it is a race."""
    out = np.zeros((16, 64), np.float16)
    body = """
    mov.b32 %r1, smem; and.b32 %r6, %r0, 31; shl.b32 %r5, %r6, 4; add.s32 %r5, %r5, %r1; shr.u32 %r20, %r0, 5;
    shl.b32 %r22, %r20, 10; add.s32 %r5, %r5, %r22; add.s32 %r1, %r1, %r22; {value}
    st.shared.v4.b32 [%r5], {%r7, %r7, %r7, %r7}; fence.proxy.async.shared::cta; bar.warp.sync -1;
    elect.sync %r21|%p2, -1; @!%p2 bra $END; mov.b32 %r3, 8; mov.b32 %r4, 4; mov.b64 %d10, m0;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d10, {%r3, %r4}], [%r1];
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    $END:
    """
    run = execute(body.replace("{value}", "mov.b32 %r7, 9;"), out, block=64, maps=[map_of(out, (32, 8))])
    good(run)
    assert any("same bytes" in lint.text for lint in run.lints)
    run = execute(body.replace("{value}", "mov.b32 %r7, %r20;"), out, block=64, maps=[map_of(out, (32, 8))])
    assert kinds(run) == {"race"}
