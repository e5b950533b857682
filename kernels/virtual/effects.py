"""Translates instructions that touch memory, barriers or engines: receives one, hands on calls to the warp.

The semantics are in `warp.py` and the modules that it calls; here the operands are sorted out. Every form
that is not listed is refused by name.
"""

from __future__ import annotations

from kernels.virtual.alu import bits_of, handles
from kernels.virtual.cfg import has_result
from kernels.virtual.emit import Emit, Unknown
from kernels.virtual.ptx import SINK, Instr, Mem, Operand, Pair, Reg, Sym, Vec

SPACES = ("global", "shared", "param", "const", "local")
_SCOPES = ("cta", "cluster", "gpu", "sys")


def _space(i: Instr) -> str:
    return next((p for p in i.parts if p in SPACES), "generic")


def address(e: Emit, mem: Operand, bits: int = 32) -> str:
    """Expression of an address; shared addresses have 32 bits, others 64."""
    assert isinstance(mem, Mem), mem
    text = e.u(mem.base, bits)
    if isinstance(mem.base, Reg) and bits == 32 and e.width(mem.base.name) == 64:
        text = (
            f"({text}).astype(u32)"
            if e.is_vec(mem.base) and "astype" not in text
            else f"({text} & 0xffffffff)"
        )
    if mem.offset:
        text = f"({text} {'+' if mem.offset > 0 else '-'} {abs(mem.offset)})"
        if bits == 32 and not e.is_vec(mem.base):  # an index folded in may be negative: sums wrap
            text = f"({text} & 0xffffffff)"
    return text


def mask_of(e: Emit) -> str:
    """Further argument that names the lanes where a guard differs from lane to lane."""
    return f", {e.guard}" if e.guard_vec else ""


def _scope(i: Instr) -> str:
    return next((p for p in i.parts if p in _SCOPES and i.op.find(f"::{p}") < 0), "")


def _count(i: Instr) -> int:
    return next((int(p[1:]) for p in i.parts if p in ("v2", "v4", "v8")), 1)


def _is_sync(i: Instr) -> bool:
    return any(p in ("acquire", "release", "acq_rel", "relaxed", "volatile") for p in i.parts)


def suspend(e: Emit, i: Instr, call: str) -> None:
    """The group waits (and runs this block again) until the call is true."""
    if e.guard_vec:
        raise Unknown(i, "guarded by a predicate that differs between lanes")
    e.lines.append(f"if {e.guard + ' and ' if e.guard else ''}not {call}: return -2")


# --- memory ---------------------------------------------------------------------------------------


@handles("ld", "ldu")
def _load(e: Emit, i: Instr) -> None:
    space, kind, count = _space(i), i.parts[-1], _count(i)
    dst, mem = i.args[:2]
    size = bits_of(kind) // 8
    items = dst.items if isinstance(dst, Vec) else (dst,)
    assert isinstance(mem, Mem)
    if size == 16:
        raise Unknown(i, "128-bit loads")
    if space == "param" and isinstance(mem.base, Sym):
        index = e.layout.params[mem.base.name]
        call = f"w.cta.params[{index}].read({mem.offset}, {size}, {count})"
        vec = False
    else:
        vec = e.is_vec(mem.base) or space == "local"
        where = address(e, mem, 32 if space == "shared" else 64)
        sync = ", sync=True" if _is_sync(i) else ""
        call = f"w.load_{space}({where}, {size}, {count}{mask_of(e)}{sync})"
    if count == 1:
        e.set(items[0], e.widen(call, items[0], size * 8, kind[0] == "s", vec), vec)
        return
    name = e.temp()
    e.line(f"{name} = {call}")
    for n, item in enumerate(items):
        e.set(item, e.widen(f"{name}[{n}]", item, size * 8, kind[0] == "s", vec), vec)


@handles("st")
def _store(e: Emit, i: Instr) -> None:
    space, kind = _space(i), i.parts[-1]
    if "async" in i.parts or "bulk" in i.parts:
        _store_async(e, i)
        return
    mem, value = i.args[:2]
    size = bits_of(kind) // 8
    items = value.items if isinstance(value, Vec) else (value,)
    if size == 16:
        raise Unknown(i, "128-bit stores")
    where = address(e, mem, 32 if space == "shared" else 64)
    values = ", ".join(e.u(v, size * 8) for v in items)
    sync = ", sync=True" if _is_sync(i) else ""
    e.line(f"w.store_{space}({where}, {size}, ({values},){mask_of(e)}{sync})")


def _store_async(e: Emit, i: Instr) -> None:
    """st.async: a store to another CTA that completes bytes on a barrier there."""
    mem, value, bar = i.args
    size = bits_of(i.parts[-1]) // 8
    items = value.items if isinstance(value, Vec) else (value,)
    values = ", ".join(e.u(v, size * 8) for v in items)
    e.line(f"w.store_async({address(e, mem)}, {size}, ({values},), {address(e, bar)}{mask_of(e)})")


