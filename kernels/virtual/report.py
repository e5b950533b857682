"""What a run found: receives faults from the machine, hands on a `Report` that reads well in a terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `kind` is one of KINDS; `text` says who, where and what is missing."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


KINDS = (
    "deadlock", "race", "proxy fence", "barrier", "bounds", "alignment", "tensor memory", "protocol", "exit",
    "disagreement", "wrong result", "trap",
)  # fmt: skip


class Fault(Exception):
    """Ends a run: the kernel did what no hardware would survive."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.finding = Finding(kind, text)


@dataclass(slots=True)
class Run:
    """One launch under one schedule."""

    schedule: str
    kernel: str
    findings: list[Finding] = field(default_factory=list)
    lints: list[Finding] = field(default_factory=list)
    instructions: int = 0
    seconds: float = 0.0
    # Bytes that TMA loads of tensors asked for, by policy of L2 (0: none is named).
    loaded: Counter[int] = field(default_factory=Counter)
    stored: int = 0  # bytes of the boxes that TMA stored


@dataclass(slots=True)
class Report:
    """All runs of a launch."""

    runs: list[Run] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found (lints don't count)."""
        return not self.findings and not any(r.findings for r in self.runs)

    @property
    def lints(self) -> list[Finding]:
        """Lints of all runs, each once."""
        return list(dict.fromkeys(f for r in self.runs for f in r.lints))

    @property
    def faults(self) -> list[Finding]:
        """Findings of all runs, each once."""
        return list(dict.fromkeys([*self.findings, *(f for r in self.runs for f in r.findings)]))

    def raise_if_faulty(self) -> None:
        """Raise the first finding, with all of them in its text."""
        if not self.ok:
            raise Fault(self.faults[0].kind, str(self))

    def __str__(self) -> str:
        lines = []
        for run in self.runs:
            state = "ok" if not run.findings else f"{len(run.findings)} findings"
            rate = f"{run.instructions} warp instructions in {run.seconds:.2f} s"
            lines.append(f"{run.schedule:>10}  {run.kernel[:40]:40}  {state:12} {rate}")
        for finding in self.faults:
            names = [r.schedule for r in self.runs if finding in r.findings]
            lines.append(f"{finding}" + (f"\n    under: {', '.join(names)}" if names else ""))
        lines.extend(f"lint: {finding.text}" for finding in self.lints)
        return "\n".join(lines)
