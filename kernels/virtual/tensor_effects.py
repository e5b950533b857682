"""Translates tensor-core instructions (tcgen05, wgmma): receives one, hands on calls to the warp."""

from __future__ import annotations

from kernels.virtual.alu import handles
from kernels.virtual.effects import address, suspend
from kernels.virtual.emit import Emit, Unknown
from kernels.virtual.ptx import Imm, Instr, Mem, Not, Operand, Reg, Vec


def _pair(i: Instr) -> int:
    """CTAs that work together: 1 or 2."""
    return 2 if "cta_group::2" in i.op else 1


@handles("tcgen05")
def _tcgen05(e: Emit, i: Instr) -> None:
    what = i.parts[1]
    if what == "mma":
        _mma(e, i)
    elif what == "commit":
        mask = e.u(i.args[1], 16) if "multicast" in i.parts else "None"
        e.line(f"w.tc_commit({address(e, i.args[0])}, {mask}, {_pair(i)})")
    elif what == "ld":
        _load(e, i)
    elif what == "st":
        _store(e, i)
    elif what == "cp":
        _copy(e, i)
    elif what == "wait":
        suspend(e, i, f"w.tc_wait({i.parts[2]!r})")
    elif what == "fence":
        e.line(f"w.tc_fence({i.parts[2]!r})")
    elif what == "alloc":
        suspend(e, i, f"w.tc_alloc({address(e, i.args[0])}, {e.u(i.args[1], 32)}, {_pair(i)})")
    elif what == "dealloc":
        suspend(e, i, f"w.tc_dealloc({e.u(i.args[0], 32)}, {e.u(i.args[1], 32)}, {_pair(i)})")
    elif what == "relinquish_alloc_permit":
        e.line("w.tc_relinquish()")
    else:
        raise Unknown(i)


_SCALES = {  # kind and vector size, and for them whether values are packed and scales a row
    "mxf8f6f4": {"": (False, 1), "1X": (False, 1), "block32": (False, 1)},
    "mxf4": {"": (True, 2), "2X": (True, 2), "block32": (True, 2)},
    "mxf4nvf4": {"2X": (True, 2), "block32": (True, 2), "4X": (True, 4), "block16": (True, 4)},
}


def _mma_scaled(e: Emit, i: Instr) -> None:
    kind = next((p for p in _SCALES if p in i.parts), "")
    size = next((p for p in i.parts if p in ("1X", "2X", "4X", "block16", "block32")), "")
    plain = {"tcgen05", "mma", "cta_group", "1", "2", "kind", kind, "block_scale", "scale_vec", size}
    plain |= {"collector", "a", "discard", "fill", "use", "lastuse", ""}
    if size not in _SCALES.get(kind, {}) or not set(i.parts) <= plain or e.guard_vec or len(i.args) != 7:
        raise Unknown(i)
    packed, vector = _SCALES[kind][size]
    d, a, b, idesc, scale_a, scale_b, enable = i.args
    from_tmem = isinstance(a, Mem)
    if from_tmem and packed:
        raise Unknown(i, "packed values from tensor memory")
    a_text = address(e, a) if from_tmem else e.u(a, 64)
    e.line(
        f"w.tc_mma_scaled({packed}, {vector}, {address(e, d)}, {a_text}, {e.u(b, 64)}, {e.u(idesc, 32)}, "
        f"({address(e, scale_a)}, {address(e, scale_b)}), {e.u(enable, 1)}, {_pair(i)}, {from_tmem})"
    )


def _mma(e: Emit, i: Instr) -> None:
    if "block_scale" in i.parts:
        _mma_scaled(e, i)
        return
    kind = next((p for p in ("f16", "tf32", "f8f6f4", "i8") if p in i.parts), None)
    plain = {"tcgen05", "mma", "cta_group", "1", "2", "kind", "f16", "tf32", "collector", "a"}
    plain |= {"discard", "fill", "use", "lastuse", "f8f6f4"}
    if kind is None or not set(i.parts) <= plain or e.guard_vec:
        raise Unknown(i)
    d, a, b, idesc, *rest = i.args
    disabled: tuple[Operand, ...] = ()
    if isinstance(rest[0], Vec):
        disabled = rest[0].items
        rest = rest[1:]
    if len(rest) != 1:
        raise Unknown(i, "a scale of D")
    enable = rest[0]
    masks = "(" + "".join(f"{e.u(x, 32)}, " for x in disabled) + ")"
    from_tmem = isinstance(a, Mem)
    a_text = address(e, a) if from_tmem else e.u(a, 64)
    e.line(
        f"w.tc_mma({kind!r}, {address(e, d)}, {a_text}, {e.u(b, 64)}, {e.u(idesc, 32)}, {e.u(enable, 1)}, "
        f"{_pair(i)}, {from_tmem}, {masks})"
    )