@handles("atom", "red")
def _atomic(e: Emit, i: Instr) -> None:
    space, kind = _space(i), i.parts[-1]
    if "async" in i.parts or _count(i) != 1:
        raise Unknown(i)
    args = i.args[1:] if i.parts[0] == "atom" else i.args
    mem, *values = args
    known = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}
    op = next((p for p in i.parts if p in known), None)
    if op is None:
        raise Unknown(i)
    where = address(e, mem, 32 if space == "shared" else 64)
    texts = ", ".join(e.u(v, bits_of(kind) if not kind.endswith("x2") else 32) for v in values)
    call = f"w.atomic({space!r}, {op!r}, {kind!r}, {where}, ({texts},){mask_of(e)})"
    if i.parts[0] == "atom":
        e.set(i.args[0], call, True)
    else:
        e.line(call)


@handles("stmatrix", "ldmatrix")
def _matrix(e: Emit, i: Instr) -> None:
    load = i.parts[0] == "ldmatrix"
    dst, src = (i.args[0], i.args[1]) if load else (i.args[1], i.args[0])
    count = int(next(p for p in i.parts if p in ("x1", "x2", "x4"))[1:])
    of_bytes = not load and {"b8", "m16n8", "trans"} <= set(i.parts)
    if not of_bytes and ("b16" not in i.parts or "m8n8" not in i.parts):
        raise Unknown(i)
    suspend(e, i, "w.together(0xffffffff)")
    items = dst.items if isinstance(dst, Vec) else (dst,)
    where, trans = address(e, src), "trans" in i.parts
    if load:
        name = e.temp()
        e.line(f"{name} = w.load_matrix({where}, {count}, {trans})")
        for n, item in enumerate(items):
            e.set(item, f"{name}[{n}]", True)
    else:
        values = ", ".join(e.u(v, 32) for v in items)
        call = (
            f"w.store_matrix_bytes({where}, ({values},))"
            if of_bytes
            else f"w.store_matrix({where}, ({values},), {trans})"
        )
        e.line(call)


# --- within a warp --------------------------------------------------------------------------------


@handles("elect")
def _elect(e: Emit, i: Instr) -> None:
    suspend(e, i, f"w.together({e.u(i.args[1], 32)})")
    dst = i.args[0]
    assert isinstance(dst, Pair)
    e.set(dst.first, "w.leader", False)
    e.set(dst.second, "w.elected()", True)


@handles("shfl")
def _shuffle(e: Emit, i: Instr) -> None:
    if i.parts[1] != "sync":
        raise Unknown(i)
    dst, a, lane, clamp, members = i.args
    suspend(e, i, f"w.together({e.u(members, 32)})")
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    mode = i.parts[2]
    uniform = mode == "idx" and not e.is_vec(lane)
    call = f"w.shuffle({mode!r}, {e.u(a, 32)}, {e.u(lane, 32)}, {e.u(clamp, 32)})"
    name = e.temp()
    e.line(f"{name} = {call}")
    e.set(first, f"w.uniform({name}[0])" if uniform else f"{name}[0]", not uniform)
    e.set(second, f"w.uniform({name}[1])" if uniform else f"{name}[1]", not uniform)


@handles("vote")
def _vote(e: Emit, i: Instr) -> None:
    dst, p, members = i.args
    suspend(e, i, f"w.together({e.u(members, 32)})")
    e.set(dst, f"w.vote({i.parts[2]!r}, {e.u(p, 1)})", False)


@handles("redux")
def _redux(e: Emit, i: Instr) -> None:
    dst, a, members = i.args
    kind = i.parts[-1]
    suspend(e, i, f"w.together({e.u(members, 32)})")
    if kind == "f32" and i.parts[2] in ("min", "max"):
        call = f"w.reduce_float({i.parts[2]!r}, {e.u(a, 32)}, {'abs' in i.parts}, {'NaN' in i.parts})"
    elif kind in ("s32", "u32", "b32"):
        call = f"w.reduce({i.parts[2]!r}, {e.u(a, 32)}, {kind == 's32'})"
    else:
        raise Unknown(i)
    e.set(dst, call, False)


@handles("activemask")
def _activemask(e: Emit, i: Instr) -> None:
    e.set(i.args[0], "w.mask_bits", False)


# --- barriers -------------------------------------------------------------------------------------


