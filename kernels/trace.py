"""A timeline of a kernel's roles and engines: receives a device and a problem, hands on a Perfetto file.

    python -m kernels trace [--arch sm_100a] [--step 9] [--mnk 512,512,1024] [--out trace.json]
    python -m kernels trace --device cuda [--mnk 512,256,1024] [--ctas 2]

On the virtual GPU every warp and engine is seen, and times are the model's (kernels/engines.py). On a GPU
Step 9 for sm_90a stores its SM's clock at each handoff (kernels/hopper/traced.py), one cluster is shown, lanes
have the same names, and times are measured. `--marks` runs that same function on the virtual GPU. NVIDIA's
in-kernel profiler shows the like, but compiles in the run that it traces; a node that serves has no compiler.
Open the file at https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels import perfetto, results
from kernels.call import code_of
from kernels.chips import CHIPS
from kernels.hopper.marks import FUNCTION, MARKS
from kernels.hopper.tilings import FAMILY, TILE_K
from kernels.hopper.timeline import Timeline
from kernels.libraries import Libraries
from kernels.problem import DType, Problem
from kernels.verify import check

TILING = FAMILY[0].tiling
CLUSTER = TILING.cluster
WARM_UP = 3  # launches before the one that is kept: code, descriptors and operands are in the caches
MODEL_SHAPE, SHAPE = (512, 512, 1024), (512, 256, 1024)
RASTER = 8


def problem_of(m: int, n: int, k: int) -> Problem:
    """fp16 [M, K] times [N, K] transposed, as the ladder takes it."""
    return Problem(m, n, k, dtype=DType.FP16, out_dtype=DType.FP16, trans_b=True)


def room(problem: Problem) -> tuple[int, int, int, int]:
    """Shape of the marks: tiles of the cluster, ranks, blocks of K, MARKS."""
    across = -(-problem.m // (TILING.p * TILING.cluster_p)) * -(-problem.n // (TILING.q * TILING.cluster_q))
    return across, CLUSTER, -(-problem.k // TILE_K), MARKS


def arguments(problem: Problem, a: Any, b: Any, d: int, marks: int, ctas: int) -> tuple[Any, ...]:
    """By the calling convention (kernels/call.py); the marks' address stands where C's would."""
    m, n = problem.m, problem.n
    return (a, b, d, m * n, n, 1, marks, 0, 0, 0, 0, 1.0, 0.0, code_of(problem), 1, ctas, RASTER)


def on_gpu(problem: Problem, ctas: int, root: Path | None = None) -> tuple[Timeline, dict[str, Any]]:
    """Measured on the current GPU, and its facts. RuntimeError where the product is wrong."""
    import torch

    function = Libraries("sm_90a", root).load(FUNCTION)
    torch.manual_seed(9)
    a = torch.randn((problem.m, problem.k), device="cuda").half()
    b = torch.randn((problem.n, problem.k), device="cuda").half()
    d = torch.empty((problem.m, problem.n), device="cuda", dtype=torch.float16)
    marks = torch.zeros(room(problem), device="cuda", dtype=torch.int64)
    given = arguments(problem, a[None], b.T[None], d.data_ptr(), marks.data_ptr(), ctas)
    for _ in range(WARM_UP + 1):
        function(*given)
    torch.cuda.synchronize()
    reference = a.double() @ b.double().T
    error = float((d.double() - reference).norm() / reference.norm())
    if not error < 1e-3:
        raise RuntimeError(f"the traced kernel's product is wrong: relative error {error}")
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "relative_error": error,
    }
    return Timeline.of(marks.cpu().numpy(), ctas // CLUSTER), facts


def on_model(problem: Problem, ctas: int, root: Path | None = None) -> Timeline:
    """The same function on the virtual GPU, on the model's clock. RuntimeError where the product is wrong."""
    from kernels.virtual.host import host, on_device, run
    from kernels.virtual.launch import LATE, Options
    from kernels.virtual.subject import aligned, operands
    from kernels.virtual.timing import Timing

    libraries = Libraries("sm_90a", root, stand_in=Path(host().path))
    function = libraries.load(FUNCTION)
    given = operands(problem)
    marks = aligned(room(problem), np.int64)
    tensors = on_device(given.a[None]), on_device(given.b[None].transpose(0, 2, 1))
    call = arguments(problem, *tensors, given.d.ctypes.data, marks.ctypes.data, ctas)
    timing = Timing(CHIPS["sm_90a"])
    report = run(
        lambda: function(*call),
        {**given.buffers(), "marks": marks},
        libraries.path(FUNCTION, "ptx").read_text(),
        schedules_=1,
        options=Options(schedule=LATE, detect=False, timing=timing, sms=ctas),
    )
    report.raise_if_faulty()
    verdict = check(problem, given.d, given.a, given.b)
    if not verdict.ok:
        raise RuntimeError(f"the traced kernel's product is wrong: {verdict.detail}")
    return Timeline.of(marks, ctas // CLUSTER, timing.chip.clock_hz.value)


def rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Measures of a timeline, one an SM."""
    return [
        {"name": f"SM {sm}", "busy": timeline.busy(rank), "steady": timeline.steady(rank)}
        for rank, sm in enumerate(timeline.sms)
    ]


def document(timeline: Timeline, note: str, **facts: Any) -> dict[str, Any]:
    """A Perfetto file that is a results file as well: `rows`, and the cycles that they follow from."""
    return results.document(
        "trace",
        rows(timeline),
        **facts,
        clock_hz=timeline.clock_hz,
        sms=timeline.sms,
        marks=timeline.cycles.tolist(),
        **perfetto.document(timeline.spans(), timeline.clock_hz, note),
    )


def read(path: Path) -> Timeline:
    """The timeline of a file that this command wrote."""
    found = json.loads(path.read_text())
    return Timeline(np.array(found["marks"], np.int64), found["clock_hz"], tuple(found["sms"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m kernels trace", description=__doc__)
    parser.add_argument("--device", choices=("virtual", "cuda"), default="virtual")
    parser.add_argument(
        "--marks", action="store_true", help="run the function that notes its handoffs (Step 9)"
    )
    parser.add_argument(
        "--arch", choices=tuple(CHIPS), help="of the virtual GPU (default sm_100a; marks: sm_90a)"
    )
    parser.add_argument("--step", type=int, default=9, choices=range(1, 10))
    parser.add_argument("--mnk", help="M,N,K (default 512,512,1024; marks: 512,256,1024)")
    parser.add_argument(
        "--ctas", type=int, default=CLUSTER, help="how many compute; the first cluster is shown"
    )
    parser.add_argument("--root", type=Path, default=None, help="folder of built kernels")
    parser.add_argument("--out", type=Path, default=Path("trace.json"))
    options = parser.parse_args(argv)
    marked = options.marks or options.device == "cuda"
    if marked and (options.step != 9 or options.arch not in (None, "sm_90a")):
        parser.error("marks are those of Step 9 for sm_90a")
    shape = SHAPE if marked else MODEL_SHAPE
    m, n, k = (int(x) for x in options.mnk.split(",")) if options.mnk else shape
    if marked:
        written = marked_document(options.device, problem_of(m, n, k), options.ctas, options.root)
    else:
        from kernels.virtual.trace import trace

        written = trace(options.arch or "sm_100a", options.step, (m, n, k), options.root)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(written) + "\n")
    print(f"{options.out}: {len(written['traceEvents'])} events, {written['otherData']['note']}")
    for row in written.get("rows", ()):
        print(
            f"  {row['name']}: tensor cores busy {row['busy']:.1%}, within the first tile {row['steady']:.1%}"
        )
    return 0


def marked_document(device: str, problem: Problem, ctas: int, root: Path | None) -> dict[str, Any]:
    """Step 9 with its marks on a GPU, or on the virtual one."""
    size = f"{problem.m}×{problem.n}×{problem.k}, {ctas} CTAs"
    if device == "cuda":
        timeline, machine = on_gpu(problem, ctas, root)
        return document(timeline, f"measured on {machine['device']}: {size}", machine=machine)
    timeline = on_model(problem, ctas, root)
    return document(timeline, f"model of {CHIPS['sm_90a'].name}, not a measurement: {size}")


if __name__ == "__main__":
    raise SystemExit(main())
