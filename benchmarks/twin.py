"""The virtual GPU against the hardware: receives Hopper's functions, hands on whether both compute the same.

    python -m benchmarks.twin --write [--jobs 2]       anywhere: results/cpu/twin.json, and values for the check
    python -m benchmarks.twin --check --machine h200   on a GPU: results/<machine>/twin.json

Every function of every step and variant gets the same inputs on both. Whole numbers, whose sums are exact in any
order, must come out with the same bits. From normal draws both results may be off the exact one by the error bound
of the API (one order of adding in fp32), so they may be twice that apart. `--write` needs no GPU, `--check` no
compiler. Exit status 1 if any row differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, add_places, cpu_machine, write
from kernels.elementwise import NUMPY, Array
from kernels.problem import Problem
from kernels.verify import error_bound
from kernels.virtual.cases import function_cases, step_cases
from kernels.virtual.spread import Result, spread
from kernels.virtual.subject import Case, Operands, operands

ARCH = "sm_90a"
VALUES = Path(__file__).parents[1] / "artefacts" / "twin.npz"
SIZE = (136, 264, 200)  # of the product's functions: several tiles, ragged in each dimension
WHOLE, NORMAL = 3, 4  # seeds
CTAS = 8


@dataclass(frozen=True, slots=True)
class Twin:
    """A function and a problem; `normal`: compare values from normal draws too."""

    case: Case
    normal: bool

    @property
    def name(self) -> str:
        """Of its row."""
        return str(self.case)

    def inputs(self, whole: bool) -> Operands:
        """The same on every computer."""
        return operands(self.case.problem, seed=WHOLE if whole else NORMAL, whole=whole)


def twins() -> Iterator[Twin]:
    """All functions of the Hopper ladder; of the product's, one layout a variant and types with normal draws."""
    seen: set[tuple[Any, ...]] = set()
    steps = itertools.chain.from_iterable(step_cases(ARCH, number) for number in range(1, 9))
    for case in itertools.chain(steps, function_cases(ARCH, (SIZE,))):
        problem = case.problem
        kind = (case.step, case.variant, problem.m, problem.dtype, problem.out_dtype, _stores(case))
        yield Twin(case, kind not in seen)
        seen.add(kind)


def _stores(case: Case) -> bool:
    """Whether D is stored element by element."""
    return "plain" in case.function


def digest(*arrays: Array | None) -> str:
    """Of their bytes."""
    total = hashlib.sha256()
    for array in arrays:
        if array is not None:
            total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:32]


def _digest_of(given: Operands) -> str:
    return digest(given.a, given.b, given.c, given.bias)


# On the virtual GPU


@cache
def _subject(root: Path | None) -> Any:
    from kernels.virtual.subject import Subject

    return Subject(ARCH, root)


def _virtual(task: tuple[Twin, Path | None]) -> Result:
    """A row, and the bytes of D from normal draws."""
    from kernels.virtual.launch import LATE, Options

    twin, root = task
    row: Result = {"name": twin.name, "outcome": "pass", "detail": ""}
    for whole in (True, False) if twin.normal else (True,):
        given = twin.inputs(whole)
        inputs = _digest_of(given)
        options = Options(detect=False, sms=CTAS)
        report = _subject(root).run(twin.case, given, schedules=[LATE], options=options)
        if not report.ok:
            row |= {"outcome": "fail", "detail": str(report.faults[0])}
            return row
        row["whole" if whole else "normal"] = {"inputs": inputs, "output": digest(given.d)}
        if not whole:
            row["values"] = given.d.tobytes().hex()
    return row


