"""Machine-code gates: receives compiled functions, hands on what their code lacks, or has and shouldn't.

A table says which mnemonics and resources each step and variant must show. What the source says isn't enough:
ptxas may spill, drop a register reallocation or fall back to plain loads, and nothing else would tell. The build holds
all that it compiles against the same table, and fails where a gate is broken.

    python -m kernels.gates --arch sm_90a [--only 'step9*'] [--root DIR]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kernels.libraries import Libraries
from kernels.machine_code import mnemonics, sass, usage

SMEM_BYTES = 232_448  # what a CTA may have, on sm_90 and on sm_100
TMEM_COLUMNS = 512
REGISTERS = 65_536  # of an SM
ROLES = "registers don't move from one role to another"

_SETMAXREG = re.compile(r"USETMAXREG\S*\s+(?:UP\d+,\s*)?(0x[0-9a-f]+|\d+)")
_TMEM_ALLOC = re.compile(r"tcgen05\.alloc\S*\s+\[[^\]]*\],\s*(\w+|%\w+)\s*;")
_MOVED = r"mov\.[bu]32\s+{register},\s*(\d+)\s*;"


@dataclass(frozen=True, slots=True)
class Code:
    """What the gates look at. `roles`: registers a thread that the roles set; `tmem`: columns allocated."""

    function: str
    mnemonics: frozenset[str]
    registers: int
    stack: int
    smem: int
    threads: int
    roles: tuple[int, ...] = ()
    tmem: int = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """Requirements of the functions of `arch` whose name matches `pattern` and that satisfy `when`.

    `required` and `forbidden` are patterns over mnemonics; `rule` is over the rest, `because` its sentence.
    """

    arch: str
    pattern: str
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    rule: Callable[[Code], bool] | None = None
    because: str = ""
    when: Callable[[Code], bool] | None = None

    def applies(self, arch: str, code: Code) -> bool:
        """Whether this gate is for that function."""
        named = fnmatchcase(arch, self.arch) and fnmatchcase(code.function, self.pattern)
        return named and (self.when is None or self.when(code))

    def failures(self, code: Code) -> list[str]:
        """What is wrong with the code, a sentence each."""
        found = [f"no {p}" for p in self.required if not _any(code.mnemonics, p)]
        found += [f"has {m}" for p in self.forbidden for m in sorted(code.mnemonics) if fnmatchcase(m, p)]
        if self.rule is not None and not self.rule(code):
            found.append(self.because)
        return found


def _any(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _crowded(code: Code) -> bool:
    """With more threads an even share of the registers is under the 255 that a thread can name."""
    return code.threads > 256


def _shares(code: Code) -> bool:
    """Whether its name says that blocks of a cluster share operands: step9_128x256_2x1_…"""
    return re.search(r"_\dx\d_", code.function) is not None


def _roles_fit(code: Code) -> bool:
    """Producer and consumers together stay within the SM, and some role gave registers up for another."""
    return (
        len(code.roles) >= 2
        and min(code.roles) < code.registers < max(code.roles)
        and code.registers * code.threads <= REGISTERS
    )


GATES: tuple[Gate, ...] = (
    # Everywhere
    Gate("*", "*", forbidden=("LDL", "LDL.*", "STL", "STL.*")),
    Gate("*", "*", rule=lambda c: c.stack == 0, because="uses a stack"),
    Gate(
        "*", "*", rule=lambda c: c.smem <= SMEM_BYTES, because=f"takes over {SMEM_BYTES:,} B of shared memory"
    ),
    Gate(
        "*", "*", rule=lambda c: c.registers * c.threads <= REGISTERS, because="can't be resident: registers"
    ),
    # Hopper
    Gate("sm_90a", "step[1-9]_*", required=("HGMMA.64x*",)),
    Gate("sm_90a", "step[1-3]_*", forbidden=("UTMALDG*", "UTMASTG*")),
    Gate("sm_90a", "step[4-8]_*", required=("UTMALDG.2D*", "UTMASTG.2D*", "SYNCS.*TRYWAIT*", "STSM.*")),
    Gate("sm_90a", "step[1-7]_*", forbidden=("UTMALDG.*MULTICAST*", "UCGABAR*")),
    Gate("sm_90a", "step8_*", required=("UTMALDG.*MULTICAST*", "UCGABAR*")),
    Gate("sm_90a", "step[1-8]_*", forbidden=("USETMAXREG*",)),
    Gate("sm_90a", "step9_*", required=("UTMALDG.*", "SYNCS.*TRYWAIT*")),
    Gate("sm_90a", "step9_*", required=("USETMAXREG*",), rule=_roles_fit, because=ROLES, when=_crowded),
    Gate("sm_90a", "step9_*", required=("UTMALDG.*MULTICAST*", "UCGABAR*"), when=_shares),
    Gate("sm_90a", "step9_*", forbidden=("UTMALDG.*MULTICAST*",), when=lambda c: not _shares(c)),
    Gate("sm_90a", "step9_*_split2_*", required=("STAS*",)),  # halves go to the peer without a detour
    # Blackwell
    Gate("sm_10*", "step[1-9]_*", required=("UTC*MMA*", "LDTM*")),
    Gate(
        "sm_10*",
        "step[1-9]_*",
        rule=lambda c: 0 < c.tmem <= TMEM_COLUMNS,
        because="TMEM isn't 1 to 512 columns",
    ),
    Gate("sm_10*", "step[1-3]_*", forbidden=("UTMALDG*", "UTMASTG*")),
    Gate("sm_10*", "step[4-9]_*", required=("UTMALDG*",)),
    Gate("sm_10*", "step[4-8]_*", required=("UTMASTG*",)),
    Gate("sm_10*", "step[1-7]_*", forbidden=("UTC*MMA.2CTA*", "UTMALDG.*2CTA*")),
    Gate("sm_10*", "step[89]_*", required=("UTC*MMA.2CTA*", "UTMALDG.*2CTA*", "UTCBAR.*MULTICAST*")),
    Gate("sm_10*", "step[1-8]_*", forbidden=("USETMAXREG*",)),
    Gate("sm_10*", "step9_*", required=("USETMAXREG*",), rule=_roles_fit, because=ROLES, when=_crowded),
)


def code_of(libraries: Libraries, name: str) -> Code:
    """What a built function's PTX, machine code and manifest say."""
    info = libraries.info(name)
    return code_in(libraries.path(name, "cubin").parent, name, info.smem_bytes, info.threads)


