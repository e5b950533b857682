"""Translates moves, conversions and addresses: receives one instruction, hands on an assignment in Python."""

from __future__ import annotations

from kernels.virtual.alu import FLOATS, INTS, bits_of, handles
from kernels.virtual.emit import MASK, Emit, Unknown
from kernels.virtual.lanes import NARROW
from kernels.virtual.ptx import SINK, Instr, Operand, Reg, Vec


@handles("mov")
def _mov(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a = i.args
    bits = bits_of(kind)
    if isinstance(a, Vec):
        _pack(e, d, a, bits)
    elif isinstance(d, Vec):
        _unpack(e, d, a, bits)
    else:
        if bits == 128:
            assert isinstance(a, Reg)
        e.set(d, e.u(a, bits), e.is_vec(a))


def _pack(e: Emit, d: Operand, source: Vec, bits: int) -> None:
    each = bits // len(source.items)
    vec = e.is_vec(*source.items)
    if bits == 128:
        e.set(d, "(" + ", ".join(e.u(x, each) for x in source.items) + ")", vec)
        return
    texts = [e.u(x, each) for x in source.items]
    if not vec:
        e.set(d, " | ".join(f"({t} << {n * each})" if n else t for n, t in enumerate(texts)), False)
        return
    terms = []
    for n, (text, item) in enumerate(zip(texts, source.items, strict=True)):
        wide = f"{text}.astype(u{bits})" if e.is_vec(item) else text
        terms.append(f"({wide} << {n * each})" if n else wide)
    e.set(d, " | ".join(terms), True)


def _unpack(e: Emit, d: Vec, a: Operand, bits: int) -> None:
    each = bits // len(d.items)
    text, vec = e.u(a, bits), e.is_vec(a)
    if bits == 128:
        for n, item in enumerate(d.items):
            e.set(item, f"{text}[{n}]", vec)
        return
    if isinstance(a, Reg) and any(isinstance(x, Reg) and x.name == a.name for x in d.items):
        name = e.temp()
        e.line(f"{name} = {text}")
        text = name
    for n, item in enumerate(d.items):
        shifted = f"({text} >> {n * each})" if n else text
        e.set(item, f"{shifted}.astype(u{each})" if vec else f"{shifted} & {MASK[each]}", vec)


@handles("cvt")
def _cvt(e: Emit, i: Instr) -> None:
    target, source = i.parts[-2], i.parts[-1]
    d, *values = i.args
    vec = e.is_vec(*values)
    if target in NARROW and source == "f32" and {"rn", "satfinite"} <= set(i.parts):
        e.set(d, f"pack_narrow({target!r}, {e.u(values[0], 32)}, {e.u(values[1], 32)})", vec)
        return
    known = {"cvt", "rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", target, source}
    if not set(i.parts) <= known:
        raise Unknown(i)
    if target in ("f16x2", "bf16x2") and source == "f32" and "rn" in i.parts and "sat" not in i.parts:
        e.set(d, f"pack_{target}({e.u(values[0], 32)}, {e.u(values[1], 32)})", vec)
        return
    if len(values) != 1 or (target not in FLOATS | INTS) or (source not in FLOATS | INTS):
        raise Unknown(i)
    if target in FLOATS or source in FLOATS:
        mode = next((p for p in i.parts if p in ("rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")), "rn")
        value = e.u(values[0], bits_of(source))
        text = f"convert({value}, {source!r}, {target!r}, {mode!r}, {'sat' in i.parts})"
        e.set(d, e.widen(text, d, bits_of(target), target[0] == "s", vec), vec)
        return
    if "sat" in i.parts:
        raise Unknown(i)
    e.set(d, _resize(e, d, values[0], source, target, vec), vec)


def _resize(e: Emit, d: Operand, a: Operand, source: str, target: str, vec: bool) -> str:
    """Integer to integer: cut, then extend by the sign of the narrower of the two."""
    low, high = bits_of(source), bits_of(target)
    width = e.width(d.name) if isinstance(d, Reg) and d != SINK else high
    keep = min(low, high)
    signed = (source if low <= high else target)[0] == "s"
    if vec:
        text = e.u(a, low)
        if keep < low:
            text = f"{text}.astype(u{keep})"
        if width > keep:
            return (
                f"{text}.view(i{keep}).astype(i{width}).view(u{width})"
                if signed
                else f"{text}.astype(u{width})"
            )
        return text
    text = e.u(a, low)
    if keep < low:
        text = f"({text} & {MASK[keep]})"
    return f"s{keep}({text}) & {MASK[width]}" if signed and width > keep else text


@handles("cvta")
def _cvta(e: Emit, i: Instr) -> None:
    """Generic addresses: shared memory of the cluster lies in a window of its own, all else is as it is."""
    bits = bits_of(i.parts[-1])
    d, a = i.args[:2]
    text = e.u(a, bits)
    for space in ("shared", "local"):
        if space in i.parts:
            text = f"({text} & 0xffffffff)" if "to" in i.parts else f"({text} | {space.upper()}_WINDOW)"
    e.set(d, text, e.is_vec(a))


@handles("isspacep")
def _isspacep(e: Emit, i: Instr) -> None:
    d, a = i.args
    shared = f"(({e.u(a, 64)} >> 32) == (SHARED_WINDOW >> 32))"
    vec = e.is_vec(a)
    if i.parts[1] == "shared":
        e.set(d, shared, vec)
    elif i.parts[1] == "global":
        e.set(d, f"~{shared}" if vec else f"not {shared}", vec)
    else:
        raise Unknown(i)


@handles("mapa")
def _mapa(e: Emit, i: Instr) -> None:
    """Address of the same place in another CTA of the cluster."""
    bits = bits_of(i.parts[-1])
    d, a, rank = i.args
    window = "" if "shared" in i.parts else " | SHARED_WINDOW"
    vec = e.is_vec(a, rank)
    rank_text = f"{e.u(rank, 32)}.astype(u{bits})" if e.is_vec(rank) and bits == 64 else e.u(rank, 32)
    e.set(d, f"({e.u(a, bits)} & 0xffffff) | ({rank_text} << 24){window}", vec)


@handles("getctarank")
def _getctarank(e: Emit, i: Instr) -> None:
    d, a = i.args
    text = f"({e.u(a, bits_of(i.parts[-1]))} >> 24) & 0xff"
    e.set(d, f"({text}).astype(u32)" if e.is_vec(a) else text, e.is_vec(a))
