"""Delays in a compiled kernel: receives PTX, hands on PTX whose warps sleep by a seed before they synchronize.

For kernels that have no such option in their source. Before every wait, arrival, bulk copy and named barrier about
every fourth visit of a warp sleeps for up to a microsecond, by a hash of the seed, the warp, the block, the place
and how many such places it has passed. Results must not depend on that.
"""

from __future__ import annotations

import re

SEED = "jitter_seed"  # a variable of the module, where no seed is given
_PLACE = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(?:mbarrier\.(?:try_wait|arrive)|cp\.async\.bulk\.tensor|bar(?:rier)?\.(?:cta\.)?sync)"
)
_REGISTERS = ".reg .b32 %jit<6>;\n.reg .b64 %jitd;\n.reg .pred %jitp;"


def delayed(text: str, seed: int | None = None) -> str:
    """The text of one kernel with delays; without a seed the module's variable `SEED` holds it at run time."""
    lines = text.split("\n")
    entry = next(n for n, line in enumerate(lines) if ".entry" in line)
    begin = next(n for n, line in enumerate(lines) if n > entry and line.strip() == "{")
    first = next(n for n, line in enumerate(lines) if n > begin and _starts_code(line))
    out: list[str] = []
    places = 0
    for number, line in enumerate(lines):
        if number == entry and seed is None:
            out.append(f".visible .global .align 4 .u32 {SEED};")
        if number == first:
            out += _prologue(seed)
        if number > begin and _PLACE.match(line):
            places += 1
            out += _delay(places)
        out.append(line)
        if number == begin:
            out.append(_REGISTERS)
    if not places:
        raise ValueError("nothing synchronizes here")
    return "\n".join(out)


def _starts_code(line: str) -> bool:
    """Whether an instruction stands in the line: no directive, label, comment or brace."""
    word = line.strip()
    return bool(word) and word[0] not in ".$/{}(" and not word.endswith(":")


def _prologue(seed: int | None) -> list[str]:
    """%jit0: what a warp's delays begin with. %jit1: places passed."""
    given = f"mov.u32 %jit0, {seed};"
    return [
        *([given] if seed is not None else [f"mov.u64 %jitd, {SEED};", "ld.global.u32 %jit0, [%jitd];"]),
        "mov.u32 %jit2, %tid.x;", "shr.u32 %jit2, %jit2, 5;", "mov.u32 %jit3, %ctaid.x;",
        "mad.lo.u32 %jit2, %jit3, 769, %jit2;", "mul.lo.u32 %jit0, %jit0, 40503;",
        "mad.lo.u32 %jit0, %jit2, 3079, %jit0;", "mov.u32 %jit1, 0;",
    ]  # fmt: skip


def _delay(place: int) -> list[str]:
    return [
        "add.u32 %jit1, %jit1, 1;", f"mad.lo.u32 %jit2, %jit1, 12289, {place * 61};",
        "add.u32 %jit2, %jit2, %jit0;", "mul.lo.u32 %jit2, %jit2, 1640531527;", "shr.u32 %jit3, %jit2, 15;",
        "xor.b32 %jit2, %jit2, %jit3;", "mul.lo.u32 %jit2, %jit2, 1181783497;",
        "shr.u32 %jit3, %jit2, 24;", "and.b32 %jit3, %jit3, 3;", "setp.ne.u32 %jitp, %jit3, 0;",
        "shr.u32 %jit4, %jit2, 12;", "and.b32 %jit4, %jit4, 1023;", "selp.b32 %jit4, 0, %jit4, %jitp;",
        "nanosleep.u32 %jit4;",
    ]  # fmt: skip
