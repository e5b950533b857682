"""Breaks kernels on purpose: receives a kernel's PTX, hands on mutants of its synchronization and what became of them.

    python -m kernels.virtual.mutants [--step 7] [--step 8] [--step 9] [--sample N] [--jobs 2] [--json FILE]

A mutant changes one instruction: a wait that passes at once or waits for the other phase, an arrival count, bytes
that are expected, a barrier's address or number, a mask of a commit, a fence, a commit or a wait left out; or it is
one of the mistakes in the source (edits.py). It is killed if any schedule ends with a finding or a wrong element.
A survivor is kept with what was changed, where, and why nothing shows (survivors.py).
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from kernels import results
from kernels.problem import DType, Problem
from kernels.verify import check
from kernels.virtual import edits
from kernels.virtual.host import on_device, run
from kernels.virtual.launch import EARLY, LATE, Options, Schedule
from kernels.virtual.ptx import PtxError
from kernels.virtual.spread import spread
from kernels.virtual.survivors import why

SHAPE = (512, 512, 384)  # several tiles and a ring that wraps, small enough for hundreds of runs
SMS = 2  # one cluster computes all tiles, so that every ring wraps
SCHEDULES = (LATE, EARLY, Schedule("random", 1), Schedule("random", 2))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: its kind, the PTX line, the instruction as it was, the whole text as it is."""

    kind: str
    line: int
    was: str
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.source or f'PTX line {self.line}'} ({self.was.split()[0]})"

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return f"{self} {hashlib.sha256(self.text.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: the kind of the first finding, "wrong result", or "" where it survived."""

    killed_by: str
    schedule: str
    seconds: float


Rewrite = Callable[[str, int], str | None]  # statement without guard, number of a fresh register → new text


def _operand(statement: str, pattern: str, make: Callable[[str], tuple[str, str]]) -> str | None:
    """Replace the operand that a pattern's first group finds; `make` gives code to put before, and the new one."""
    match = re.search(pattern, statement)
    if match is None:
        return None
    before, operand = make(match.group(1))
    return before + statement[: match.start(1)] + operand + statement[match.end(1) :]


def _drop(statement: str, fresh: int) -> str | None:
    return ""


def _pass_at_once(statement: str, fresh: int) -> str | None:
    match = re.match(r"mbarrier\.try_wait\S*\s+(%p\d+)", statement)
    return f"setp.eq.u32 {match.group(1)}, 0, 0;" if match else None


def _flip_phase(statement: str, fresh: int) -> str | None:
    return _operand(
        statement, r"\],\s*(%r\d+|\d+)", lambda x: (f"xor.b32 %mut{fresh}, {x}, 1;\n", f"%mut{fresh}")
    )


def _other_count(by: int) -> Rewrite:
    def rewrite(statement: str, fresh: int) -> str | None:
        return _operand(
            statement, r"\],\s*(%r\d+|\d+)", lambda x: (f"add.s32 %mut{fresh}, {x}, {by};\n", f"%mut{fresh}")
        )

    return rewrite


def _half_the_bytes(statement: str, fresh: int) -> str | None:
    return _operand(
        statement, r"\],\s*(%r\d+|\d+)", lambda x: (f"shr.u32 %mut{fresh}, {x}, 1;\n", f"%mut{fresh}")
    )


def _next_barrier(statement: str, fresh: int) -> str | None:
    """The barrier 8 bytes further: that of the next stage."""
    match = re.findall(r"\[%r\d+(?:\+\d+)?\]", statement)
    if not match:
        return None
    last = match[-1]
    return statement.replace(last, f"[{last[1:-1].split('+')[0]}+{_offset(last) + 8}]")


def _offset(place: str) -> int:
    return int(place[1:-1].split("+")[1]) if "+" in place else 0


def _one_cta(statement: str, fresh: int) -> str | None:
    return _operand(
        statement, r",\s*(%rs\d+)\s*;?$", lambda x: (f"mov.b16 %muth{fresh}, 1;\n", f"%muth{fresh}")
    )


def _one_name(statement: str, fresh: int) -> str | None:
    """Where the number of a named barrier depends on the role: the first role's for all."""
    return _operand(statement, r"^\S+\s+(%r\d+)", lambda x: ("", "10"))


def _more_threads(statement: str, fresh: int) -> str | None:
    """A named barrier for one warp more than comes."""
    return _operand(
        statement,
        r"^\S+\s+(?:%r\d+|\d+),\s*(%r\d+|\d+)",
        lambda x: (f"add.s32 %mut{fresh}, {x}, 32;\n", f"%mut{fresh}"),
    )


def _next_box(statement: str, fresh: int) -> str | None:
    """A TMA load to 16 KiB further on: the wrong stage."""
    match = re.search(r"\[(%r\d+)(?:\+(\d+))?\]", statement)
    if match is None:
        return None
    there = f"[{match.group(1)}+{int(match.group(2) or 0) + 16384}]"
    return statement[: match.start()] + there + statement[match.end() :]


