"""Parses PTX text: receives what the compiler emitted, hands on a `Module` of kernels as lists of
instructions.

Only syntax is handled here: scopes are flattened (registers and labels local to `{}` get unique names),
`.loc` directives become source lines, nothing is given a meaning.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field


class PtxError(Exception):
    """Text that is not understood; the message holds the line."""


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, such as `%r12` or a special one such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate as the bits that it stands for; `width` is 32 or 64 for hexadecimal floats, else 0."""

    value: int
    width: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    """A label, a variable or a parameter."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """`[base+offset]`; `rest` holds what follows a comma inside the brackets (TMA coordinates)."""

    base: Reg | Sym | Imm
    offset: int = 0
    rest: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, …}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: a second destination."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Not:
    """`!%p`."""

    reg: Reg


Operand = Reg | Imm | Sym | Mem | Vec | Pair | Not
SINK = Reg("_")


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the kernel's own source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(slots=True)
class Instr:
    """One instruction: `parts` is the mnemonic cut at its dots, `line` the line in the PTX text."""

    op: str
    parts: tuple[str, ...]
    args: tuple[Operand, ...]
    guard: Reg | None
    guard_not: bool
    line: int
    source: Source | None

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.op} at PTX line {self.line}{where}"


@dataclass(slots=True)
class Label:
    """A place to jump to."""

    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in shared, global or local memory; size 0 for the dynamic shared array."""

    name: str
    space: str
    align: int
    size: int
    extern: bool = False
    data: bytes = b""


@dataclass(slots=True)
class Kernel:
    """An entry: parameters as (name, bytes, alignment), body in order, register types by name."""

    name: str
    params: list[tuple[str, int, int]] = field(default_factory=list)
    body: list[Instr | Label] = field(default_factory=list)
    regs: dict[str, str] = field(default_factory=dict)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Module:
    """What a PTX text holds."""

    target: str
    kernels: dict[str, Kernel]
    variables: list[Variable]


_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_TOKEN = re.compile(
    r"\s*(?:(0[fF][0-9a-fA-F]{8})\b|(0[dD][0-9a-fA-F]{16})\b|(-?0[xX][0-9a-fA-F]+)U?\b|(-?\d+)U?\b|(%?[A-Za-z_$][\w$.:%]*)|(.))",
)


class _Tokens:
    """A cursor over the tokens of one statement."""

    def __init__(self, text: str) -> None:
        self.items = [m for m in _TOKEN.finditer(text) if m.group(0).strip()]
        self.at = 0

    def peek(self) -> str:
        return self.items[self.at].group(0).strip() if self.at < len(self.items) else ""

    def next(self) -> re.Match[str]:
        self.at += 1
        return self.items[self.at - 1]

    def take(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False


def _operand(tokens: _Tokens, rename: dict[str, str]) -> Operand:
    first = _single(tokens, rename)
    if tokens.take("|"):
        return Pair(first, _single(tokens, rename))
    return first


def _single(tokens: _Tokens, rename: dict[str, str]) -> Operand:  # noqa: PLR0911 (a case an operand form)
    if tokens.take("{"):
        items: list[Operand] = []
        while not tokens.take("}"):
            items.append(_operand(tokens, rename))
            tokens.take(",")
        return Vec(tuple(items))
    if tokens.take("["):
        return _memory(tokens, rename)
    if tokens.take("!"):
        reg = _single(tokens, rename)
        assert isinstance(reg, Reg)
        return Not(reg)
    match = tokens.next()
    f32, f64, hexa, dec, name, other = match.groups()
    if f32:
        return Imm(int(f32[2:], 16), 32)
    if f64:
        return Imm(int(f64[2:], 16), 64)
    if hexa:
        return Imm(int(hexa, 16))
    if dec:
        return _decimal(dec, tokens)
    if name:
        name = rename.get(name, name)
        return Reg(name) if name.startswith("%") or name == "_" else Sym(name)
    if other == "-":
        reg = _single(tokens, rename)
        assert isinstance(reg, Imm)
        return Imm(-reg.value)
    raise PtxError(f"operand {other!r}")


def _decimal(text: str, tokens: _Tokens) -> Imm:
    """An integer, or a decimal fraction such as 0.5 (its bits as an fp64)."""
    if tokens.peek() == "." and tokens.at + 1 < len(tokens.items):
        tokens.next()
        text += "." + tokens.next().group(0).strip()
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return Imm(int(text))


def _memory(tokens: _Tokens, rename: dict[str, str]) -> Mem:
    base = _single(tokens, rename)
    offset = 0
    rest: list[Operand] = []
    while not tokens.take("]"):
        if tokens.take("+"):
            imm = _single(tokens, rename)
            assert isinstance(imm, Imm)
            offset += imm.value
        elif tokens.take(","):
            rest.append(_operand(tokens, rename))
        else:
            imm = _single(tokens, rename)  # a negative offset without "+"
            assert isinstance(imm, Imm)
            offset += imm.value
    assert isinstance(base, Reg | Sym | Imm)
    return Mem(base, offset, tuple(rest))


_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_LABEL = re.compile(r"\s*([A-Za-z_$][\w$]*):(?!:)\s*")
_PRINT = re.compile(r"\{[^{}]*\bcall\S*\s+\(\w+\),\s*vprintf\b[^{}]*\}")  # what a kernel prints is left out
_REG_DECL = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_VARIABLE = re.compile(
    r"(?:\.(?:visible|weak)\s+)?(\.extern\s+)?\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?"
    r"\.[a-z](\d+)\s+([\w$]+)\s*(\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)"
    r"(?:\s+\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?"
)


def parse(text: str) -> Module:
    """Parse a whole module."""
    text = _PRINT.sub(_blank, _blank_comments(text))
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(n): name for n, name in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    module = Module(target.group(1) if target else "", {}, [])
    outside = _parse_entries(text, files, module)
    for statement in outside.split(";"):
        start = statement.find(".extern")
        for key in (".shared", ".global", ".const"):
            place = statement.find(key)
            if place >= 0 and (start < 0 or start > place):
                start = place
        match = _VARIABLE.match(statement[start:]) if start >= 0 else None
        if match:
            module.variables.append(_variable(match))
    return module


def _blank(match: re.Match[str]) -> str:
    """As long, and with as many lines."""
    return re.sub(r"[^\n]", " ", match.group(0))


def _blank_comments(text: str) -> str:
    """Comments become blanks, so that offsets and lines stay."""
    blank = _blank
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.S)


