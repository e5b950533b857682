"""Writes lines of Python for one basic block: receives operands, hands on expressions over bits.

A uniform register is a local int (bool for a predicate), a vector register a local NumPy array of unsigned
ints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kernels.virtual.ptx import SINK, Imm, Instr, Not, Operand, PtxError, Reg, Sym

MASK = {8: "0xff", 16: "0xffff", 32: "0xffffffff", 64: "0xffffffffffffffff"}


class Unknown(PtxError):
    """An instruction, or a form of it, that the virtual GPU doesn't execute."""

    def __init__(self, instr: Instr, why: str = "") -> None:
        super().__init__(f"unknown instruction {instr}" + (f": {why}" if why else ""))


@dataclass(slots=True)
class Layout:
    """Where symbols lie: shared offsets in the CTA's window, parameters by index and offset, global variables."""

    shared: dict[str, int] = field(default_factory=dict)
    params: dict[str, int] = field(default_factory=dict)
    globals: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0  # a thread


_SPECIAL = {
    "%laneid": ("LANE", True), "%lanemask_lt": ("LANEMASK_LT", True), "%lanemask_le": ("LANEMASK_LE", True),
    "%lanemask_eq": ("LANEMASK_EQ", True), "%warpid": ("w.warp.index", False), "%smid": ("w.cta.sm", False),
    "%nsmid": ("w.machine.sms", False), "%cluster_ctarank": ("w.cta.rank", False),
    "%cluster_nctarank": ("w.cta.cluster.size", False), "%clock": ("w.clock()", False),
    "%clock64": ("w.clock()", False), "%clock_hi": ("0", False), "%globaltimer": ("w.clock()", False),
    "%globaltimer_lo": ("w.clock()", False), "%gridid": ("1", False),
    "%is_explicit_cluster": ("w.cta.cluster.explicit", False),
    "%dynamic_smem_size": ("w.cta.dynamic_bytes", False), "%total_smem_size": ("w.cta.smem_bytes", False),
}  # fmt: skip
for _axis in "xyz":
    _SPECIAL[f"%tid.{_axis}"] = (f"w.warp.tid_{_axis}", True)
    _i = "xyz".index(_axis)
    for _name, _where in (
        ("ntid", "w.cta.block"), ("ctaid", "w.cta.index"), ("nctaid", "w.cta.grid"),
        ("clusterid", "w.cta.cluster.index"), ("nclusterid", "w.cta.cluster.grid"),
        ("cluster_ctaid", "w.cta.in_cluster"), ("cluster_nctaid", "w.cta.cluster.shape"),
    ):  # fmt: skip
        _SPECIAL[f"%{_name}.{_axis}"] = (f"{_where}[{_i}]", False)


def identifier(name: str) -> str:
    """A register's name as a Python name."""
    return re.sub(r"\W", "_", name.lstrip("%")) + ("_" if name == "%lambda" else "")