@handles("bar", "barrier")
def _barrier(e: Emit, i: Instr) -> None:
    parts = i.parts
    if "warp" in parts:
        suspend(e, i, f"w.together({e.u(i.args[0], 32)})")
        e.line("w.warp_sync()")
    elif "cluster" in parts:
        _cluster_barrier(e, i)
    elif "red" in parts:
        _barrier_red(e, i)
    else:
        args = list(i.args)
        number = e.u(args[0], 32)
        threads = e.u(args[1], 32) if len(args) > 1 else "0"
        if "arrive" in parts:
            suspend(e, i, f"w.bar_arrive({number}, {threads})")
        elif "sync" in parts:
            suspend(e, i, f"w.bar_sync({number}, {threads})")
        else:
            raise Unknown(i)


def _cluster_barrier(e: Emit, i: Instr) -> None:
    if "arrive" in i.parts:
        suspend(e, i, f"w.cluster_arrive({'relaxed' in i.parts})")
    elif "wait" in i.parts:
        suspend(e, i, "w.cluster_wait()")
    else:
        raise Unknown(i)


def _barrier_red(e: Emit, i: Instr) -> None:
    dst, number, *rest = i.args
    threads = e.u(rest[0], 32) if len(rest) == 2 else "0"
    op = next(p for p in i.parts if p in ("popc", "and", "or"))
    name = e.temp()
    e.line(f"{name} = w.bar_reduce({e.u(number, 32)}, {threads}, {op!r}, {e.u(rest[-1], 1)})")
    e.lines.append(f"if {name} is None: return -2")
    e.set(dst, name, False)


@handles("mbarrier")
def _mbarrier(e: Emit, i: Instr) -> None:
    what = i.parts[1]
    if what in ("test_wait", "try_wait"):
        _mbarrier_wait(e, i)
        return
    args = list(i.args)
    dst = args.pop(0) if has_result(i) else None
    if what == "pending_count":
        assert dst is not None
        e.set(dst, f"w.mbar_pending({e.u(args[0], 64)})", False)
        return
    where = address(e, args[0])
    scope = repr(_scope(i))
    count = e.u(args[1], 32) if len(args) > 1 else "1"
    if what == "init":
        call = f"w.mbar_init({where}, {count}{mask_of(e)})"
    elif what == "inval" and not e.guard_vec:
        call = f"w.mbar_invalidate({where})"
    elif what in ("expect_tx", "complete_tx"):
        call = f"w.mbar_{what}({where}, {count}{mask_of(e)})"
    elif what in ("arrive", "arrive_drop") and "expect_tx" in i.parts:
        call = f"w.mbar_arrive({where}, 1, {scope}, tx={count}, drop={what == 'arrive_drop'}{_named_mask(e)})"
    elif what in ("arrive", "arrive_drop"):
        call = f"w.mbar_arrive({where}, {count}, {scope}, drop={what == 'arrive_drop'}{_named_mask(e)})"
    else:
        raise Unknown(i)
    if dst is None or dst == SINK:
        e.line(call)
    else:
        e.set(dst, call, False)


def _named_mask(e: Emit) -> str:
    return f", mask={e.guard}" if e.guard_vec else ""


def _mbarrier_wait(e: Emit, i: Instr) -> None:
    dst, mem, state = i.args[:3]
    if e.guard_vec:
        raise Unknown(i, "guarded by a predicate that differs between lanes")
    parity = "parity" in i.parts
    blocking = i.parts[1] == "try_wait"
    text = e.u(state, 32 if parity else 64)
    name = e.temp()
    call = (
        f"w.mbar_wait({address(e, mem)}, {text}, {parity}, {blocking}, {_scope(i)!r}, {'relaxed' in i.parts})"
    )
    e.line(f"{name} = {call}")
    condition = f"{e.guard} and {name} is None" if e.guard else f"{name} is None"
    e.lines.append(f"if {condition}: return -2")
    e.set(dst, name, False)


@handles("fence", "membar")
def _fence(e: Emit, i: Instr) -> None:
    e.line(f"w.fence({'.'.join(i.parts[1:])!r})")


@handles("griddepcontrol")
def _griddep(e: Emit, i: Instr) -> None:
    if i.parts[1] not in ("wait", "launch_dependents"):
        raise Unknown(i)
    e.line(f"w.grid_dependency({i.parts[1]!r})")


@handles("setmaxnreg")
def _setmaxnreg(e: Emit, i: Instr) -> None:
    suspend(e, i, f"w.set_registers({i.parts[1]!r}, {e.u(i.args[0], 32)})")


@handles("nanosleep")
def _sleep(e: Emit, i: Instr) -> None:
    suspend(e, i, "w.pause()")


@handles("prefetch", "prefetchu", "applypriority", "discard")
def _hint(e: Emit, i: Instr) -> None:
    """No effect on values."""
    if "tensormap" in i.parts:
        assert isinstance(i.args[0], Mem)
        e.line(f"w.prefetch_map({address(e, i.args[0], 64)})")