def code_in(folder: Path, name: str, smem: int, threads: int) -> Code:
    """The same of a function whose PTX and cubin lie in a folder."""
    cubin = folder / f"{name}.cubin"
    text = sass(cubin)
    used = usage(cubin)
    return Code(
        function=name,
        mnemonics=frozenset(mnemonics(text)),
        registers=max(u.registers for u in used),
        stack=max(max(u.stack, u.local) for u in used),
        smem=smem,
        threads=threads,
        roles=tuple(sorted({int(value, 0) for value in _SETMAXREG.findall(text)})),
        tmem=tmem_columns((folder / f"{name}.ptx").read_text()),
    )


def tmem_columns(ptx: str) -> int:
    """Columns of tensor memory that a PTX text allocates, all its allocations together."""
    total = 0
    for operand in _TMEM_ALLOC.findall(ptx):
        number = operand
        if operand.startswith("%"):
            moved = re.search(_MOVED.format(register=re.escape(operand)), ptx)
            if moved is None:
                raise ValueError(f"tcgen05.alloc takes {operand}, which is not a constant")
            number = moved[1]
        total += int(number)
    return total


def check(arch: str, code: Code, gates: Sequence[Gate] = GATES) -> list[str]:
    """Failures of one function against every gate that applies to it."""
    return [text for gate in gates if gate.applies(arch, code) for text in gate.failures(code)]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: a table of what was built; returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m kernels gates", description="Check the machine code.")
    parser.add_argument("--arch", required=True, help="architecture, such as sm_90a")
    parser.add_argument("--only", default="*", help="pattern over function names")
    parser.add_argument(
        "--root", type=Path, help="folder of compiled kernels (default: $GEMM_KERNELS or .kernels)"
    )
    options = parser.parse_args(argv)
    libraries = Libraries(options.arch, options.root)
    names = sorted(n for n in libraries.manifest.functions if fnmatchcase(n, options.only))
    table = Table("function", "registers", "shared B", "threads", "TMEM", "gates")
    bad = 0
    for name in names:
        code = code_of(libraries, name)
        failed = check(options.arch, code)
        bad += bool(failed)
        registers = "/".join(map(str, (code.registers, *code.roles)))
        outcome = "; ".join(failed) or "pass"
        table.add_row(name, registers, f"{code.smem:,}", str(code.threads), str(code.tmem or ""), outcome)
    Console().print(table)
    if not names:
        print(f"nothing built for {options.arch} matches {options.only!r}")
    return 1 if bad or not names else 0


if __name__ == "__main__":
    raise SystemExit(main())