# Kind of change, instructions that it applies to, how.
OPERATORS: tuple[tuple[str, str, Rewrite], ...] = (
    ("wait left out", r"mbarrier\.try_wait", _pass_at_once),
    ("wait for the other phase", r"mbarrier\.try_wait", _flip_phase),
    ("wait on the next barrier", r"mbarrier\.try_wait", _next_barrier),
    ("one arrival more", r"mbarrier\.init", _other_count(1)),
    ("one arrival fewer", r"mbarrier\.init", _other_count(-1)),
    ("half the bytes expected", r"mbarrier\.arrive\.expect_tx", _half_the_bytes),
    ("arrival on the next barrier", r"mbarrier\.arrive", _next_barrier),
    ("arrival left out", r"mbarrier\.arrive", _drop),
    ("load signals the next barrier", r"cp\.async\.bulk\.tensor\S*mbarrier", _next_barrier),
    ("load lands in the next stage", r"cp\.async\.bulk\.tensor\S*mbarrier", _next_box),
    ("commit left out", r"tcgen05\.commit", _drop),
    ("commit to the next barrier", r"tcgen05\.commit", _next_barrier),
    ("commit to one CTA", r"tcgen05\.commit\S*multicast", _one_cta),
    ("proxy fence left out", r"fence\.proxy\.async", _drop),
    ("named barrier left out", r"bar(?:rier)?\.(?:cta\.)?sync", _drop),
    ("one named barrier for both roles", r"bar(?:rier)?\.(?:cta\.)?sync", _one_name),
    ("a thread count of one warp more", r"bar(?:rier)?\.(?:cta\.)?sync", _more_threads),
    ("wait of a store left out", r"cp\.async\.bulk\.wait_group", _drop),
    ("wait for TMEM loads left out", r"tcgen05\.wait::ld", _drop),
    ("TMEM is not freed", r"tcgen05\.dealloc", _drop),
    ("cluster arrival left out", r"barrier\.cluster\.arrive", _drop),
    ("cluster wait left out", r"barrier\.cluster\.wait", _drop),
    ("wgmma wait left out", r"wgmma\.wait_group", _drop),
)
_STATEMENT = re.compile(r"^(\s*(?:@!?%p\d+\s+)?)([a-z][\w.:]*\s[^;]*;|[a-z][\w.:]*;)\s*$")


def mutants(text: str, lines_run: set[int] | None = None) -> Iterator[Mutant]:
    """All mutants of a PTX text; of those lines only that a run of the original reaches, where they are given."""
    lines = text.split("\n")
    sources = list(_sources(lines))
    begin = next(n for n, line in enumerate(lines) if line.strip() == "{")
    for number, line in enumerate(lines):
        match = _STATEMENT.match(line)
        if match is None or (lines_run is not None and number + 1 not in lines_run):
            continue
        guard, statement = match.groups()
        for kind, pattern, rewrite in OPERATORS:
            if not re.match(pattern, statement):
                continue
            changed = rewrite(statement.rstrip(";"), 0)
            if changed is None:
                continue
            if changed and not changed.endswith(";"):
                changed += ";"
            fresh = list(lines)
            fresh[number] = _guarded(guard, changed)
            fresh[begin] = "{\n.reg .b32 %mut<2>;\n.reg .b16 %muth<2>;"
            yield Mutant(kind, number + 1, statement, sources[number], "\n".join(fresh))


def _guarded(guard: str, statements: str) -> str:
    """Put the guard on the last statement: those before it only compute a fresh register."""
    if not statements:
        return ""
    *before, last = statements.split("\n")
    return "\n".join([*before, guard + last])


def _sources(lines: Sequence[str]) -> Iterator[str]:
    """Source place of each line, from the `.loc` before it."""
    files = {
        m.group(1): m.group(2).rsplit("/", 1)[-1]
        for x in lines
        if (m := re.match(r'\s*\.file\s+(\d+)\s+"([^"]*)"', x))
    }
    now = ""
    for line in lines:
        match = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if match and match.group(2) != "0":
            now = f"{files.get(match.group(1), '?')}:{match.group(2)}"
        yield now


def fate(subject: Any, case: Any, mutant: Mutant, seed: int = 3) -> Fate:
    """Run a mutant under schedule after schedule until one kills it."""
    from kernels.virtual.subject import family_arguments, operands

    begin = time.perf_counter()
    call = subject.libraries.load(case.function)
    options = Options(sms=SMS)
    for schedule in SCHEDULES:
        given = operands(case.problem, seed=seed, whole=True)
        if case.variant is None:
            arguments: list[Any] = [*(on_device(x) for x in (given.a, given.b, given.d)), options.sms]
        else:
            arguments = family_arguments(case, given, SMS)
        try:
            report = run(
                partial(call, *arguments),
                given.buffers(),
                mutant.text,
                schedules_=[schedule],
                options=options,
            )
            killer = report.faults[0].kind if not report.ok else ""
            if not killer and report.lints:
                killer = "lint"  # the originals have none
            if not killer and not check(case.problem, given.d, given.a, given.b).ok:
                killer = "wrong result"
        except PtxError as error:
            killer = f"refused: {error}"
        if killer:
            return Fate(killer, str(schedule), time.perf_counter() - begin)
    return Fate("", "", time.perf_counter() - begin)


