"""Writes a timeline: receives a step and a problem, hands on a Chrome/Perfetto trace of warps and engines.

    python -m kernels trace [--arch sm_100a] [--step 9] [--mnk 512,512,1024] [--out trace.json]

Open the file at https://ui.perfetto.dev. Times are the model's (kernels/virtual/model.py), not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels.chips import CHIPS
from kernels.problem import DType, Problem
from kernels.virtual.machine import LATE, Options
from kernels.virtual.model import Timing


def timeline(timing: Timing) -> dict[str, Any]:
    """Spans as a Chrome trace: a process an SM, a thread a warp or engine, microseconds of the model."""
    scale = 1e6 / timing.chip.clock_hz.value
    rows = {(s.sm, s.lane): n for n, s in enumerate({(s.sm, s.lane): s for s in timing.spans}.values())}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": sm, "args": {"name": f"SM of cluster rank {sm}"}}
        for sm in sorted({sm for sm, _ in rows})
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": sm, "tid": n, "args": {"name": lane}}
        for (sm, lane), n in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": s.name,
            "pid": s.sm,
            "tid": rows[s.sm, s.lane],
            "ts": s.begin * scale,
            "dur": max(s.end - s.begin, 1.0) * scale,
        }
        for s in timing.spans
    ]
    note = f"model of {timing.chip.name}, not a measurement"
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"note": note}}


def trace(arch: str, step: int, shape: tuple[int, int, int], root: Path | None = None) -> dict[str, Any]:
    """Run a step on the model's clock and keep what each warp and engine did."""
    from kernels.build import build
    from kernels.virtual.mutants import case_of
    from kernels.virtual.subject import Case, Subject, operands

    case = case_of(arch, step)
    m, n, k = shape
    problem = Problem(m, n, k, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
    case = Case(case.step, case.function, problem, case.variant)
    build(arch, only=case.function, root=root)
    timing = Timing(CHIPS[arch], keep=True)
    options = Options(schedule=LATE, detect=False, timing=timing)
    subject = Subject(arch, root)
    subject.run(case, operands(problem), schedules=1, options=options).raise_if_faulty()
    return timeline(timing)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels trace", description=__doc__)
    parser.add_argument("--arch", choices=tuple(CHIPS), default="sm_100a")
    parser.add_argument("--step", type=int, default=9, choices=range(1, 10))
    parser.add_argument("--mnk", default="512,512,1024", help="M,N,K")
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--out", type=Path, default=Path("trace.json"))
    options = parser.parse_args(argv)
    m, n, k = (int(x) for x in options.mnk.split(","))
    written = trace(options.arch, options.step, (m, n, k), options.root)
    options.out.write_text(json.dumps(written))
    print(f"{options.out}: {len(written['traceEvents'])} events, {written['otherData']['note']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