def written(root: Path | None, jobs: int, values: Path) -> list[Result]:
    """Rows of every function on the virtual GPU; values of D go to a file."""
    tasks = {twin.name: (twin, root) for twin in twins()}
    found = dict(spread(_virtual, tasks, jobs=jobs))
    rows = [found[name] for name in tasks]
    values.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        row["name"]: np.frombuffer(bytes.fromhex(row.pop("values")), np.uint8)
        for row in rows
        if "values" in row
    }
    with zipfile.ZipFile(values, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in kept.items():
            archive.writestr(name, data.tobytes())
    return rows


# On the device


class Device:
    """Launches the same functions on GPU 0."""

    def __init__(self, root: Path | None) -> None:
        from kernels.runtime import Runtime

        self.runtime = Runtime.of(0, root)

    def details(self) -> dict[str, Any]:
        """For the results file."""
        device = self.runtime.device
        return {
            "device": device.name,
            "driver": device.driver,
            "arch": device.arch,
            "build": self.runtime.build_hash,
        }

    def compute(self, case: Case, given: Operands) -> Array | None:
        """D of a case; None where its function isn't built."""
        if case.function not in self.runtime.libraries.manifest.functions:
            return None
        from kernels import selftest

        if case.variant is not None:
            return selftest.launch(
                self.runtime, case.variant, case.problem, given.a, given.b, given.c, given.bias
            )
        tensors = [selftest.to_device(x, self.runtime.place) for x in (given.a, given.b, given.d)]
        self.runtime.libraries.load(case.function)(*tensors, self.runtime.device.sms)
        return selftest.to_host(tensors[2])


def compare(twin: Twin, told: Result, values: bytes | None, compute: Any) -> Result:
    """A row of the check: equal bits from whole numbers, and the distance from normal draws."""
    row: Result = {"name": twin.name, "outcome": "pass", "detail": "equal bits"}
    for whole in (True, False) if twin.normal else (True,):
        given = twin.inputs(whole)
        said = told["whole" if whole else "normal"]
        if _digest_of(given) != said["inputs"]:
            return row | {"outcome": "fail", "detail": "other inputs here than on the virtual GPU"}
        got = compute(twin.case, given)
        if got is None:
            return row | {"outcome": "not built", "detail": twin.case.function}
        if whole:
            if digest(got) != said["output"]:
                return row | {"outcome": "fail", "detail": "other bits from whole numbers"}
        elif values is None:
            return row | {"outcome": "fail", "detail": "no values of the virtual GPU to compare with"}
        else:
            row |= _apart(twin.case.problem, given, got, values)
    return row


def _apart(problem: Problem, given: Operands, got: Array, values: bytes) -> Result:
    """How far two results from normal draws are apart, as a share of what one reordering allows."""
    other = np.frombuffer(values, NUMPY[problem.out_dtype]).reshape(got.shape)
    allowed = 2 * error_bound(problem, given.a, given.b, given.c, given.bias)
    gap = np.abs(got.astype(np.float64) - other.astype(np.float64)).reshape(allowed.shape)
    share = float(np.max(np.nan_to_num(gap / allowed, nan=np.inf)))
    unequal = int(np.count_nonzero(got.view(np.uint8) != other.view(np.uint8))) and int(np.count_nonzero(gap))
    detail = f"normal draws: {unequal} of {got.size} elements differ, at most {share:.2f} of what is allowed"
    return {"outcome": "pass" if share <= 1.0 else "fail", "share": round(share, 4), "detail": detail}


def checked(told: dict[str, Result], values: Path, compute: Any) -> list[Result]:
    """Rows of every function that the virtual GPU has computed."""
    with zipfile.ZipFile(values) as archive:
        names = set(archive.namelist())
        return [
            compare(
                twin,
                told[twin.name],
                archive.read(twin.name) if twin.name in names else None,
                compute,
            )
            for twin in twins()
            if twin.name in told
        ]


def _show(rows: Sequence[Result]) -> int:
    bad = [row for row in rows if row["outcome"] != "pass"]
    for row in bad:
        print(f"{row['outcome']:9} {row['name']}: {row['detail']}")
    shares = [row["share"] for row in rows if "share" in row]
    worst = f", normal draws at most {max(shares):.2f} of what is allowed apart" if shares else ""
    print(f"{len(rows) - len(bad)} of {len(rows)} functions compute the same{worst}")
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.twin", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", action="store_true", help="compute on the virtual GPU")
    which.add_argument("--check", action="store_true", help="compute on the GPU and compare")
    parser.add_argument("--jobs", type=int, default=1, help="processes of --write")
    parser.add_argument("--root", type=Path, help="folder of compiled kernels")
    parser.add_argument("--values", type=Path, default=VALUES, help="file of values from normal draws")
    add_places(parser, "gpu")
    options = parser.parse_args(argv)
    packages = ["numpy", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi"]
    if options.write:
        rows = written(options.root, options.jobs, options.values)
        path = write("cpu", "twin", rows, details=cpu_machine(), packages=packages, folder=options.out)
    else:
        told = {row["name"]: row for row in json.loads((RESULTS / "cpu" / "twin.json").read_text())["rows"]}
        device = Device(options.root)
        rows = checked(told, options.values, device.compute)
        path = write(
            options.machine, "twin", rows, details=device.details(), packages=packages, folder=options.out
        )
    print(path)
    return _show(rows)


if __name__ == "__main__":
    raise SystemExit(main())
