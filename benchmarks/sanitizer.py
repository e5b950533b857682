"""compute-sanitizer over every step: receives a GPU and libraries, hands on sanitizer.json and a table.

    python -m benchmarks.sanitizer [--tools memcheck,synccheck,racecheck] [--machine h200] [--out DIR]

One process a tool runs Steps 1 to 8, a function of each way in which Step 9 shares a tile, and the grouped kernel, at
small ragged sizes and with so few blocks that rings wrap. torch's caching allocator is off, so that each tensor is an
allocation of its own and memcheck sees past its end. A row is "clean", "reported" (with what), "wrong" (the numbers),
or "not run" where the process ended before. racecheck sees little of TMA and wgmma; its outcome is kept beside.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_places, gpu_machine, write
from kernels.device import describe_cuda
from kernels.ladder import HOPPER
from kernels.problem import DType, Problem

TOOLS = ("memcheck", "synccheck", "racecheck")
LIMIT_SECONDS = 180  # a tool; a step under a tool takes about a second, torch's start ten
SETTLE_SECONDS = 0.3  # the tool is another process and prints a little later
BEGIN, END = "@begin", "@end"
VARIANTS = ("128x256-2x1", "128x128-2x1-pingpong", "128x128-split2", "64x64-split4", "64x16-halfsm-swap")
RAGGED = (264, 392, 200)
SIZES = {1: (128, 128, 64), 2: (120, 104, 200)}
BLOCKS = 4

Launch = Callable[[Any, Any, Any], object]


def subjects() -> Iterator[tuple[str, tuple[int, int, int], Launch]]:
    """Name, M, N, K, and how D [M, N] of A [M, K] and B [N, K] is launched."""
    from benchmarks.ladder import launcher, problem_of
    from kernels.hopper.variants import variants
    from kernels.operands import Operands
    from kernels.runtime import Runtime

    for step in HOPPER[:8]:
        sizes = SIZES.get(step.number, RAGGED)
        yield step.name, sizes, launcher("sm_90a", step, problem_of(*sizes, DType.FP16), BLOCKS)
    runtime = Runtime.of(0)
    problem = Problem(*RAGGED, trans_b=True)
    for variant in variants():
        if variant.tiling.name not in VARIANTS:
            continue
        rows = variant.tiling.q if variant.tiling.swap else RAGGED[0]

        def alone(a: Any, b: Any, d: Any, variant: Any = variant) -> None:
            operands = Operands(a[None], b.T[None], d[None])
            given = Problem(a.shape[0], *RAGGED[1:], trans_b=True)
            runtime.launch(variant, given, operands, blocks=BLOCKS)

        yield variant.name, (rows, *RAGGED[1:]), alone
    for grouped in runtime.grouped:

        def together(a: Any, b: Any, d: Any, grouped: Any = grouped) -> None:
            halves = [(a[rows], d[rows]) for rows in (slice(0, 100), slice(100, None))]
            items = [
                (Problem(len(x), *RAGGED[1:], trans_b=True), Operands(x[None], b.T[None], y[None]))
                for x, y in halves
            ]
            runtime.launch_group(grouped, items, blocks=BLOCKS)

        yield grouped.name, (problem.m, problem.n, problem.k), together


def child() -> int:
    """What the tool watches: every subject once, whole numbers, compared on the CPU."""
    import torch

    for name, (m, n, k), launch in subjects():
        generator = torch.Generator().manual_seed(m + n + k)
        a, b = (torch.randint(-2, 3, s, generator=generator).half() for s in ((m, k), (n, k)))
        want = (a.double() @ b.double().T).half()
        print(BEGIN, name, flush=True)
        d = torch.full((m, n), torch.nan, device="cuda", dtype=torch.float16)
        launch(a.cuda(), b.cuda(), d)
        torch.cuda.synchronize()
        time.sleep(SETTLE_SECONDS)
        wrong = int((d.cpu() != want).sum())
        print(END, name, wrong, flush=True)
    return 0


def parse(tool: str, text: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each name, from what the child and the tool printed in turn."""
    said: dict[str, list[str]] = {}
    wrong: dict[str, int] = {}
    now = ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == BEGIN:
            now = rest
            said[now] = []
        elif word == END:
            name, count = rest.rsplit(" ", 1)
            wrong[name] = int(count)
            now = ""
        elif now and line.startswith("========="):
            said[now].append(line.strip("= \t"))
    rows = []
    for name in names:
        reports = [line for line in said.get(name, []) if line]
        outcome, detail = "clean", ""
        if reports:
            outcome, detail = "reported", " | ".join(reports[:3])
        elif name not in wrong:
            outcome, detail = "not run", "the process ended before or in it"
        elif wrong[name]:
            outcome, detail = "wrong", f"{wrong[name]} elements"
        rows.append({"name": name, "tool": tool, "outcome": outcome, "detail": detail[:400]})
    return rows


def watched(tool: str, program: str) -> str:
    """What the tool and the child printed."""
    command = [
        program,
        "--tool",
        tool,
        "--print-limit",
        "20",
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "benchmarks.sanitizer",
    ]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, "--child"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=LIMIT_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
    return done.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status: 1 where memcheck or synccheck is not clean."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sanitizer", description="Memory and barriers."
    )
    parser.add_argument("--tools", default=",".join(TOOLS), help="which of compute-sanitizer's, with commas")
    add_places(parser, "h200")
    parser.add_argument("--log", type=Path, help="folder for what the tools printed")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        return child()
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not installed", file=sys.stderr)
        return 1
    device = describe_cuda()
    names = [name for name, _, _ in subjects()]
    rows = []
    for tool in options.tools.split(","):
        begin = time.perf_counter()
        text = watched(tool, program)
        if options.log:
            (options.log / f"sanitizer-{tool}.log").write_text(text)
        found = parse(tool, text, names)
        rows += found
        clean = sum(row["outcome"] == "clean" for row in found)
        print(f"{tool}: {clean} of {len(found)} clean, {time.perf_counter() - begin:.0f} s", flush=True)
        for row in found:
            if row["outcome"] != "clean":
                print(f"  {row['name']}: {row['outcome']}: {row['detail']}")
    details, packages = gpu_machine(device), ["torch", "apache-tvm-ffi"]
    path = write(
        options.machine, "sanitizer", rows, details=details, packages=packages, folder=options.out, key="tool"
    )
    print(path)
    return int(any(row["outcome"] != "clean" and row["tool"] != "racecheck" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
