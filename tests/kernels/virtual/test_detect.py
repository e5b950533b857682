"""The race detector: pairs of accesses with and without the edge between them."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.virtual.detect import Detector, Shadow
from kernels.virtual.launch import EARLY, schedules
from tests.kernels.virtual.snippet import execute, good, kinds

TWO_WARPS = """
    mov.b32 %r1, smem; shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1;
    and.b32 %r4, %r0, 31; shl.b32 %r5, %r4, 2; add.s32 %r5, %r1, %r5;
    setp.eq.u32 %p1, %r2, 0; @!%p1 bra $SECOND;
    st.shared.b32 [%r5], %r0;
    {first}
    bra $END;
    $SECOND:
    {second}
    ld.shared.b32 %r6, [%r5];
    $END:
"""


def test_a_write_and_a_read_without_a_barrier() -> None:
    run = execute(TWO_WARPS.format(first="", second=""), np.zeros(1, np.uint32), block=64)
    assert kinds(run) == {"race"}
    text = str(run.findings[0])
    assert "st.shared" in text
    assert "ld.shared" in text
    assert "warp 0" in text
    assert "warp 1" in text
    assert "missing edge" in text


@pytest.mark.parametrize("barrier", ["barrier.sync 0;", "barrier.sync 3, 64;"])
def test_a_barrier_orders(barrier: str) -> None:
    good(execute(TWO_WARPS.format(first=barrier, second=barrier), np.zeros(1, np.uint32), block=64))


def test_arrive_and_sync_order_one_way() -> None:
    good(
        execute(
            TWO_WARPS.format(first="barrier.arrive 1, 64;", second="barrier.sync 1, 64;"),
            np.zeros(1, np.uint32),
            block=64,
        )
    )
    swapped = TWO_WARPS.format(first="barrier.sync 1, 64;", second="barrier.arrive 1, 64;")
    assert kinds(execute(swapped, np.zeros(1, np.uint32), block=64)) == {"race"}  # who arrives doesn't wait


def test_warps_may_write_neighbouring_halves() -> None:
    body = """
    mul.wide.u32 %d60, %r0, 2; add.s64 %d61, %d0, %d60; cvt.u16.u32 %h1, %r0; st.global.b16 [%d61], %h1;
    """
    out = np.zeros(64, np.uint16)
    good(execute(body, out, block=64))
    np.testing.assert_array_equal(out, np.arange(64))


def test_two_ctas_write_one_word() -> None:
    run = execute("st.global.b32 [%d0], 1;".replace("1;", "%r0;"), np.zeros(1, np.uint32), grid=(2, 1, 1))
    assert kinds(run) == {"race"}


def test_flags_in_global_memory_order() -> None:
    """Release and acquire on a flag order plain accesses between CTAs."""
    body = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 0; @!%p1 bra $READER;
    st.global.b32 [%d0], %r0; bar.sync 0; mov.b32 %r4, 1; st.release.gpu.global.b32 [%d0+4], %r4; bra $END;
    $READER: ld.acquire.gpu.global.b32 %r3, [%d0+4]; setp.eq.u32 %p2, %r3, 0; @%p2 bra $READER;
    ld.global.b32 %r5, [%d0];
    $END:
    """
    good(execute(body, np.zeros(2, np.uint32), grid=(2, 1, 1)))
    plain = body.replace("st.release.gpu", "st").replace("ld.acquire.gpu", "ld")
    assert "race" in kinds(execute(plain, np.zeros(2, np.uint32), grid=(2, 1, 1)))


