"""mbarriers, named barriers and the cluster's barrier: when they open, what they order, how they fail."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.virtual.launch import EARLY, LATE, Schedule
from tests.kernels.virtual.snippet import execute, good, kinds

INIT = """
    mov.b32 %r1, smem; shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1;
    setp.ne.u32 %p1, %r2, 0; @%p1 bra $READY;
    elect.sync %r21|%p2, -1; @!%p2 bra $READY;
    mbarrier.init.shared.b64 [%r1], {count};
    $READY: bar.sync 0;
"""
WAIT = "$W{n}: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], {phase}; @!%p9 bra $W{n};"


@pytest.mark.parametrize("schedule", [EARLY, LATE, Schedule("random", 3)], ids=str)
def test_a_wait_passes_when_the_phase_differs(schedule: Schedule) -> None:
    """Warp 1 writes, arrives and goes on; warp 0 waits for it. The opposite phase passes at once."""
    out = np.zeros(32, np.uint32)
    body = (
        INIT.format(count=32)
        + "setp.eq.u32 %p3, %r2, 0; @%p3 bra $CONSUMER;"
        + WAIT.format(n=0, phase=1)
        + """
    shl.b32 %r5, %r0, 2; add.s32 %r5, %r1, %r5; st.shared.b32 [%r5], %r0;
    mbarrier.arrive.shared.b64 %d5, [%r1]; bra $END;
    $CONSUMER:
    """
        + WAIT.format(n=1, phase=0)
        + """
    add.s32 %r6, %r0, 32; shl.b32 %r5, %r6, 2; add.s32 %r5, %r1, %r5; ld.shared.b32 %r7, [%r5];
    mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d0, %d60; st.global.b32 [%d61], %r7;
    $END:
    """
    )
    good(execute(body, out, block=64, schedule=schedule))
    np.testing.assert_array_equal(out, np.arange(32, 64))


def test_a_wait_that_nobody_ends_is_a_deadlock_report() -> None:
    run = execute(INIT.format(count=2) + WAIT.format(n=1, phase=0), np.zeros(1, np.uint32), block=64)
    assert kinds(run) == {"deadlock"}
    text = str(run.findings[0])
    assert "CTA 0,0,0 warp 1" in text
    assert "2 of 2 arrivals pending" in text
    assert "phase 0" in text


def test_arriving_beyond_the_count() -> None:
    run = execute(INIT.format(count=31) + "mbarrier.arrive.shared.b64 %d5, [%r1];", np.zeros(1, np.uint32))
    assert kinds(run) == {"barrier"}
    assert "beyond the count" in str(run.findings[0])


def test_bytes_hold_a_phase_open() -> None:
    body = (
        INIT.format(count=1)
        + """
    @%p1 bra $C; elect.sync %r21|%p2, -1; @!%p2 bra $C;
    mbarrier.arrive.expect_tx.shared.b64 %d5, [%r1], 64;
    $C:
    """
        + WAIT.format(n=1, phase=0)
    )
    run = execute(body, np.zeros(1, np.uint32))
    assert kinds(run) == {"deadlock"}
    assert "64 bytes outstanding" in str(run.findings[0])


def test_named_barriers_count_their_threads() -> None:
    """Warps 0 and 1 meet at barrier 1; warp 2 never comes to it."""
    body = """
    shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1; mov.b32 %r1, smem;
    setp.eq.u32 %p1, %r2, 2; @%p1 bra $END;
    setp.eq.u32 %p2, %r0, 40; @%p2 st.shared.b32 [%r1], %r0;
    barrier.sync 1, 64;
    ld.shared.b32 %r3, [%r1]; mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d0, %d60; st.global.b32 [%d61], %r3;
    $END:
    """
    out = np.zeros(64, np.uint32)
    good(execute(body, out, block=96))
    assert set(out.tolist()) == {40}


def test_a_barrier_for_all_threads_inside_a_role_is_a_deadlock() -> None:
    body = """
    shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1; setp.eq.u32 %p1, %r2, 0;
    @%p1 bra $A; barrier.sync 2, 96; bra $END;
    $A: barrier.sync 0;
    $END:
    """
    run = execute(body, np.zeros(1, np.uint32), block=64)
    assert kinds(run) == {"deadlock"}
    assert "barrier 0" in str(run.findings[0])
    assert "barrier 2" in str(run.findings[0])


def test_exited_warps_count_as_arrived() -> None:
    body = """
    shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1; setp.eq.u32 %p1, %r2, 1;
    @%p1 bra $END; barrier.sync 0;
    $END:
    """
    good(execute(body, np.zeros(1, np.uint32), block=64))


def test_votes_over_a_cta() -> None:
    out = np.zeros(1, np.uint32)
    body = "setp.lt.u32 %p1, %r0, 50; barrier.cta.red.popc.u32 %r3, 0, %p1; st.global.b32 [%d0], %r3;"
    run = execute(body, out, block=64, detect=False)
    good(run)
    assert out[0] == 50


def test_remote_arrival_needs_cluster_scope() -> None:
    """CTA 1 arrives on CTA 0's barrier: counted, but with .cta scope it is a lint."""
    body = (
        INIT.format(count=1)
        + """
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r3, %cluster_ctarank; setp.eq.u32 %p4, %r3, 0; @%p4 bra $ZERO;
    elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mov.b32 %r5, 0; mapa.shared::cluster.u32 %r4, %r1, %r5;
    mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [%r4]; bra $END;
    $ZERO: $W1: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 %p9, [%r1], 0; @!%p9 bra $W1;
    $END: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    for scope, lints in (("cta", 2), ("cluster", 0)):
        run = execute(
            body.replace("{scope}", scope), np.zeros(1, np.uint32), grid=(2, 1, 1), cluster=(2, 1, 1)
        )
        good(run)
        assert len(run.lints) == lints


def test_an_uninitialized_barrier() -> None:
    run = execute("mov.b32 %r1, smem; mbarrier.arrive.shared.b64 %d5, [%r1];", np.zeros(1, np.uint32))
    assert kinds(run) == {"barrier"}


def test_a_token_waits_for_its_own_phase() -> None:
    """The token of an arrival passes once that phase has ended, also after the next one has."""
    body = (
        INIT.format(count=1)
        + """
    @%p1 bra $END; elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mbarrier.arrive.shared.b64 %d5, [%r1];
    mbarrier.arrive.shared.b64 %d6, [%r1];
    $W: mbarrier.try_wait.shared.b64 %p9, [%r1], %d5; @!%p9 bra $W;
    $V: mbarrier.test_wait.shared.b64 %p9, [%r1], %d6; @!%p9 bra $V;
    $END:
    """
    )
    good(execute(body, np.zeros(1, np.uint32), block=64))
    early = body.replace("mbarrier.arrive.shared.b64 %d6, [%r1];", "mov.b64 %d6, 1;").replace(
        "test_wait", "try_wait"
    )
    assert kinds(execute(early, np.zeros(1, np.uint32), block=64)) == {"deadlock"}


def test_who_drops_out_isn_t_counted_again() -> None:
    body = (
        INIT.format(count=2)
        + """
    @%p1 bra $END; elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mbarrier.arrive_drop.shared.b64 %d5, [%r1]; mbarrier.arrive.shared.b64 %d6, [%r1];
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0; @!%p9 bra $W;
    mbarrier.arrive.shared.b64 %d6, [%r1];
    $V: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 1; @!%p9 bra $V;
    $END:
    """
    )
    good(execute(body, np.zeros(1, np.uint32), block=64))


def test_bytes_may_be_completed_by_hand() -> None:
    body = (
        INIT.format(count=1)
        + """
    @%p1 bra $END; elect.sync %r21|%p2, -1; @!%p2 bra $END;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 64; mbarrier.arrive.shared.b64 %d5, [%r1];
    mbarrier.complete_tx.relaxed.cta.shared.b64 [%r1], {bytes};
    $W: mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0; @!%p9 bra $W;
    $END:
    """
    )
    good(execute(body.replace("{bytes}", "64"), np.zeros(1, np.uint32), block=64))
    assert kinds(execute(body.replace("{bytes}", "48"), np.zeros(1, np.uint32), block=64)) == {"deadlock"}


def test_an_invalidated_barrier_is_none() -> None:
    body = INIT.format(count=32) + "@%p1 bra $END; mbarrier.inval.shared.b64 [%r1]; {again} $END:"
    again = "mbarrier.arrive.shared.b64 %d5, [%r1];"
    good(execute(body.replace("{again}", ""), np.zeros(1, np.uint32), block=64))
    run = execute(body.replace("{again}", again), np.zeros(1, np.uint32), block=64)
    assert kinds(run) == {"barrier"}
    assert "there is no mbarrier" in str(run.findings[0])


def test_lanes_may_initialize_barriers_of_their_own() -> None:
    """Four lanes, four barriers of another count each; the other lanes leave the fifth one alone."""
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r0, 3; add.s32 %r3, %r1, %r2; add.s32 %r4, %r0, 1; setp.lt.u32 %p1, %r0, 4;
    @%p1 mbarrier.init.shared.b64 [%r3], %r4; bar.warp.sync -1;
    mbarrier.arrive.shared.b64 _, [%r1+@OFFSET@], 1; elect.sync %r21|%p2, -1;
    """
    run = execute(body.replace("@OFFSET@", "32"), np.zeros(1, np.uint32))
    assert "there is no mbarrier" in str(run.findings[0])
    one = body.replace("mbarrier.arrive", "setp.eq.u32 %p3, %r0, 0; @%p3 mbarrier.arrive")
    good(execute(one.replace("@OFFSET@", "0"), np.zeros(1, np.uint32)))
    run = execute(
        one.replace("%p3, %r0, 0", "%p3, %r0, %r0").replace("@OFFSET@", "24"), np.zeros(1, np.uint32)
    )
    assert "beyond the count" in str(run.findings[0])  # 32 arrivals at one for four
