"""Turns a kernel into Python: receives parsed PTX, hands on a `Program` with one function a basic block.

`program.blocks[n](w, R)` runs block n for a group of lanes `w` with crossing registers `R`. It returns the
next block's number, -1 when the group has left, -2 when it has to wait (the block is run again later), or -3
when the group has split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.virtual import cfg, lanes, ptx
from kernels.virtual.emit import Emit, Layout, Unknown, identifier
from kernels.virtual.handlers import HANDLERS
from kernels.virtual.ptx import Instr, Kernel, Module, Sym

SHARED_WINDOW = 0x7F00_0000_0000_0000  # generic addresses of shared memory start here
LOCAL_WINDOW = 0x7E00_0000_0000_0000
NOWHERE = 0x7D00_0000_0000_0000  # no buffer lies here
STATIC_BASE = 1024  # the hardware keeps the first KiB of a CTA's window to itself

BlockFunction = Callable[[Any, list[Any]], int]


@dataclass(slots=True)
class Program:
    """A kernel ready to run. `merge[n]`: slots of R that may differ between groups that meet at block n."""

    name: str
    kernel: Kernel
    blocks: list[BlockFunction]
    instrs: list[Instr]
    layout: Layout
    static_bytes: int
    slots: dict[str, int]
    live: list[list[int]]
    vector_slots: set[int]
    text: str
    target: str
    unwaited: list[tuple[Instr, Instr]]
    block_lines: list[list[int]]  # PTX lines of each block
    initial: list[
        Any
    ]  # registers at the start: None, or 0 where the compiler lets an undefined value be read


_MOST_PROGRAMS = 128
_CACHE: dict[tuple[str, str], Program] = {}


def translate(text: str, entry: str | None = None) -> Program:
    """Translate one entry of a PTX text (the only one where none is named); results are kept by content."""
    key = (hashlib.sha256(text.encode()).hexdigest(), entry or "")
    if key not in _CACHE:
        if len(_CACHE) >= _MOST_PROGRAMS:
            _CACHE.clear()
        module = ptx.parse(text)
        if entry is None:
            if len(module.kernels) != 1:
                raise ptx.PtxError(f"{len(module.kernels)} kernels, name one of {', '.join(module.kernels)}")
            entry = next(iter(module.kernels))
        _CACHE[key] = _translate(module, module.kernels[entry])
    return _CACHE[key]


def _translate(module: Module, kernel: Kernel) -> Program:
    flow = cfg.build(kernel)
    layout, static_bytes = _layout(module, kernel)
    slots = {name: n for n, name in enumerate(flow.crossing)}
    instrs: list[Instr] = []
    lines: list[str] = []
    for block in flow.blocks:
        lines.extend(_block(block, flow, layout, slots, instrs))
    text = "\n".join(lines)
    names = _namespace()
    exec(compile(text, f"<{kernel.name[:40]}>", "exec"), names)
    return Program(
        kernel.name,
        kernel,
        [names[f"block_{b.index}"] for b in flow.blocks],
        instrs,
        layout,
        static_bytes,
        slots,
        [sorted(slots[r] for r in b.live_in) for b in flow.blocks],
        {slots[r] for r in flow.crossing if r in flow.vectors},
        text,
        module.target,
        cfg.unwaited_reads(flow.blocks),
        [[i.line for i in b.instrs] for b in flow.blocks],
        [_undefined(flow, r) if r in flow.blocks[0].live_in else None for r in flow.crossing],
    )


def _undefined(flow: cfg.Flow, register: str) -> Any:
    kind = flow.kernel.regs[register]
    if register in flow.vectors:
        return np.zeros(32, bool if kind == "pred" else lanes.UNSIGNED[int(kind.lstrip("bsuf"))])
    return False if kind == "pred" else 0


def _namespace() -> dict[str, Any]:
    names: dict[str, Any] = {k: v for k, v in vars(lanes).items() if not k.startswith("_")}
    lane = np.arange(32, dtype=np.uint32)
    names.update(
        np=np,
        SHARED_WINDOW=SHARED_WINDOW,
        LOCAL_WINDOW=LOCAL_WINDOW,
        LANEMASK_EQ=np.uint32(1) << lane,
        LANEMASK_LT=(np.uint32(1) << lane) - np.uint32(1),
        LANEMASK_LE=((np.uint64(2) << lane.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
    )
    return names


def _layout(module: Module, kernel: Kernel) -> tuple[Layout, int]:
    """Static shared variables first, then the dynamic array at its alignment."""
    layout = Layout(params={name: n for n, (name, _, _) in enumerate(kernel.params)})
    at = STATIC_BASE
    shared = [v for v in module.variables if v.space == "shared"] + kernel.shared
    for variable in sorted(shared, key=lambda v: v.size == 0):
        at = -(-at // variable.align) * variable.align
        layout.shared[variable.name] = at
        at += variable.size
    for number, variable in enumerate(v for v in module.variables if v.space in ("global", "const")):
        layout.globals[variable.name] = NOWHERE + (
            number << 32
        )  # texts to print: only their address is taken
    for variable in kernel.local:
        start = -(-layout.local_bytes // variable.align) * variable.align
        layout.local[variable.name] = start
        layout.local_bytes = start + variable.size
    return layout, at


def _block(
    block: cfg.Block, flow: cfg.Flow, layout: Layout, slots: dict[str, int], instrs: list[Instr]
) -> list[str]:
    emit = Emit(flow.kernel.regs, flow.vectors, layout)
    used: set[str] = set()
    wrote: set[str] = set()
    for instr in block.instrs:
        used.update(r for r in cfg.uses(instr) if r not in wrote)
        wrote.update(cfg.defs(instr))
    loads = sorted(r for r in used if r in block.live_in)
    keeps = sorted(r for r in wrote if r in block.live_out)
    # A guarded first write keeps the old value; registers never written before read as None.
    lines = [f"def block_{block.index}(w, R):"]
    emit.lines.extend(f"{identifier(r)} = R[{slots[r]}]" for r in loads)
    emit.lines.append(f"w.count += {len(block.instrs)}")
    saves = [f"R[{slots[r]}] = {identifier(r)}" for r in keeps]
    jumped = False
    for instr in block.instrs:
        jumped = _instruction(emit, instr, block, flow, saves, instrs)
    if not jumped:
        emit.lines.extend(saves)
        emit.lines.append(f"return {block.index + 1 if block.index + 1 < len(flow.blocks) else 'w.leave()'}")
    lines.extend("    " + line for line in emit.lines)
    return lines


def _instruction(
    emit: Emit, instr: Instr, block: cfg.Block, flow: cfg.Flow, saves: list[str], instrs: list[Instr]
) -> bool:
    """Translate one instruction; whether it ends the block."""
    head = instr.parts[0]
    emit.guard, emit.guard_vec = None, False
    if instr.guard is not None:
        emit.guard_vec = emit.is_vec(instr.guard)
        emit.guard = emit.u(ptx.Not(instr.guard) if instr.guard_not else instr.guard, 1)
    if head == "bra":
        _branch(emit, instr, block, flow, saves)
        return True
    number = len(instrs)
    instrs.append(instr)
    if head in ("ret", "exit"):
        emit.lines.append(f"w.at = {number}")
        if emit.guard is None:
            emit.lines.append("return w.leave()")
            return True
        emit.lines.extend(saves)
        emit.lines.append(f"return w.leave_some({emit.guard}, {block.index + 1})")
        return True
    if head == "trap":
        emit.lines.append(f"w.at = {number}")
        emit.line("w.trap()")
        return False
    handler = HANDLERS.get(head)
    if handler is None:
        raise Unknown(instr)
    before = len(emit.lines)
    try:
        handler(emit, instr)
    except (ptx.PtxError, KeyError, AssertionError, ValueError, StopIteration) as error:
        if isinstance(error, Unknown):
            raise
        raise Unknown(instr, repr(error)) from error
    if any("w." in line for line in emit.lines[before:]):
        emit.lines.insert(before, f"w.at = {number}")
    return False


def _branch(emit: Emit, instr: Instr, block: cfg.Block, flow: cfg.Flow, saves: list[str]) -> None:
    place = instr.args[0]
    assert isinstance(place, Sym)
    target = flow.target[place.name]
    emit.lines.extend(saves)
    if emit.guard is None:
        emit.lines.append(f"return {target}")
    elif emit.guard_vec:
        emit.lines.append(f"return w.branch({emit.guard}, {target}, {block.index + 1})")
    else:
        emit.lines.append(f"return {target} if {emit.guard} else {block.index + 1}")
