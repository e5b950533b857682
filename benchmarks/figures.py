"""The README's figures: receives the results files, hands on the block between its markers.

python -m benchmarks.figures           # print the block
python -m benchmarks.figures --write   # put it into README.md
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from benchmarks.record import RESULTS
from benchmarks.transport import ALONE, HTTP, IN_PLACE, TRITON_SHARED

README = RESULTS.parents[1] / "README.md"
BLOCK = re.compile(r"<!-- figures: python -m benchmarks\.figures --write -->\n.*?<!-- end -->", re.DOTALL)


def read(name: str) -> dict[str, Any] | None:
    """A results file by its path under benchmarks/results; None where it isn't there."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def suite() -> list[str]:
    """Kernels against cuBLAS on the H200."""
    document = read("h200/suite.json")
    if document is None:
        return []
    rows = [r for r in document["rows"] if not r["batch_invariant"]]
    by_timing = {t: [r for r in rows if r["timing"] == t] for t in ("sustained", "burst")}
    means = {
        t: math.exp(sum(math.log(r["ratio"]) for r in group) / len(group)) for t, group in by_timing.items()
    }
    sustained = by_timing["sustained"]
    least = min(sustained, key=lambda r: r["ratio"])
    square = next(
        r for r in sustained if (r["problem"]["m"], r["problem"]["n"], r["problem"]["k"]) == (4096,) * 3
    )
    ragged = [r for r in sustained if r["problem"]["n"] % 8 or r["problem"]["k"] % 8]
    even = [r for r in sustained if r not in ragged]
    even_mean = math.exp(sum(math.log(r["ratio"]) for r in even) / len(even))
    odd = ", ".join(f"{_shape(r)} {r['ratio']:.1f} ×" for r in ragged)
    return [
        f"- **Kernels, measured on one {document['machine']['device']}** (fp16, {len(sustained)} shapes, against the "
        f"better of cuBLAS and cuBLASLt in the same run): {means['sustained']:.2f} × its speed sustained and "
        f"{means['burst']:.2f} × in bursts, as geometric means ({even_mean:.2f} × without the ragged {odd}); the least "
        f"{least['ratio']:.2f} × ({_shape(least)}); 4096³ at {square['ratio']:.2f} ×, {square['tflops']:.0f} TFLOP/s. "
        f"Measured at commit {document['commit'][:7]}. [suite.json](benchmarks/results/h200/suite.json)"
    ]


def _shape(row: dict[str, Any]) -> str:
    p = row["problem"]
    batch = f"{p['batch']} × " if p["batch"] > 1 else ""
    return f"{batch}{p['m']}×{p['n']}×{p['k']}"


def sharded() -> list[str]:
    """One product over two GPUs."""
    document = read("h200x2/gpus.json")
    rows = [r for r in document["rows"] if r.get("part") == "sharded" and "ratio" in r] if document else []
    return [
        f"- **One product over two GPUs**: {row['name'].removeprefix('sharded ')}: {row['flops_per_second'] / 1e12:.0f} "
        f"TFLOP/s, {row['ratio']:.2f} × one of them. [gpus.json](benchmarks/results/h200x2/gpus.json)"
        for row in rows
    ]


def on_gpu() -> list[str]:
    """The service on one GPU."""
    document = read("h200/service.json")
    if document is None:
        return []
    rows = document["rows"]
    kept = next(r for r in rows if r["name"].startswith("POST /gemm 4096³"))
    start = next(r for r in rows if r["name"].startswith("process start to ready"))
    killed = next(r for r in rows if r["part"] == "killed")
    stacks = [r for r in rows if r["part"] == "stacking"]
    gains = ", ".join(f"1/{r['gain']:.0f} at {r['name'].split(', ')[1].split(' against')[0]}" for r in stacks)
    return [
        f"- **The service on one {document['machine']['gpu']}**: `POST /gemm` 4096³ fp16, operands stored and D kept: p50 "
        f"{kept['p50_seconds'] * 1e3:.2f} ms, of which the kernel {kept['kernel_seconds'] * 1e3:.2f} ms; 64 clients stacked against "
        f"one 8192×8192 weight take {gains} of the device's time unstacked; ready {start['seconds']:.1f} s after its start, and "
        f"{killed['detail']['seconds_until_ready']:.1f} s after a kill -9 of its worker under load, with no request failed. "
        "[service.json](benchmarks/results/h200/service.json)"
    ]