class Emit:
    """Lines of one block."""

    def __init__(self, regs: dict[str, str], vectors: set[str], layout: Layout) -> None:
        self.regs = regs
        self.vectors = vectors
        self.layout = layout
        self.lines: list[str] = []
        self.guard: str | None = None  # expression of the guard predicate
        self.guard_vec = False
        self.pairs: dict[str, tuple[Operand, ...]] = {}  # registers that are known as a pack of others
        self.count = 0

    def line(self, text: str) -> None:
        """Add a statement, under the guard where that is uniform."""
        self.lines.append(f"if {self.guard}: {text}" if self.guard and not self.guard_vec else text)

    def temp(self) -> str:
        """A fresh local name."""
        self.count += 1
        return f"t{self.count}"

    def width(self, name: str) -> int:
        """Bits of a register (1: a predicate)."""
        kind = self.regs[name]
        return 1 if kind == "pred" else int(re.sub(r"\D", "", kind))

    def dtype(self, name: str) -> str:
        """NumPy type of a vector register."""
        width = self.width(name)
        return "bool" if width == 1 else f"u{width}"

    def is_vec(self, *operands: Operand) -> bool:
        """Whether any of the operands is a vector."""
        for op in operands:
            if isinstance(op, Not):
                op = op.reg  # noqa: PLW2901
            if isinstance(op, Reg) and (
                op.name in self.vectors or (op.name in _SPECIAL and _SPECIAL[op.name][1])
            ):
                return True
        return False

    def u(self, op: Operand, bits: int) -> str:
        """Expression of an operand's bits."""
        if isinstance(op, Reg):
            if op.name in self.regs:
                return self._register(op.name, bits)
            if op.name in _SPECIAL:
                return _SPECIAL[op.name][0]
            raise PtxError(f"register {op.name}")
        if isinstance(op, Imm):
            return str(self._immediate(op, bits))
        if isinstance(op, Sym):
            return self.address(op.name)
        if isinstance(op, Not):
            inner = self.u(op.reg, 1)
            return f"(~{inner})" if self.is_vec(op) else f"(not {inner})"
        raise PtxError(f"operand {op}")

    def _register(self, name: str, bits: int) -> str:
        width = self.width(name)
        text = identifier(name)
        if bits < width <= 64 and bits != 1:
            return f"{text}.astype(u{bits})" if name in self.vectors else f"({text} & {MASK[bits]})"
        return text

    @staticmethod
    def _immediate(op: Imm, bits: int) -> int | bool:
        if bits == 1:
            return bool(op.value)
        return op.value & ((1 << bits) - 1)

    def address(self, symbol: str) -> str:
        """Address of a variable (shared: in the window of the CTA) or a parameter."""
        if symbol in self.layout.shared:
            return f"(w.cta.window + {self.layout.shared[symbol]})"
        if symbol in self.layout.params:
            return f"w.cta.params[{self.layout.params[symbol]}].address"
        if symbol in self.layout.local:
            return str(self.layout.local[symbol])
        if symbol in self.layout.globals:
            return str(self.layout.globals[symbol])
        raise PtxError(f"symbol {symbol}")

    def s(self, op: Operand, bits: int) -> str:
        """Expression of an operand's signed value."""
        if isinstance(op, Imm):
            half = 1 << (bits - 1)
            return f"({((op.value & ((1 << bits) - 1)) ^ half) - half})"
        text = self.u(op, bits)
        return f"{text}.view(i{bits})" if self.is_vec(op) else f"s{bits}({text})"

    def f(self, op: Operand, kind: str) -> str:
        """Expression of an operand as a float."""
        bits = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}[kind]
        if isinstance(op, Imm) and op.width == 64 and kind == "f32":
            return f"f32(u64({op.value}).view(f64))"
        text = self.u(op, bits)
        if isinstance(op, Reg) and self.is_vec(op):
            return f"{text}.view({kind})"
        return f"flt({text}, {kind!r})"

    def set(self, dst: Operand, expr: str, vec: bool) -> None:
        """Assign an expression of bits (a predicate: of bools) to a register."""
        if dst == SINK:
            return
        assert isinstance(dst, Reg), dst
        name = dst.name
        target = identifier(name)
        dtype = self.dtype(name) if self.width(name) <= 64 else ""
        if name in self.vectors:
            if self.guard_vec:
                self.lines.append(f"{target} = blend({self.guard}, {expr}, {target}, {dtype})")
                return
            if not vec and dtype:
                expr = f"full({expr}, {dtype})"
        self.line(f"{target} = {expr}")

    def widen(self, expr: str, dst: Operand, bits: int, signed: bool, vec: bool) -> str:
        """A value of `bits` bits in a register that may be wider."""
        if not isinstance(dst, Reg) or dst == SINK:
            return expr
        width = self.width(dst.name)
        if width <= bits:
            return expr
        if vec:
            return (
                f"{expr}.view(i{bits}).astype(i{width}).view(u{width})"
                if signed
                else f"{expr}.astype(u{width})"
            )
        return f"(s{bits}({expr}) & {MASK[width]})" if signed else expr

    def rows(self, items: tuple[Operand, ...], name: str) -> None:
        """Assign the rows of a 2-D array to registers, in order."""
        targets = []
        for item in items:
            assert isinstance(item, Reg)
            targets.append("_" if item == SINK else identifier(item.name))
        self.line(f"{', '.join(targets)}, = {name}")
