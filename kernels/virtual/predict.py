"""Predicts times: receives an architecture, hands on a table of what the model says of each step. A model.

    python -m kernels predict --virtual [--arch sm_100a] [--step 9] [--json FILE]

One SM (or cluster) computes the tiles that fall to it at 4096³ on the virtual GPU with the model's clock, on
products of the true K; as many waves as the chip needs. The published or measured ladder stands beside it, and
where the model is off by more than a quarter the table says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import device, family, ladder
from kernels.chips import CHIPS, Chip
from kernels.problem import DType, Problem
from kernels.virtual import results
from kernels.virtual.machine import LATE, Options
from kernels.virtual.model import Timing
from kernels.virtual.subject import Case, Subject, operands

SIZE = 4096
# One B200, fp16, fp32 accumulator, locked clocks (the published ladder that this one follows), in seconds.
PUBLISHED = {3: 53.6e-3, 4: 0.49e-3, 5: 0.272e-3, 6: 0.239e-3, 7: 0.23e-3, 8: 0.104e-3, 9: 0.094e-3}
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Tile:
    """What one CTA or cluster computes at a time."""

    m: int
    n: int
    ctas: int = 1


TILES = {
    "sm_100a": {step: Tile(128, 128) for step in range(3, 8)} | {8: Tile(256, 256, 2), 9: Tile(512, 256, 2)},
    "sm_90a": {step: Tile(128, 128) for step in range(3, 8)} | {8: Tile(256, 128, 2), 9: Tile(256, 256, 2)},
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of a step at 4096³."""

    step: int
    function: str
    seconds: float
    busy: float  # tensor-core cycles / cycles, from the first load to the last store
    waves: int
    resident: int
    reference: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over published."""
        return self.seconds / self.reference if self.reference else None

    @property
    def remark(self) -> str:
        """Whether the model holds."""
        if self.ratio is None:
            return "nothing to hold it against"
        off = abs(self.ratio - 1)
        return "within a quarter" if off <= TOLERANCE else f"off by {off:.0%}"


def predict(
    subject: Subject, step: int, reference: float | None = None, timing: Timing | None = None
) -> Prediction:
    """Run one SM's share of a step at 4096³ on the model's clock."""
    chip = CHIPS[subject.arch]
    tile = TILES[subject.arch][step]
    case = _case(subject.arch, step, tile, 1)
    resident = _resident(subject, case, tile)
    tiles = -(-SIZE // tile.m) * -(-SIZE // tile.n)
    places = int(chip.sms.value) // tile.ctas
    waves = -(-tiles // (places * resident))
    case = _case(subject.arch, step, tile, min(waves * resident, -(-tiles // places)))
    timing = timing or Timing(chip)
    options = Options(schedule=LATE, detect=False, sms=tile.ctas * resident, timing=timing)
    report = subject.run(case, operands(case.problem), schedules=1, options=options)
    report.raise_if_faulty()
    cycles = max(timing.end, 1.0)
    busy = max(timing.tensor_busy.values(), default=0.0) / cycles
    seconds = cycles / chip.clock_hz.value + chip.launch.value
    return Prediction(step, case.function, seconds, busy, waves, resident, reference)


def _case(arch: str, step: int, tile: Tile, tiles: int) -> Case:
    """`tiles` tiles of the true K, one above the other."""
    problem = Problem(tile.m * tiles, tile.n, SIZE, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
    if step < 9:
        return Case(step, ladder.step(arch, step).function(DType.FP16), problem)
    whole = Problem(SIZE, SIZE, SIZE, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)
    chip = device.virtual(arch)
    wanted = f"{tile.m if arch == 'sm_100a' else tile.m // 2}x{tile.n}"
    for variant in family.own(arch):
        name = str(variant.name)
        plain = not any(word in name for word in ("dynamic", "split", "pingpong"))
        paired = "2x1" in name or arch == "sm_100a"
        if wanted in name and plain and paired and variant.unsupported(whole, chip) is None:
            return Case(9, variant.function(whole), problem, variant)  # type: ignore[attr-defined]
    raise LookupError(f"no Step 9 of {wanted} for {arch}")


def _resident(subject: Subject, case: Case, tile: Tile) -> int:
    """CTAs of a kernel that one SM holds: registers, shared memory, and 512 columns of tensor memory."""
    from kernels.runtime import resident_blocks

    chip = device.virtual(subject.arch)
    blocks = resident_blocks(subject.libraries.info(case.function), chip) // chip.sms
    return max(1, min(blocks, 512 // tile.n) if subject.arch == "sm_100a" else blocks)


def table(arch: str, steps: Sequence[int], root: Path | None = None) -> list[Prediction]:
    """Predictions, with what is published or was measured beside."""
    from kernels.build import build

    references = PUBLISHED if arch == "sm_100a" else measured(Path("benchmarks/results"))
    for step in steps:
        tile = TILES[arch][step]
        build(arch, only=_case(arch, step, tile, 1).function, root=root)
    subject = Subject(arch, root)
    return [predict(subject, step, references.get(step)) for step in steps]


def measured(folder: Path) -> dict[int, float]:
    """Median seconds of the Hopper ladder at 4096³, from the results that a GPU run has left; empty where none."""
    found: dict[int, float] = {}
    for path in sorted(folder.glob("h200*/ladder*.json")):
        for row in json.loads(path.read_text()).get("rows", []):
            problem, name = row.get("problem", {}), str(row.get("variant", ""))
            if (problem.get("m"), problem.get("n"), problem.get("k")) == (
                SIZE,
                SIZE,
                SIZE,
            ) and name.startswith("step"):
                found.setdefault(int(name[4]), float(row["seconds"]["median"]))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels predict --virtual", description=__doc__)
    parser.add_argument("--arch", choices=tuple(CHIPS), default="sm_100a")
    parser.add_argument("--step", type=int, action="append", choices=range(3, 10))
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(argv)
    found = table(options.arch, options.step or range(3, 10), options.root)
    _show(CHIPS[options.arch], found)
    if options.json:
        chip = CHIPS[options.arch]
        what = f"model of {chip.name}, not a measurement"
        results.write(options.json, what, _rows(found), parameters=_parameters(chip))
    return 0


def _show(chip: Chip, found: Sequence[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table(title=f"model, not a measurement: {chip.name} at {SIZE}³, fp16")
    columns = (
        "step",
        "function",
        "predicted ms",
        "tensor cores busy",
        "waves",
        "CTAs/SM",
        "published ms",
        "ratio",
        "",
    )
    for name in columns:
        out.add_column(name, no_wrap=True, justify="left" if name in ("function", "") else "right")
    for p in found:
        out.add_row(
            str(p.step), p.function, f"{p.seconds * 1e3:.3f}", f"{p.busy:.0%}", str(p.waves), str(p.resident),
            f"{p.reference * 1e3:.3f}" if p.reference else "–", f"{p.ratio:.2f}" if p.ratio else "–", p.remark,
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(out)
    for name in chip.__dataclass_fields__:
        if name != "name":
            p = getattr(chip, name)
            console.print(f"  {name} = {p.value:g} {p.unit}: {p.source}", style="dim", highlight=False)


def _parameters(chip: Chip) -> dict[str, list[Any]]:
    parameters = {n: getattr(chip, n) for n in chip.__dataclass_fields__ if n != "name"}
    return {name: [p.value, p.unit, p.source] for name, p in parameters.items()}


def _rows(found: Sequence[Prediction]) -> Iterator[dict[str, Any]]:
    for p in found:
        yield {
            "name": p.function,
            "step": p.step,
            "predicted_seconds": p.seconds,
            "tensor_busy": p.busy,
            "waves": p.waves,
            "resident": p.resident,
            "reference_seconds": p.reference,
            "outcome": p.remark,
        }


if __name__ == "__main__":
    raise SystemExit(main())