def mistakes(case: Any, arch: str, root: Path | None) -> Iterator[Mutant]:
    """Mistakes in the source of a step, as mutants of its function."""
    for edit, text in edits.edited(case.step, case.function, arch, root):
        yield Mutant(
            edit.kind, 0, "source", ", ".join(name.rsplit("/", 1)[-1] for name, _, _ in edit.changes), text
        )


def lines_run(subject: Any, case: Any) -> set[int]:
    """PTX lines that the original runs on the problem, less initializations of barriers that nobody then uses.

    A change elsewhere can't show.
    """
    from kernels.virtual.subject import operands

    covered: set[int] = set()
    options = Options(sms=SMS, detect=False, covered=covered)
    subject.run(case, operands(case.problem), schedules=[LATE], options=options).raise_if_faulty()
    return covered


def case_of(arch: str, step: int) -> Any:
    """The function of a step that is mutated."""
    from kernels import device, family, ladder
    from kernels.virtual.subject import Case

    m, n, k = SHAPE
    problem = Problem(m, n, k, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
    if step < 9:
        return Case(step, ladder.step(arch, step).function(DType.FP16), problem)
    chip = device.virtual(arch)
    variant = next(v for v in family.own(arch) if v.unsupported(problem, chip) is None)
    return Case(9, variant.function(problem), problem, variant)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Task:
    """A mutant of a case, for a process to run."""

    arch: str
    root: Path | None
    case: Any
    mutant: Mutant


@cache
def _subject(arch: str, root: Path | None) -> Any:
    from kernels.virtual.subject import Subject

    return Subject(arch, root)


def _run(task: _Task) -> dict[str, Any]:
    return asdict(fate(_subject(task.arch, task.root), task.case, task.mutant))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 1 where fewer than 95 % are killed."""
    parser = argparse.ArgumentParser(prog="python -m kernels.virtual.mutants", description=__doc__)
    parser.add_argument("--arch", choices=("sm_100a",), default="sm_100a")
    parser.add_argument("--step", type=int, action="append", choices=(7, 8, 9))
    parser.add_argument("--sample", type=int, default=0, help="only so many of each step, drawn at random")
    parser.add_argument("--kind", default="", help="only those whose kind holds this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--kept", type=Path, default=None, help="file of fates, to go on from")
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    tasks: dict[str, _Task] = {}
    for step in options.step or (7, 8, 9):
        found = [t for t in _tasks(options.arch, step, options.root) if options.kind in t.mutant.kind]
        if options.sample:
            found = random.Random(1).sample(found, min(options.sample, len(found)))
        tasks |= {f"{t.case.function}: {t.mutant.key}": t for t in found}
    fates: dict[str, Fate] = {}
    for key, result in spread(_run, tasks, jobs=options.jobs, kept=options.kept):
        fates[key] = Fate(**result)
        print("." if fates[key].killed_by else "S", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    pairs = [(task, fates[key]) for key, task in tasks.items()]
    _show(pairs)
    if options.json:
        results.write(options.json, "mutants of kernels on the virtual GPU", _rows(pairs))
    killed = sum(bool(f.killed_by) for _, f in pairs)
    return 0 if killed >= 0.95 * len(pairs) else 1


def _tasks(arch: str, step: int, root: Path | None) -> list[_Task]:
    """All mutants of a step."""
    from kernels.virtual.subject import have

    case = case_of(arch, step)
    have(arch, [case.function], root)
    subject = _subject(arch, root)
    sound = fate(subject, case, Mutant("nothing", 0, "", "", subject.ptx(case.function)))
    if sound.killed_by:
        raise AssertionError(f"{case.function} as it is: {sound.killed_by} under {sound.schedule}")
    found = [*mistakes(case, arch, root), *mutants(subject.ptx(case.function), lines_run(subject, case))]
    return [_Task(arch, root, case, mutant) for mutant in found]


def _show(fates: Sequence[tuple[_Task, Fate]]) -> None:
    killed = [f for _, f in fates if f.killed_by]
    print(f"{len(fates)} mutants, {len(killed)} killed ({len(killed) / max(len(fates), 1):.1%})")
    for kind, count in Counter(f.killed_by for f in killed).most_common():
        print(f"  {count:4} {kind}")
    for task, f in fates:
        if not f.killed_by:
            print(f"  survived: {task.case.function}: {task.mutant}: {why(task.case.step, task.mutant)}")


def _rows(fates: Sequence[tuple[_Task, Fate]]) -> Iterator[dict[str, Any]]:
    for task, f in fates:
        yield {
            "name": f"{task.case.function}: {task.mutant}",
            "outcome": "killed" if f.killed_by else "survived",
            "detail": f"{f.killed_by}, {f.schedule}" if f.killed_by else why(task.case.step, task.mutant),
            "was": " ".join(task.mutant.was.split()),
        }


if __name__ == "__main__":
    raise SystemExit(main())
