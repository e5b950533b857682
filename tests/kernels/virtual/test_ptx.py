"""The parser: forms that the compiler writes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.virtual.ptx import Imm, Instr, Mem, Pair, PtxError, Reg, Vec, parse
from tests.kernels.virtual.snippet import execute, good

TEXT = """
.version 8.8
.target sm_100a
.file 1 "/somewhere/kernel.py"
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(
    .param .align 64 .b8 k_param_0[128],
    .param .u64 .ptr .global .align 4 k_param_1, // a comment, with a comma
    .param .u32 k_param_2
)
.reqntid 128, 1, 1
{
    .reg .pred %p<3>;
    .reg .b32 %r<4>;
    .shared .align 8 .b8 fixed[16];
$L0:
    .loc 1 42 7
    elect.sync %r1|%p1, -1;
    @!%p1 bra $L0;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1+16], [%rd1, {%r2, %r3}], [%r1-8];
    mov.b32 %r2, 0f3F800000;
    { .reg .b32 %r1; mov.b32 %r1, 7; }
    ret;
}
"""


def instructions() -> list[Instr]:
    return [i for i in parse(TEXT).kernels["k"].body if isinstance(i, Instr)]


def test_parameters_variables_and_directives() -> None:
    module = parse(TEXT)
    kernel = module.kernels["k"]
    assert module.target == "sm_100a"
    assert kernel.params == [("k_param_0", 128, 64), ("k_param_1", 8, 8), ("k_param_2", 4, 4)]
    assert kernel.directives["reqntid"] == (128, 1, 1)
    assert [(v.name, v.align, v.size) for v in module.variables] == [("smem", 1024, 0)]
    assert [(v.name, v.align, v.size) for v in kernel.shared] == [("fixed", 8, 16)]


def test_operands() -> None:
    elect, branch, copy, mov, inner, _ = instructions()
    assert elect.args == (Pair(Reg("%r1"), Reg("%p1")), Imm(-1))
    assert branch.guard == Reg("%p1")
    assert branch.guard_not
    assert copy.args[0] == Mem(Reg("%r1"), 16)
    assert copy.args[1] == Mem(Reg("%rd1"), 0, (Vec((Reg("%r2"), Reg("%r3"))),))
    assert copy.args[2] == Mem(Reg("%r1"), -8)
    assert mov.args[1] == Imm(0x3F800000, 32)
    assert inner.args[0] == Reg("%r1@1")


def test_source_lines() -> None:
    elect = instructions()[0]
    assert str(elect.source) == "kernel.py:42"
    assert TEXT.split("\n")[elect.line - 1].strip().startswith("elect.sync")


def test_a_directive_that_is_not_known_is_named() -> None:
    with pytest.raises(PtxError, match=r"\.branchtargets"):
        parse(TEXT.replace("ret;", ".branchtargets $L0; ret;"))


def test_what_a_kernel_prints_is_left_out() -> None:
    body = """
    { // callseq 0, 0
    .param .b64 param0;
    .param .b32 retval0;
    st.param.b64 [param0], %d0;
    call.uni (retval0), vprintf, (param0, param0);
    ld.param.b32 %r1, [retval0];
    } // callseq 0
    st.global.b32 [%d0], %r0;
    """
    good(execute(body, np.zeros(1, np.uint32)))
