"""Runs hand-written PTX: receives lines of a body and arrays, hands on the machine's `Run`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.virtual.host import buffer_of
from kernels.virtual.launch import Launch, Options
from kernels.virtual.machine import launch_machine
from kernels.virtual.report import Run
from kernels.virtual.translate import translate

REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<160>;
    .reg .b64 %d<64>;
    .reg .b128 %q<4>;
"""

#: D's 64 columns of tensor memory from %r10 on go to the first array, a row a thread; for `str.format`.
STORE_D = """
    shl.b32 %r12, %r2, 21; add.s32 %r12, %r12, %r10; mov.b32 %r13, 0;
    $L: add.s32 %r14, %r12, %r13;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r30, %r31}}, [%r14];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r15, %r0, 6; add.s32 %r15, %r15, %r13; mul.wide.u32 %d22, %r15, 4; add.s64 %d22, %d22, %d0;
    st.global.v2.b32 [%d22], {{%r30, %r31}};
    add.s32 %r13, %r13, 2; setp.lt.u32 %p6, %r13, 64; @%p6 bra $L;
    bar.sync 0; @%p2 bra $END;
"""


def stage(nbytes: int, columns: int, fence: str) -> str:
    """128 threads copy the second array to shared memory (%r1), and %r10 becomes `columns` of tensor memory.

    %r9 is a barrier for one arrival; %p2 holds in all warps but the first.
    """
    return f"""
    mov.b32 %r1, smem; shl.b32 %r3, %r0, 2; mov.b32 %r4, 0;
    $C: add.s32 %r5, %r3, %r4; cvt.u64.u32 %d20, %r5; add.s64 %d21, %d1, %d20; ld.global.b32 %r6, [%d21];
    add.s32 %r7, %r5, %r1; st.shared.b32 [%r7], %r6;
    add.s32 %r4, %r4, 512; setp.lt.u32 %p1, %r4, {nbytes}; @%p1 bra $C;
    {fence}
    shr.u32 %r20, %r0, 5; shfl.sync.idx.b32 %r2, %r20, 0, 31, -1;
    add.s32 %r8, %r1, {nbytes}; add.s32 %r9, %r1, {nbytes + 16};
    setp.ne.u32 %p2, %r2, 0; @%p2 bra $READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], {columns};
    elect.sync %r21|%p3, -1; @!%p3 bra $READY;
    mbarrier.init.shared.b64 [%r9], 1;
    $READY: bar.sync 0; ld.shared.b32 %r10, [%r8];
"""


def module(body: str, params: int, *, target: str = "sm_100a") -> str:
    """A kernel with `params` 64-bit parameters, their addresses in %d0, %d1, …; %r0 is %tid.x."""
    declared = ",\n".join(f".param .u64 p{n}" for n in range(params))
    loads = "\n".join(f"ld.param.b64 %d{n}, [p{n}];" for n in range(params))
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
        f".visible .entry snippet({declared})\n{{{REGISTERS}{loads}\nmov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )


def execute(
    body: str,
    *arrays: np.ndarray,
    block: int = 32,
    grid: tuple[int, int, int] = (1, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    smem: int = 8192,
    target: str = "sm_100a",
    maps: Sequence[bytes] = (),
    **options: Any,
) -> Run:
    """Run a body over arrays. `maps` become further parameters of 128 bytes, named m0, m1, …"""
    text = module(body, len(arrays), target=target)
    declared = "".join(f", .param .align 64 .b8 m{n}[128]" for n in range(len(maps)))
    text = text.replace(")\n{", f"{declared})\n{{", 1)
    program = translate(text)
    params = [struct.pack("<Q", a.ctypes.data) for a in arrays] + list(maps)
    launch = Launch(program, grid, (block, 1, 1), cluster, smem, tuple(params))
    buffers = [b for n, a in enumerate(arrays) if (b := buffer_of(f"array {n}", a)) is not None]
    return launch_machine(launch, buffers, Options(**options))


def good(run: Run) -> None:
    """No finding at all."""
    assert not run.findings, "\n".join(map(str, run.findings))


def kinds(run: Run) -> set[str]:
    """Kinds of what was found."""
    return {f.kind for f in run.findings}


def each_lane(compute: str, *inputs: np.ndarray, bits: int = 32, result: str = "%r31") -> np.ndarray:
    """Load %r1, %r2, … (or %d32 …) a lane, compute, store `result` a lane."""
    out = np.zeros(32, {32: np.uint32, 64: np.uint64}[bits])
    reg = {4: "%r{}", 8: "%d{}"}
    lines = []
    for n, array in enumerate(inputs):
        size = array.itemsize
        name = reg[size].format(n + 1 if size == 4 else n + 33)
        lines.append(f"mul.wide.u32 %d60, %r0, {size}; add.s64 %d61, %d{n + 1}, %d60;")
        lines.append(f"ld.global.b{size * 8} {name}, [%d61];")
    lines.append(compute)
    lines.append(
        f"mul.wide.u32 %d60, %r0, {bits // 8}; add.s64 %d61, %d0, %d60; st.global.b{bits} [%d61], {result};"
    )
    good(execute("\n".join(lines), out, *inputs))
    return out