def _copy(e: Emit, i: Instr) -> None:
    shape = next((p for p in i.parts if p in ("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")), None)
    form = next((p for p in i.parts if p in ("02_13", "01_23", "warpx4")), "")
    needs = {"64x128b": ("02_13", "01_23"), "32x128b": ("warpx4",)}.get(str(shape), ("",))
    if shape is None or form not in needs or "b6x16_p32" in i.parts or e.guard_vec:
        raise Unknown(i)
    e.line(
        f"w.tc_copy({address(e, i.args[0])}, {e.u(i.args[1], 64)}, {shape!r}, {form!r}, "
        f"{'b4x16_p64' in i.parts}, {_pair(i)})"
    )


_NOT_KNOWN = ("16x64b", "16x32bx2")  # which lane holds what isn't established


def _shape(i: Instr) -> tuple[str, int, bool]:
    """Shape, repetitions, and whether halves are packed or unpacked."""
    shape = next(p for p in i.parts if p in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"))
    count = next(int(p[1:]) for p in i.parts if p.startswith("x") and p[1:].isdigit())
    return shape, count, "16b" in i.parts


def _load(e: Emit, i: Instr) -> None:
    dst, mem = i.args[:2]
    shape, count, halves = _shape(i)
    if "red" in i.parts or len(i.args) > 2 or (halves and shape != "32x32b") or shape in _NOT_KNOWN:
        raise Unknown(i)
    items = dst.items if isinstance(dst, Vec) else (dst,)
    name = e.temp()
    suspend(e, i, "w.together(0xffffffff)")
    e.line(f"{name} = w.tc_load({address(e, mem)}, {shape!r}, {count}, {halves})")
    e.rows(items, name)


def _store(e: Emit, i: Instr) -> None:
    mem, src = i.args[:2]
    shape, count, halves = _shape(i)
    if halves or len(i.args) > 2 or shape in _NOT_KNOWN:
        raise Unknown(i)
    items = src.items if isinstance(src, Vec) else (src,)
    suspend(e, i, "w.together(0xffffffff)")
    values = ", ".join(e.u(v, 32) for v in items)
    e.line(f"w.tc_store({address(e, mem)}, {shape!r}, {count}, ({values},))")


@handles("wgmma")
def _wgmma(e: Emit, i: Instr) -> None:
    what = i.parts[1]
    if what == "fence":
        e.line("w.wg_fence()")
    elif what == "commit_group":
        e.line("w.wg_commit()")
    elif what == "wait_group":
        suspend(e, i, f"w.wg_wait({e.u(i.args[0], 32)})")
    elif what == "mma_async":
        _wgmma_mma(e, i)
    else:
        raise Unknown(i)


def _number(operand: Operand) -> int:
    assert isinstance(operand, Imm)
    return operand.value


def _wgmma_mma(e: Emit, i: Instr) -> None:
    d, a, b, enable, *rest = i.args
    types = i.parts[-3:]
    shape = next(p for p in i.parts if p.startswith("m64n"))
    if (
        types[0] not in ("f32", "f16")
        or types[1] not in ("f16", "bf16", "tf32")
        or "sp" in i.parts
        or e.guard_vec
    ):
        raise Unknown(i)
    assert isinstance(d, Vec)
    numbers = [_number(x) for x in rest]
    scale_a, scale_b, *trans = numbers if rest else [1, 1]
    trans_a, trans_b = [*trans, 0, 0][:2] if len(trans) != 1 else (0, trans[0])
    columns = int(shape.split("n")[1].split("k")[0])
    a_text = "(" + ", ".join(e.u(x, 32) for x in a.items) + ",)" if isinstance(a, Vec) else e.u(a, 64)
    on = e.u(enable, 1) if isinstance(enable, Not | Reg) else str(bool(_number(enable)))
    values = ", ".join(e.u(x, 32) for x in d.items)
    suspend(e, i, "w.together(0xffffffff)")
    name = e.temp()
    e.line(
        f"{name} = w.wg_mma({types!r}, {columns}, ({values},), {a_text}, {e.u(b, 64)}, {on}, "
        f"{scale_a * (1 if scale_b == 1 else -1)}, {trans_a}, {trans_b})"
    )
    e.rows(d.items, name)
