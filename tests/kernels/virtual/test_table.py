"""The instruction table of the README: every translation is in it, and tested where it says; the rest is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kernels.virtual import alu
from kernels.virtual.emit import Unknown
from kernels.virtual.handlers import HANDLERS
from kernels.virtual.ptx import PtxError
from tests.kernels.virtual.snippet import each_lane, execute, good, kinds

HERE = Path(__file__).parent
README = Path(alu.__file__).with_name("README.md")
LANE = np.arange(32, dtype=np.uint32)


def rows() -> list[tuple[str, str, str, str]]:
    """Group, supported, refused, tests."""
    lines = README.read_text().partition("## Instructions")[2].partition("\n## ")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [(a, b, c, d) for a, b, c, d in cells[1:]]


def test_every_translation_is_in_the_table_and_its_tests_use_it() -> None:
    missing = []
    for name in HANDLERS:
        places = [row for row in rows() if re.search(rf"\b{name}\b", f"{row[0]} {row[1]}")]
        files = [file for row in places for file in re.findall(r"`(test_\w+\.py)`", row[3])]
        used = any(re.search(rf"\b{name}\b", (HERE / file).read_text()) for file in files)
        if not used:
            missing.append(name)
    assert not missing


REFUSED = {
    "carry chains": "add.cc.u32 %r1, %r0, %r0;",
    "128-bit loads": "ld.global.b128 %q1, [%d0];",
    "match": "match.any.sync.b32 %r1, %r0, -1;",
    "multimem": "multimem.ld_reduce.global.add.u32 %r1, [%d0];",
    "im2col": "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
    "[%r1], [%d0, {%r2, %r3, %r4}], [%r5], {%h1};",
    "gather4": "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
    "[%r1], [%d0, {%r2, %r3, %r4, %r5, %r6}], [%r7];",
    "element_stride": "tensormap.replace.tile.element_stride.global.b1024.b32 [%d0], 0, 1;",
    "global_stride": "tensormap.replace.tile.global_stride.global.b1024.b64 [%d0], 0, %d1;",
    "fp6": "tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%r1], %d1;",
    "sparse": "tcgen05.mma.sp.cta_group::1.kind::mxf4.block_scale [%r1], %d1, %d2, [%r5], %r2, [%r3], [%r4], %p1;",
    "ws": "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;",
    "shift": "tcgen05.shift.cta_group::1.down [%r1];",
    "16x64b": "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2];",
    "unpack::16b": "tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r2], {%r1};",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stops_the_run_with_its_name_and_line(name: str) -> None:
    assert any(name in row[2] for row in rows()), "the table doesn't say so"
    with pytest.raises((Unknown, PtxError), match=r"PTX line \d+|line \d+"):
        execute(REFUSED[name], np.zeros(4, np.uint64))


def test_special_functions() -> None:
    x = (LANE.astype(np.float32) + 1) / 8
    for name, expected in {
        "sqrt.rn": np.sqrt(x), "rsqrt.approx": 1 / np.sqrt(x), "sin.approx": np.sin(x), "cos.approx": np.cos(x),
        "tanh.approx": np.tanh(x), "lg2.approx": np.log2(x),
    }.items():  # fmt: skip
        out = each_lane(f"{name}.f32 %r31, %r1;", x.view(np.uint32)).view(np.float32)
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=1e-6, err_msg=name)
    sign = each_lane("copysign.f32 %r31, %r1, %r2;", (-x).view(np.uint32), x[::-1].copy().view(np.uint32))
    np.testing.assert_array_equal(sign.view(np.float32), -x[::-1])  # the sign of the first


def test_highest_bit_and_lanes() -> None:
    values = np.array([0, 1, 2, 255, 1 << 31, *range(27)], np.uint32)
    found = each_lane("bfind.u32 %r31, %r1;", values).view(np.int32)
    np.testing.assert_array_equal(found, [int(v).bit_length() - 1 for v in values])
    body = "setp.lt.u32 %p1, %r0, 7; mov.b32 %r31, 0; @!%p1 bra $X; activemask.b32 %r31; $X:"
    np.testing.assert_array_equal(each_lane(body), np.where(LANE < 7, 127, 0))


def test_address_spaces() -> None:
    body = """
    mov.b32 %r1, smem; cvt.u64.u32 %d40, %r1; cvta.shared.u64 %d41, %d40; isspacep.shared %p1, %d41;
    isspacep.global %p2, %d0; selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2; add.s32 %r31, %r2, %r3;
    mapa.shared::cluster.u32 %r4, %r1, 0; getctarank.shared::cluster.u32 %r5, %r4; add.s32 %r31, %r31, %r5;
    """
    np.testing.assert_array_equal(each_lane(body), np.full(32, 3))


def test_hints_change_nothing() -> None:
    body = """
    prefetch.global.L2 [%d0]; prefetchu.L1 [%d0]; applypriority.global.L2::evict_normal [%d0], 128;
    discard.global.L2 [%d0], 128; membar.gl; nanosleep.u32 100; griddepcontrol.wait;
    griddepcontrol.launch_dependents; ldu.global.b32 %r1, [%d0]; st.global.b32 [%d0], %r1;
    """
    out = np.full(32, 7, np.uint32)
    good(execute(body, out))
    np.testing.assert_array_equal(out, 7)


def test_registers_move_only_with_all_four_warps() -> None:
    good(execute("setmaxnreg.inc.sync.aligned.u32 200;", np.zeros(1, np.uint32), block=128))
    three = """shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1; setp.eq.u32 %p1, %r2, 3; @%p1 bra $X;
    setmaxnreg.{way}.sync.aligned.u32 40; $X:"""
    assert kinds(execute(three.replace("{way}", "inc"), np.zeros(1, np.uint32), block=128)) == {"deadlock"}
    run = execute(three.replace("{way}", "dec"), np.zeros(1, np.uint32), block=128)
    good(run)
    assert "not every warp" in str(run.lints[0])


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_plain_asynchronous_copies_need_their_wait(wait: str) -> None:
    data, out = LANE + 5, np.zeros(32, np.uint32)
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r0, 2; add.s32 %r3, %r1, %r2; mul.wide.u32 %d60, %r0, 4; add.s64 %d61, %d1, %d60;
    cp.async.ca.shared.global [%r3], [%d61], 4; cp.async.commit_group; {wait}
    ld.shared.b32 %r4, [%r3]; add.s64 %d62, %d0, %d60; st.global.b32 [%d62], %r4;
    """
    good(execute(body.replace("{wait}", wait), out, data))
    np.testing.assert_array_equal(out, data)
    assert kinds(execute(body.replace("{wait}", ""), out, data)) == {"race"}
