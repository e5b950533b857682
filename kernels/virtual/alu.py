"""Translates instructions without side effects: receives one instruction, hands on an assignment in Python.

Every form that is not listed is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.virtual.emit import MASK, Emit, Unknown
from kernels.virtual.ptx import SINK, Imm, Instr, Operand, Pair

Handler = Callable[[Emit, Instr], None]
HANDLERS: dict[str, Handler] = {}

INTS = {"s8", "u8", "b8", "s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"}
FLOATS = {"f16", "bf16", "f32", "f64"}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the translation of an opcode."""

    def register(function: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = function
        return function

    return register


def bits_of(kind: str) -> int:
    """Width of a type suffix."""
    return int("".join(c for c in kind.lstrip("bf") if c.isdigit())) if kind != "pred" else 1


def _int_result(e: Emit, dst: Operand, expr: str, bits: int, *, vec: bool, signed: bool) -> None:
    """Wrap an integer expression to `bits`; a signed vector is viewed as unsigned."""
    text = (f"({expr}).view(u{bits})" if signed else expr) if vec else f"({expr}) & {MASK[bits]}"
    e.set(dst, text, vec)


def _float_result(e: Emit, i: Instr, dst: Operand, expr: str, vec: bool) -> None:
    if "sat" in i.parts:
        expr = f"saturate({expr})"
    e.set(dst, f"bits({expr})", vec)


_BINARY = {"add": "+", "sub": "-"}
_DIRECTED = ("rz", "rm", "rp")


def _directed(e: Emit, i: Instr, op: str, *values: Operand) -> bool:
    """Translate an fp32 operation that doesn't round to nearest; whether it is one."""
    mode = next((p for p in i.parts if p in _DIRECTED), None)
    if mode is None:
        return False
    if i.parts[-1] != "f32":
        raise Unknown(i)
    texts = ", ".join(e.f(v, "f32") for v in values)
    _float_result(e, i, i.args[0], f"directed({op!r}, {mode!r}, {texts})", e.is_vec(*values))
    return True


@handles("add", "sub")
def _add(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a, b = i.args
    sign = _BINARY[i.parts[0]]
    if "cc" in i.parts or (i.parts[0] == "sub" and set(i.parts) & set(_DIRECTED)):
        raise Unknown(i)
    if _directed(e, i, "add", a, b):
        return
    if kind in INTS:
        bits = bits_of(kind)
        _int_result(e, d, f"{e.u(a, bits)} {sign} {e.u(b, bits)}", bits, vec=e.is_vec(a, b), signed=False)
    elif kind in FLOATS:
        _float_result(e, i, d, f"({e.f(a, kind)} {sign} {e.f(b, kind)})", e.is_vec(a, b))
    else:
        _packed(e, i, f"lambda a, b: a {sign} b")


def _packed(e: Emit, i: Instr, function: str) -> None:
    kind = i.parts[-1]
    if not kind.endswith("x2") or kind[:-2] not in ("f16", "bf16", "f32"):
        raise Unknown(i)
    bits = 64 if kind == "f32x2" else 32
    values = ", ".join(e.u(a, bits) for a in i.args[1:])
    e.set(i.args[0], f"packed({kind[:-2]!r}, {function}, {values})", e.is_vec(*i.args[1:]))


@handles("mul")
def _mul(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a, b = i.args
    vec = e.is_vec(a, b)
    if kind in FLOATS:
        if not _directed(e, i, "mul", a, b):
            _float_result(e, i, d, f"({e.f(a, kind)} * {e.f(b, kind)})", vec)
    elif kind in INTS:
        expr, bits, signed = _product(e, i, a, b)
        _int_result(e, d, expr, bits, vec=vec, signed=signed and vec)
    else:
        _packed(e, i, "lambda a, b: a * b")


def _product(e: Emit, i: Instr, a: Operand, b: Operand) -> tuple[str, int, bool]:
    """Expression of a product, its width, and whether a vector of it is signed."""
    kind, part = i.parts[-1], i.parts[1]
    bits = bits_of(kind)
    signed = kind[0] == "s"
    if part == "lo":
        return f"{e.u(a, bits)} * {e.u(b, bits)}", bits, False
    if part == "wide":
        return f"{_wide(e, a, bits, signed)} * {_wide(e, b, bits, signed)}", 2 * bits, signed
    if part == "hi" and bits == 32:
        product = f"(({_wide(e, a, bits, signed)} * {_wide(e, b, bits, signed)}) >> 32)"
        if e.is_vec(a, b):
            return f"{product}.astype({'i' if signed else 'u'}32)", bits, signed
        return product, bits, signed
    if part == "hi" and bits == 64 and not e.is_vec(a, b):
        get = e.s if signed else e.u
        return f"({get(a, 64)} * {get(b, 64)}) >> 64", bits, signed
    raise Unknown(i)


def _wide(e: Emit, op: Operand, bits: int, signed: bool) -> str:
    text = e.s(op, bits) if signed else e.u(op, bits)
    return f"{text}.astype({'i' if signed else 'u'}{2 * bits if bits < 64 else 64})" if e.is_vec(op) else text


@handles("mad")
def _mad(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a, b, c = i.args
    if kind in FLOATS:
        _fma(e, i)
        return
    if "cc" in i.parts or kind not in INTS:
        raise Unknown(i)
    expr, bits, signed = _product(e, i, a, b)
    vec = e.is_vec(a, b)
    if vec and signed:
        expr = f"({expr}).view(u{bits})"
    elif not vec:
        expr = f"(({expr}) & {MASK[bits]})"
    _int_result(e, d, f"{expr} + {e.u(c, bits)}", bits, vec=e.is_vec(a, b, c), signed=False)


@handles("fma")
def _fma(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a, b, c = i.args
    if "relu" in i.parts:
        raise Unknown(i)
    if _directed(e, i, "fma", a, b, c):
        return
    if kind in FLOATS:
        _float_result(e, i, d, f"fma({e.f(a, kind)}, {e.f(b, kind)}, {e.f(c, kind)})", e.is_vec(a, b, c))
    else:
        _packed(e, i, "fma")


@handles("div", "rem")
def _div(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a, b = i.args
    if kind in FLOATS and i.parts[0] == "div":
        _float_result(e, i, d, f"({e.f(a, kind)} / {e.f(b, kind)})", e.is_vec(a, b))
    elif kind in INTS:
        bits = bits_of(kind)
        flags = f"{bits}, {kind[0] == 's'}, {i.parts[0] == 'rem'}"
        e.set(d, f"divide({e.u(a, bits)}, {e.u(b, bits)}, {flags})", e.is_vec(a, b))
    else:
        raise Unknown(i)


@handles("min", "max")
def _minmax(e: Emit, i: Instr) -> None:
    kind, name = i.parts[-1], i.parts[0]
    d, a, b = i.args[:3]
    vec = e.is_vec(a, b)
    if "xorsign" in i.parts or "relu" in i.parts or len(i.args) > 3:
        raise Unknown(i)
    if kind in FLOATS:
        _float_result(e, i, d, f"f{name}({e.f(a, kind)}, {e.f(b, kind)}, {'NaN' in i.parts})", vec)
    elif kind in INTS:
        bits, signed = bits_of(kind), kind[0] == "s"
        get = e.s if signed else e.u
        function = f"np.{name}imum" if vec else name
        _int_result(e, d, f"{function}({get(a, bits)}, {get(b, bits)})", bits, vec=vec, signed=signed)
    else:
        _packed(e, i, f"lambda a, b: f{name}(a, b, {'NaN' in i.parts})")


@handles("abs", "neg")
def _sign(e: Emit, i: Instr) -> None:
    kind, name = i.parts[-1], i.parts[0]
    d, a = i.args
    vec = e.is_vec(a)
    if kind in FLOATS:  # NaN keeps its payload: only the sign bit changes
        bits = bits_of(kind)
        top = 1 << (bits - 1)
        e.set(d, f"{e.u(a, bits)} {'&' if name == 'abs' else '^'} {top - 1 if name == 'abs' else top}", vec)
    elif kind in INTS:
        bits = bits_of(kind)
        function = ("np.abs" if vec else "abs") if name == "abs" else "-"
        _int_result(e, d, f"{function}({e.s(a, bits)})", bits, vec=vec, signed=True)
    elif kind in ("f16x2", "bf16x2"):
        mask, sign = ("0x7fff7fff", "&") if name == "abs" else ("0x80008000", "^")
        e.set(d, f"{e.u(a, 32)} {sign} {mask}", vec)
    else:
        raise Unknown(i)


_LOGIC = {"and": "&", "or": "|", "xor": "^"}


@handles("and", "or", "xor")
def _logic(e: Emit, i: Instr) -> None:
    bits = bits_of(i.parts[-1])
    d, a, b = i.args
    e.set(d, f"{e.u(a, bits)} {_LOGIC[i.parts[0]]} {e.u(b, bits)}", e.is_vec(a, b))


@handles("not")
def _not(e: Emit, i: Instr) -> None:
    bits = bits_of(i.parts[-1])
    d, a = i.args
    text = e.u(a, bits)
    if e.is_vec(a):
        e.set(d, f"~{text}", True)
    else:
        e.set(d, f"not {text}" if bits == 1 else f"{text} ^ {MASK[bits]}", False)


@handles("shl", "shr")
def _shift(e: Emit, i: Instr) -> None:
    kind, left = i.parts[-1], i.parts[0] == "shl"
    bits, signed = bits_of(kind), kind[0] == "s"
    d, a, n = i.args
    vec = e.is_vec(a, n)
    if isinstance(n, Imm) and n.value < bits:
        if left:
            _int_result(e, d, f"{e.u(a, bits)} << {n.value}", bits, vec=vec, signed=False)
        else:
            get = e.s if signed else e.u
            _int_result(e, d, f"{get(a, bits)} >> {n.value}", bits, vec=vec, signed=signed)
    elif left:
        e.set(d, f"shift_left({e.u(a, bits)}, {e.u(n, 32)}, {bits})", vec)
    else:
        e.set(d, f"shift_right({e.u(a, bits)}, {e.u(n, 32)}, {bits}, {signed})", vec)


@handles("shf")
def _funnel(e: Emit, i: Instr) -> None:
    d, a, b, n = i.args
    flags = f"{i.parts[1] == 'l'}, {i.parts[2] == 'clamp'}"
    e.set(d, f"funnel({e.u(a, 32)}, {e.u(b, 32)}, {e.u(n, 32)}, {flags})", e.is_vec(a, b, n))


@handles("lop3")
def _lop3(e: Emit, i: Instr) -> None:
    d, a, b, c, table = i.args[:5]
    if i.parts[-1] != "b32" or len(i.args) > 5:
        raise Unknown(i)
    e.set(d, f"lop3({e.u(a, 32)}, {e.u(b, 32)}, {e.u(c, 32)}, {e.u(table, 32)})", e.is_vec(a, b, c))


@handles("prmt")
def _prmt(e: Emit, i: Instr) -> None:
    d, a, b, c = i.args
    if len(i.parts) > 2:
        raise Unknown(i)
    e.set(d, f"prmt({e.u(a, 32)}, {e.u(b, 32)}, {e.u(c, 32)})", e.is_vec(a, b, c))


@handles("bfe", "bfi", "bfind", "brev", "popc", "clz")
def _bits(e: Emit, i: Instr) -> None:
    name, kind = i.parts[0], i.parts[-1]
    bits, signed = bits_of(kind), kind[0] == "s"
    d, *values = i.args
    widths = {"bfe": [bits, 32, 32], "bfi": [bits, bits, 32, 32]}.get(name, [bits])
    texts = ", ".join(e.u(v, w) for v, w in zip(values, widths, strict=True))
    call = {
        "bfe": f"lambda a, b, c: bfe(a, b, c, {bits}, {signed})",
        "bfi": f"lambda a, b, c, d: bfi(a, b, c, d, {bits})",
        "bfind": f"lambda a: find_bit(a, {bits}, {signed}, {'shiftamt' in i.parts})",
        "brev": f"lambda a: reverse_bits(a, {bits})",
        "popc": "popc",
        "clz": f"lambda a: clz(a, {bits})",
    }[name]
    dtype = f"u{bits}" if name in ("bfe", "bfi", "brev") else "u32"
    e.set(d, f"per_lane({call}, {dtype}, {texts})", e.is_vec(*values))


@handles("selp")
def _selp(e: Emit, i: Instr) -> None:
    bits = bits_of(i.parts[-1])
    d, a, b, p = i.args
    if e.is_vec(p):
        e.set(d, f"select({e.u(p, 1)}, {e.u(a, bits)}, {e.u(b, bits)}, u{bits})", True)
    elif e.is_vec(a, b):
        e.set(
            d,
            f"np.broadcast_to({e.u(a, bits)} if {e.u(p, 1)} else {e.u(b, bits)}, (32,)).astype(u{bits})",
            True,
        )
    else:
        e.set(d, f"{e.u(a, bits)} if {e.u(p, 1)} else {e.u(b, bits)}", False)


_COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=",
    "hi": ">", "hs": ">=",
}  # fmt: skip
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}


def _comparison(e: Emit, i: Instr, a: Operand, b: Operand) -> str:
    compare, kind = i.parts[1], i.parts[-1]
    if kind in FLOATS:
        x, y = e.f(a, kind), e.f(b, kind)
        if compare in ("num", "nan"):
            nan = f"(np.isnan({x}) | np.isnan({y}))"
            text = nan if compare == "nan" else f"~{nan}"
        elif compare in _UNORDERED:
            text = f"(({x} {_COMPARE[_UNORDERED[compare]]} {y}) | np.isnan({x}) | np.isnan({y}))"
        elif compare == "ne":  # ordered: a NaN makes it false
            text = f"(({x} < {y}) | ({x} > {y}))"
        else:
            text = f"({x} {_COMPARE[compare]} {y})"
        return text if e.is_vec(a, b) else f"bool({text})"
    if kind not in INTS or compare not in _COMPARE:
        raise Unknown(i)
    get = e.s if kind[0] == "s" and compare not in ("eq", "ne") else e.u
    return f"({get(a, bits_of(kind))} {_COMPARE[compare]} {get(b, bits_of(kind))})"


@handles("setp")
def _setp(e: Emit, i: Instr) -> None:
    dst, a, b = i.args[:3]
    text = _comparison(e, i, a, b)
    vec = e.is_vec(a, b)
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, SINK)
    logic = next((p for p in i.parts[2:-1] if p in _LOGIC), None)
    if logic is not None:
        third = i.args[3]
        other, both = e.u(third, 1), vec or e.is_vec(third)
        if second != SINK:
            raise Unknown(i)
        e.set(first, f"{text} {_LOGIC[logic]} {other}", both)
        return
    if second != SINK:
        e.set(second, f"~{text}" if vec else f"not {text}", vec)
    e.set(first, text, vec)


_UNARY = {
    "ex2": "smooth(np.exp2, {x})", "lg2": "smooth(np.log2, {x})", "rcp": "rcp({x})", "rsqrt": "rcp(np.sqrt({x}))",
    "sqrt": "np.sqrt({x})", "sin": "smooth(np.sin, {x})", "cos": "smooth(np.cos, {x})",
    "tanh": "smooth(np.tanh, {x})",
}  # fmt: skip


@handles(*_UNARY)
def _unary(e: Emit, i: Instr) -> None:
    kind = i.parts[-1]
    d, a = i.args
    if kind == "f32":
        _float_result(e, i, d, _UNARY[i.parts[0]].format(x=e.f(a, kind)), e.is_vec(a))
    elif kind in ("f16x2", "bf16x2"):
        _packed(e, i, f"lambda x: {_UNARY[i.parts[0]].format(x='x.astype(f32)')}")
    else:
        raise Unknown(i)


@handles("copysign")
def _copysign(e: Emit, i: Instr) -> None:
    bits = bits_of(i.parts[-1])
    top = 1 << (bits - 1)
    d, a, b = i.args
    e.set(d, f"({e.u(a, bits)} & {top}) | ({e.u(b, bits)} & {top - 1})", e.is_vec(a, b))