def serving() -> list[str]:
    """The service against its peers on a CPU."""
    document = read("cpu/serving.json")
    if document is None:
        return []
    rates = {r["server"]: r for r in document["rows"] if r["part"] == "rates"}
    own = rates["gemm-service"]
    peers = ", ".join(
        f"{row['ours_over_this']['median']:.1f} × {name}"
        for name, row in rates.items()
        if "ours_over_this" in row and name != "gemm-service"
    )
    machine = document["machine"]
    lines = [
        f"- **The service, measured on {machine['cores']} cores of an {machine['cpu']}** (256³ fp32, 8 clients): "
        f"{own['requests_per_second']['median']:.0f} requests a second, p50 {own['p50_seconds']['median'] * 1e3:.1f} ms; "
        f"{peers}. [serving.json](benchmarks/results/cpu/serving.json)"
    ]
    moved = {r["name"]: r for r in document["rows"] if r["part"] == "transfers"}
    if moved:
        told = ", ".join(f"{name} {row['ratio']['median']:.2f}" for name, row in moved.items())
        lines.append(f"- **Bytes in and out**, as a share of bare socket calls: {told}.")
    lines += [
        f"- **Stacking** ({row['clients']} clients, {row['workload']}): {row['requests_per_second']['median']:.0f} requests a "
        f"second, {row['gain']['median']:.1f} × those without; torch alone gains {row['bare_torch_gain']['median']:.1f} × from "
        "16 rows to 1024."
        for row in document["rows"]
        if row["part"] == "stacking"
    ]
    return lines


def transport() -> list[str]:
    """Ways to hand operands over on one computer."""
    document = read("cpu/transport.json")
    if document is None:
        return []
    rows = {row["name"]: row for row in document["rows"]}

    def told(name: str) -> str:
        return f"{rows[name]['seconds']['median'] * 1e3:.0f} ms"

    def times(name: str) -> str:
        return f"{rows[name]['ratio']['median']:.1f} ×"

    return [
        f"- **Handing over 128 MB on one computer** (16×2²⁰ by 2²⁰×16 fp32, {document['machine']['cores']} cores; the product "
        f"alone takes {told(ALONE)}): in shared memory {told(IN_PLACE)}, {times(IN_PLACE)} the rate of tritonclient over HTTP "
        f"and {times(f'{IN_PLACE} over {HTTP}')} our own over HTTP ({told(HTTP)}, {times(HTTP)} tritonclient's); tritonclient in "
        f"system shared memory {told(TRITON_SHARED)}, {times(TRITON_SHARED)} its HTTP. "
        "[transport.json](benchmarks/results/cpu/transport.json)"
    ]


def checks() -> list[str]:
    """Long runs that look for faults."""
    lines = []
    for path in sorted(RESULTS.glob("*/soak.json")):
        document = json.loads(path.read_text())
        row = document["rows"][0]
        lines.append(
            f"- **Soak**: {row['requests']:,} random requests in {row['seconds']:.0f} s on {document['machine']['cores']} cores, "
            f"with {row['worker_restarts']:.0f} killed workers: no wrong answer, no 500, nothing left behind. "
            f"[soak.json]({path.relative_to(README.parent)})"
        )
    for path in sorted(RESULTS.glob("*/fuzz.json")):
        rows = json.loads(path.read_text())["rows"]
        minutes = sum(row["seconds"] for row in rows) / 60
        lines.append(
            f"- **Fuzzing**: {sum(row['examples'] for row in rows):,} hostile bodies, headers, places in shared memory and packets "
            f"in {minutes:.0f} minutes of its processes together: no crash, no 500. [fuzz.json]({path.relative_to(README.parent)})"
        )
    return lines


def block() -> str:
    """The whole block, markers included."""
    lines = [*suite(), *on_gpu(), *sharded(), *serving(), *transport(), *checks()]
    lines.append(
        "- **Blackwell**: nobody here has a B200, so nothing is measured there. Its kernels run instruction by instruction on "
        "the project's own virtual GPU, which finds deadlocks and races, and a kernel that hasn't been seen right on the very "
        "device it serves on is never used."
    )
    text = "\n".join(lines)
    return f"<!-- figures: python -m benchmarks.figures --write -->\n{text}\n<!-- end -->"


def main() -> None:
    """Print the block, or put it into the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if not parser.parse_args().write:
        print(block())
        return
    README.write_text(BLOCK.sub(lambda _: block(), README.read_text()))


if __name__ == "__main__":
    main()
