"""A vendor's heuristics beside the selector: receives measured times of own variants, hands on prior.json.

    pip install nvidia-matmul-heuristics
    python -m benchmarks.prior [--results benchmarks/results/h200/selector.json]

For each shape that `benchmarks.suite --all` timed: the tile and cluster that nvidia-matmul-heuristics would take
on that GPU, the own variant nearest to it, and how much that one loses against the fastest own variant; beside
it what the selector loses. Needs no GPU. The package crashes when its interpreter ends, so it has a process of
its own, which leaves without that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write
from kernels.device import DATASHEETS
from kernels.problem import Problem
from kernels.selector import choose

PACKAGE = "nvidia-matmul-heuristics"
CHIPS = {"h200": ("sm_90a", "H200_SXM"), "b200": ("sm_100a", "B200")}
LAYOUTS = {"nn": "NN_ROW_MAJOR", "nt": "NT_ROW_MAJOR", "tn": "TN_ROW_MAJOR", "tt": "TT_ROW_MAJOR"}
_NAME = re.compile(r"step9-(\d+)x(\d+)(?:-(\d+)x(\d+))?")

Shape = tuple[int, int, int, int]  # batch, M, N, K


@dataclass(frozen=True, slots=True)
class Advice:
    """What the package would take: tile, cluster, parts of K; and the seconds that its model gives."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    cluster_m: int
    cluster_n: int
    split_k: int
    seconds: float


def advice(gpu: str, layout: str, shapes: Sequence[Shape]) -> list[Advice]:
    """The package's first choice for each shape, fp16 in and out, fp32 accumulated. Raises OSError."""
    request = json.dumps({"gpu": gpu, "layout": layout, "shapes": shapes})
    command = [sys.executable, "-m", "benchmarks.prior", "--child"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise OSError(f"{PACKAGE} gave no answer (status {done.returncode}): {said[-1] if said else ''}")
    return [Advice(**each) for each in json.loads(done.stdout)]


def _child() -> None:
    import nvMatmulHeuristics as vendor

    request = json.load(sys.stdin)
    heuristics = vendor.NvMatmulHeuristicsInterfaceEx(
        backend=vendor.NvMatmulHeuristicsTarget.CUTLASS3,
        flags=vendor.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=vendor.NvMatmulHeuristicsNvidiaGpu[request["gpu"]],
    )
    layout = vendor.NvMatmulHeuristicsMatmulLayout[LAYOUTS[request["layout"]]]
    answers = []
    for batch, m, n, k in request["shapes"]:
        problem = heuristics.makeNvMatmulHeuristicsProblem(m, n, k, layout, batch)
        first = heuristics.get(problem, 1, "HSH")[0]
        kernel = first["kernel"]
        answers.append(
            Advice(
                kernel.cta_tile_m,
                kernel.cta_tile_n,
                kernel.cta_tile_k,
                kernel.stages,
                kernel.cluster_m,
                kernel.cluster_n,
                kernel.split_k,
                first["runtime"],
            )
        )
    json.dump([asdict(each) for each in answers], sys.stdout)
    sys.stdout.flush()
    os._exit(0)


def nearest(told: Advice, names: Sequence[str]) -> str:
    """The own variant whose tile and cluster are nearest, by ratios of sizes; ties by the list's order.

    A tile that lies the other way counts as near: 256×128 loads what 128×256 does.
    """

    def distance(name: str) -> float:
        found = _NAME.match(name)
        if found is None:
            return math.inf
        p, q, cluster_p, cluster_q = (int(each or 1) for each in found.groups())
        if name.endswith("-swap"):
            p, q, cluster_p, cluster_q = q, p, cluster_q, cluster_p
        parts = re.search(r"-split(\d+)", name)
        ours = (p, q, cluster_p * cluster_q, int(parts[1]) if parts else 1)
        rest = (told.cluster_m * told.cluster_n, max(told.split_k, 1))
        upright, lying = (told.tile_m, told.tile_n, *rest), (told.tile_n, told.tile_m, *rest)
        return min(_apart(ours, upright), _apart(ours, lying) + 0.25)

    return min(names, key=distance)


def _apart(ours: Sequence[int], theirs: Sequence[int]) -> float:
    return sum(abs(math.log2(a / b)) for a, b in zip(ours, theirs, strict=True))


def rows_of(measured: Mapping[Shape, Mapping[str, float]], chip: str, layout: str) -> list[dict[str, Any]]:
    """A row a shape: the package's advice, the nearest own variant and the selector's, and what each loses."""
    arch, gpu = CHIPS[chip]
    device = DATASHEETS[arch]
    from kernels import family

    own = family.own(arch)
    rows = []
    for shape, told in zip(measured, advice(gpu, layout, list(measured)), strict=True):
        batch, m, n, k = shape
        problem = Problem(
            m, n, k, batch, trans_a=layout[0] == "t", trans_b=layout[1] == "t", batch_invariant=False,
            lda=-(-max(m, k) // 8) * 8, ldb=-(-max(n, k) // 8) * 8,
        )  # fmt: skip
        seconds = measured[shape]
        best = min(seconds, key=seconds.__getitem__)
        picked = choose(problem, device, variants=[each for each in own if each.name in seconds]).variant
        near = nearest(told, list(seconds))
        rows.append(
            {
                "problem": {"batch": batch, "m": m, "n": n, "k": k, "layout": layout},
                "best": best,
                "best_seconds": seconds[best],
                "prior": asdict(told),
                "prior_variant": near,
                "prior_loss": seconds[near] / seconds[best],
                "prior_seconds_ratio": told.seconds / seconds[best],
                "selector_variant": picked,
                "selector_loss": seconds[picked] / seconds[best],
            }
        )
    return rows


def read_measured(path: Path) -> tuple[str, dict[Shape, dict[str, float]]]:
    """Layout, and seconds by shape and variant, of a selector.json."""
    rows = json.loads(path.read_text())["rows"]
    found: dict[Shape, dict[str, float]] = {}
    for row in rows:
        p = row["problem"]
        shape = (p["batch"], p["m"], p["n"], p["k"])
        found.setdefault(shape, {})[row["variant"]] = row["seconds"]["median"]
    layout = str(rows[0]["problem"].get("layout", "nn"))
    return (layout if layout in LAYOUTS else "nn"), found


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prior", description="A vendor's advice, scored."
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS / "h200" / "selector.json")
    parser.add_argument("--machine", default="h200", choices=sorted(CHIPS))
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/<machine>)"
    )
    options = parser.parse_args(argv)
    if options.child:
        _child()
    layout, measured = read_measured(options.results)
    rows = rows_of(measured, options.machine, layout)
    for row in rows:
        p = row["problem"]
        print(
            f"{p['batch']}×{p['m']}×{p['n']}×{p['k']}: best {row['best']}; prior {row['prior_variant']} "
            f"({row['prior_loss']:.3f}); selector {row['selector_variant']} ({row['selector_loss']:.3f}); "
            f"the prior's model says {row['prior_seconds_ratio']:.2f} × the time"
        )
    for who in ("prior", "selector"):
        mean = math.exp(statistics.fmean(math.log(row[f"{who}_loss"]) for row in rows))
        print(f"{who}: {mean:.4f} × the fastest own variant, geometric mean")
    details = {"measured": str(options.results.name)}
    print(write(options.machine, "prior", rows, details=details, packages=[PACKAGE], folder=options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