def test_readers_are_kept_until_a_write_follows_them_all() -> None:
    detector = Detector()
    shadow = Shadow("x", 64, 0)
    place = slice(0, 4)
    nodes = [detector.node() for _ in range(3)]
    numbers = [detector.access(n, 0, True, f"warp {n}", "here") for n in nodes]
    detector.read(shadow, place, numbers[0], (1 << nodes[0], 0))
    detector.read(shadow, place, numbers[1], (1 << nodes[1], 0))
    both = 1 << nodes[0] | 1 << nodes[1]
    detector.write(shadow, place, numbers[2], (1 << nodes[0] | 1 << nodes[2], 0))
    assert len(detector.findings) == 1  # the second reader isn't known
    fresh = Shadow("y", 64, 0)
    detector.read(fresh, place, numbers[0], (1 << nodes[0], 0))
    detector.read(fresh, place, numbers[1], (both, 0))
    detector.write(fresh, place, numbers[2], (both | 1 << nodes[2], 0))
    assert len(detector.findings) == 1


REMOTE_ARRIVAL = """
    mov.b32 %r1, smem; mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p1, %r0, 0; @%p1 bra $INIT;
    mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
    $INIT: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.u32 %p2, %r3, 0; @%p2 bra $HOME; @%p1 bra $END;
    mapa.shared::cluster.u32 %r4, %r1, 0;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
    bra $END;
    $HOME: {home}
    $END: {end}
"""
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
WAIT = "$W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p9, [%r1], 0; @!%p9 bra $W;"


@pytest.mark.parametrize(("home", "end", "ordered"), [(WAIT, "", True), ("", MEET, True), ("", "", False)])
def test_a_cta_outlives_what_reaches_it_from_another(home: str, end: str, ordered: bool) -> None:
    """It exits only after a wait for the arrival, or after a barrier of the cluster; under no schedule else."""
    body = REMOTE_ARRIVAL.format(home=home, end=end)
    found = set()
    for schedule in schedules(4):
        run = execute(body, np.zeros(1, np.uint32), grid=(2, 1, 1), cluster=(2, 1, 1), schedule=schedule)
        found |= kinds(run)
    if ordered:
        assert not found
    else:
        assert found <= {"exit", "bounds"}  # nothing orders the exit, or it has been there already
        assert found


PAIR_FREE = """
    mov.b32 %r1, smem; mov.u32 %r3, %cluster_ctarank;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32; ld.shared.b32 %r2, [%r1];
    {first}
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {{%r0}}; tcgen05.wait::st.sync.aligned;
    {second}
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 32;
    {third}
"""


@pytest.mark.parametrize(("place", "hinted"), [("second", False), ("first", True), ("third", True)])
def test_the_peer_of_a_pair_should_have_done_with_what_is_freed(place: str, hinted: bool) -> None:
    """A lint: published kernels free without it."""
    body = PAIR_FREE.format(**({"first": "", "second": "", "third": ""} | {place: MEET}))
    run = execute(body, np.zeros(1, np.uint32), grid=(2, 1, 1), cluster=(2, 1, 1), schedule=EARLY)
    good(run)
    assert any("frees columns of a pair" in lint.text for lint in run.lints) == hinted


COMMITS = """
    mov.b32 %r1, smem; add.s32 %r2, %r1, 8; mov.u32 %r3, %cluster_ctarank;
    setp.ne.u32 %p1, %r0, 0; @%p1 bra $INIT;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    $INIT: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.ne.u32 %p2, %r3, 0; @%p2 bra $PEER; @%p1 bra $END; mov.b16 %h1, 2;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %h1;
    bra $END;
    $PEER: {first}
    $V: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p8, [%r2], 0; @!%p8 bra $V;
    $END:
"""


@pytest.mark.parametrize(("first", "hinted"), [(WAIT, False), ("", True)])
def test_every_commit_from_another_cta_should_be_waited_for(first: str, hinted: bool) -> None:
    """A later one of the same thread says that the earlier has been sent, not that it has arrived: a lint."""
    run = execute(COMMITS.format(first=first), np.zeros(1, np.uint32), grid=(2, 1, 1), cluster=(2, 1, 1))
    good(run)
    assert any("without a wait for it" in lint.text for lint in run.lints) == hinted