def _parse_entries(text: str, files: dict[int, str], module: Module) -> str:
    """Parse every entry into the module; hand back the text that lies outside functions."""
    outside = []
    at = 0
    for match in re.finditer(r"\.(entry|func)\b", text):
        if match.start() < at:
            continue
        head = text.find("{", match.end())
        semicolon = text.find(";", match.end())
        if head < 0 or (0 <= semicolon < head):
            continue  # a declaration without a body
        outside.append(text[at : match.start()])
        end = _matching(text, head)
        if match.group(1) == "entry":
            kernel = _entry(text, match.end(), head, end, files)
            module.kernels[kernel.name] = kernel
        at = end + 1
    outside.append(text[at:])
    return ";".join(outside)


def _matching(text: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return start + match.start()
    raise PtxError("unbalanced braces")


def _variable(match: re.Match[str]) -> Variable:
    extern, space, align, bits, name, array, count, init = match.groups()
    item = _BYTES[bits]
    size = item * (int(count) if count else (0 if array else 1))
    data = b""
    if init:
        values = [int(v, 0) for v in re.findall(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", init)]
        data = b"".join((v & ((1 << (8 * item)) - 1)).to_bytes(item, "little") for v in values)
    return Variable(name, space, int(align or item), size, bool(extern), data)


def _entry(text: str, start: int, head: int, end: int, files: dict[int, str]) -> Kernel:
    header = text[start:head]
    name = re.match(r"\s*([\w$]+)", header)
    assert name is not None
    kernel = Kernel(name.group(1))
    for align, bits, param, count in _PARAM.findall(header):
        size = _BYTES[bits] * int(count or 1)
        kernel.params.append((param, size, int(align or _BYTES[bits])))
    for key, values in re.findall(
        r"\.(reqntid|maxntid|minnctapersm|maxnreg|reqnctapercluster)\s+([\d, ]+)", header
    ):
        kernel.directives[key] = tuple(int(v) for v in values.replace(",", " ").split())
    _Body(kernel, files).run(text, head, end)
    return kernel


class _Body:
    """Walks the body of an entry; scopes are kept as a stack of renamings."""

    def __init__(self, kernel: Kernel, files: dict[int, str]) -> None:
        self.kernel = kernel
        self.files = files
        self.source: Source | None = None
        self.scopes: list[dict[str, str]] = [{}]
        self.count = 0

    def run(self, text: str, head: int, end: int) -> None:
        line = text.count("\n", 0, head) + 1
        for statement, offset in _statements(text, head + 1, end):
            at = line + text.count("\n", head, offset)
            if statement == "{":
                self._open(text, offset)
            elif statement == "}":
                self.scopes.pop()
            else:
                self._statement(statement, at)

    @property
    def names(self) -> dict[str, str]:
        return self.scopes[-1]

    def _open(self, text: str, offset: int) -> None:
        """Enter a scope: what it declares gets a name of its own."""
        self.count += 1
        inner = text[offset + 1 : _matching(text, offset)]
        names = dict(self.names)
        for label in re.findall(r"(?m)(?:^|[;{])\s*([A-Za-z_$][\w$]*):(?!:)", inner):
            names[label] = f"{label}@{self.count}"
        for kind, declared in re.findall(r"\.reg\s+\.(\w+)\s+([^;]*);", inner):
            for name in _declared(declared):
                fresh = name if name.startswith("%") else "%" + name
                names[name] = f"{fresh}@{self.count}"
                self.kernel.regs[names[name]] = kind
        self.scopes.append(names)

    def _statement(self, text: str, line: int) -> None:
        while (match := _LABEL.match(text)) is not None:
            self.kernel.body.append(Label(self.names.get(match.group(1), match.group(1))))
            text = text[match.end() :]
        text = text.strip()
        if not text:
            return
        if text.startswith("."):
            self._directive(text)
            return
        self.kernel.body.append(_instruction(text, line, self.source, self.names))

    def _directive(self, text: str) -> None:
        if re.match(r"\.loc\s", text):
            number, row = text.split()[1:3]
            self.source = Source(self.files.get(int(number), "?"), int(row)) if int(row) else self.source
        elif (match := _REG_DECL.match(text)) is not None:
            if len(self.scopes) == 1:
                for name in _declared(match.group(2)):
                    self.kernel.regs[name] = match.group(1)
        elif (match := _VARIABLE.match(text)) is not None:
            variable = _variable(match)
            (self.kernel.local if variable.space == "local" else self.kernel.shared).append(variable)
        elif not text.startswith((".pragma", ".maxnreg", ".noreturn")):
            raise PtxError(f"directive {text.split(maxsplit=1)[0]}")


def _declared(text: str) -> Iterator[str]:
    for item in text.split(","):
        name = item.strip()
        match = re.match(r"(.*)<(\d+)>$", name)
        if match:
            yield from (f"{match.group(1)}{i}" for i in range(int(match.group(2))))
        elif name:
            yield name


def _statements(text: str, start: int, end: int) -> Iterator[tuple[str, int]]:  # noqa: PLR0912
    """Cut a body at `;`, at `.loc` lines (which have none) and at scopes (braces that open a statement)."""
    at = start
    depth = 0
    begin = start
    while at < end:
        char = text[at]
        if char == "{":
            if (depth == 0 and not text[begin:at].strip().rstrip("\n")) or _only_label(text[begin:at]):
                if text[begin:at].strip():
                    yield text[begin:at], begin
                yield "{", at
                begin = at + 1
            else:
                depth += 1
        elif char == "}":
            if depth:
                depth -= 1
            else:
                if text[begin:at].strip():
                    yield text[begin:at], begin
                yield "}", at
                begin = at + 1
        elif char == ";":
            yield text[begin:at], begin + _blanks(text, begin)
            begin = at + 1
        elif char == "\n":
            head = text[begin:at].strip()
            if head.startswith((".loc", ".pragma")) or (head and _only_label(head)):
                yield head, begin + _blanks(text, begin)
                begin = at + 1
        at += 1
    if text[begin:end].strip():
        yield text[begin:end], begin


def _only_label(text: str) -> bool:
    return bool(re.fullmatch(r"\s*[A-Za-z_$][\w$]*:\s*", text))


def _blanks(text: str, at: int) -> int:
    match = re.compile(r"\s*").match(text, at)
    return len(match.group(0)) if match else 0


def _instruction(text: str, line: int, source: Source | None, names: dict[str, str]) -> Instr:
    guard = None
    negated = False
    match = _GUARD.match(text)
    if match:
        negated = bool(match.group(1))
        guard = Reg(names.get(match.group(2), match.group(2)))
        text = text[match.end() :]
    op, _, rest = text.replace("\t", " ").partition(" ")
    tokens = _Tokens(rest)
    args: list[Operand] = []
    try:
        while tokens.peek():
            args.append(_operand(tokens, names))
            if tokens.peek() and not tokens.take(","):
                if tokens.peek() == "(" or op.startswith("call"):
                    break  # calls are refused by name later
                raise PtxError(tokens.peek())
    except (PtxError, AssertionError, IndexError) as error:
        raise PtxError(f"line {line}: {text.strip()!r}: {error}") from error
    return Instr(op, tuple(re.split(r"\.|::", op)), tuple(args), guard, negated, line, source)
