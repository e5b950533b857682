"""The README's figures: receives the results files, hands on the blocks between its markers.

python -m benchmarks.figures           # print the blocks
python -m benchmarks.figures --write   # put them into README.md
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
MARK = "<!-- figures: python -m benchmarks.figures --write -->"
HEADLINE_MARK = "<!-- headline: python -m benchmarks.figures --write -->"
END = "<!-- end -->"

#: What was measured, what came out, and the file under benchmarks/results that says so.
Row = tuple[str, str, str]


def read(name: str) -> dict[str, Any] | None:
    """A results file by its path under benchmarks/results; None where it isn't there."""
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def _mean(rows: list[dict[str, Any]]) -> float:
    return math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))


def _timed(document: dict[str, Any], timing: str, *, invariant: bool = False) -> list[dict[str, Any]]:
    """Rows of the fastest choice, or of the choice among kernels whose bits don't depend on M."""
    return [r for r in document["rows"] if r["batch_invariant"] is invariant and r["timing"] == timing]


def _ragged(row: dict[str, Any]) -> bool:
    """Rows that don't start at multiples of 16 bytes: what cuBLAS is slow at."""
    return bool(row["problem"]["n"] % 8 or row["problem"]["k"] % 8)


def _shape(row: dict[str, Any]) -> str:
    p = row["problem"]
    batch = f"{p['batch']} × " if p["batch"] > 1 else ""
    return f"{batch}{p['m']}×{p['n']}×{p['k']}"


def suite() -> list[Row]:
    """Kernels against cuBLAS on the H200."""
    document = read("h200/suite.json")
    if document is None:
        return []
    sustained = _timed(document, "sustained")
    invariant = _timed(document, "sustained", invariant=True)
    least = min(sustained, key=lambda r: r["ratio"])
    square = next(r for r in sustained if _shape(r) == "4096×4096×4096")
    ragged = [r for r in sustained if _ragged(r)]
    even = [r for r in sustained if not _ragged(r)]
    odd = " and ".join(f"{_shape(r)} ({r['ratio']:.1f} ×)" for r in ragged)
    result = (
        f"{_mean(sustained):.2f} × the better of cuBLAS and cuBLASLt in the same run sustained, "
        f"{_mean(_timed(document, 'burst')):.2f} × in bursts (fp16, geometric means over {len(sustained)} shapes); "
        f"{_mean(even):.2f} × without the ragged {odd}. Least: {least['ratio']:.2f} × at {_shape(least)}. "
        f"4096³: {square['ratio']:.2f} ×, {square['tflops']:.0f} TFLOP/s. With a row's bits independent of M, as is the "
        f"API's default: {_mean(invariant):.2f} × sustained, least {min(r['ratio'] for r in invariant):.2f} ×. "
        f"Commit {document['commit'][:7]}"
    )
    return [(f"Kernels on one {document['machine']['device']}", result, "h200/suite.json")]


def several_gpus() -> list[Row]:
    """One product over two GPUs, and a worker on each of them."""
    source = "h200x2/gpus.json"
    document = read(source)
    rows = [r for r in document["rows"] if "ratio" in r] if document else []
    found: list[Row] = []
    for row in rows:
        rate = f"{row['flops_per_second'] / 1e12:.0f} TFLOP/s"
        if row["part"] == "sharded":
            what = f"One product, {row['name'].removeprefix('sharded ')}"
            found.append((what, f"{rate}, {row['ratio']:.2f} × one of them", source))
        else:
            workers, shape = row["name"].split(" over one at ")
            what = f"Service with {workers}, one a GPU: {shape}, operands stored, D kept"
            told = f"{row['requests_per_second']:.0f} requests a second, {rate}"
            count = workers.split()[0]
            found.append((what, f"{told}, {row['ratio']:.3f} of {count} × one worker's rate", source))
    return found


def on_gpu() -> list[Row]:
    """The service on one GPU."""
    document = read("h200/service.json")
    if document is None:
        return []
    rows = document["rows"]
    gpu = document["machine"]["gpu"]
    kept = next(r for r in rows if r["name"].startswith("POST /gemm 4096³"))
    lent = next(r for r in rows if r["name"].startswith("Client.gemm 4096³"))
    start = next(r for r in rows if r["name"].startswith("process start to ready"))
    killed = next(r for r in rows if r["part"] == "killed")
    stacks = [r for r in rows if r["part"] == "stacking"]
    gains = ", ".join(f"1/{r['gain']:.0f} at {r['name'].split(', ')[1].split(' against')[0]}" for r in stacks)
    told = (
        (
            "`POST /gemm` 4096³ fp16, operands stored, D kept",
            f"p50 {kept['p50_seconds'] * 1e3:.2f} ms, of which the kernel {kept['kernel_seconds'] * 1e3:.2f} ms",
        ),
        (
            "`Client.gemm` 4096³ fp16 between the client's own device tensors, by CUDA IPC",
            f"p50 {lent['p50_seconds'] * 1e3:.2f} ms, {lent['overhead_seconds'] * 1e6:.0f} µs over `kernels.gemm` in "
            "the client's process",
        ),
        ("64 clients stacked against one 8192×8192 weight", f"{gains} of the device's time unstacked"),
        (
            "ready",
            f"{start['seconds']:.1f} s after its start; {killed['detail']['seconds_until_ready']:.1f} s after a "
            "kill -9 of its worker under load, with no request failed",
        ),
    )
    return [(f"Service on one {gpu}: {what}", result, "h200/service.json") for what, result in told]


def serving() -> list[Row]:
    """The service against its peers on a CPU."""
    document = read("cpu/serving.json")
    if document is None:
        return []
    source = "cpu/serving.json"
    rates = {r["server"]: r for r in document["rows"] if r["part"] == "rates"}
    own = rates["gemm-service"]
    peers = ", ".join(
        f"{row['ours_over_this']['median']:.1f} × {name}"
        + (f" (whose bodies are {form})" if (form := _form(row)) != _form(own) else "")
        for name, row in rates.items()
        if "ours_over_this" in row and name != "gemm-service"
    )
    machine = document["machine"]
    rows = [
        (
            f"Service on {machine['cores']} cores of an {machine['cpu']}: {own['workload']}, {own['clients']} clients",
            f"{own['requests_per_second']['median']:.0f} requests a second, p50 "
            f"{own['p50_seconds']['median'] * 1e3:.1f} ms; {peers}",
            source,
        )
    ]
    moved = {r["name"]: r for r in document["rows"] if r["part"] == "transfers"}
    if moved:
        told = ", ".join(
            f"{name} {row['ratio']['median']:.2f} ({row['request_ratio']['median']:.2f})"
            for name, row in moved.items()
        )
        rows.append(("Bytes in and out, as a share of bare socket calls (the whole request's)", told, source))
    rows += [
        (
            f"Stacking: {row['clients']} clients, {row['workload']}",
            f"{row['requests_per_second']['median']:.0f} requests a second, {row['gain']['median']:.1f} × those "
            f"unstacked; torch alone gains {row['bare_torch_gain']['median']:.1f} × from 16 rows to 1024",
            source,
        )
        for row in document["rows"]
        if row["part"] == "stacking"
    ]
    return rows


def _form(row: dict[str, Any]) -> str:
    """How a workload's bodies are sent."""
    return str(row["workload"]).partition(", ")[2]


def transport() -> list[Row]:
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
        (
            "Handing over 128 MB on one computer (16×2²⁰ by 2²⁰×16 fp32; the product alone takes "
            f"{told(ALONE)})",
            f"{told(IN_PLACE)} in shared memory, {times(IN_PLACE)} the rate of tritonclient over HTTP; "
            f"{told(HTTP)} over HTTP, {times(HTTP)}; tritonclient in system shared memory "
            f"{told(TRITON_SHARED)}, {times(TRITON_SHARED)}",
            "cpu/transport.json",
        )
    ]


def checks() -> list[Row]:
    """Long runs that look for faults."""
    rows = []
    for path in sorted(RESULTS.glob("*/soak.json")):
        document = json.loads(path.read_text())
        row = document["rows"][0]
        found = "no wrong answer, no 500, nothing left behind"
        rows.append(
            (
                "Soak",
                f"{row['requests']:,} random requests in {row['seconds']:.0f} s on {document['machine']['cores']} "
                f"cores, with {row['worker_restarts']:.0f} killed workers: {_outcome([row], found)}",
                str(path.relative_to(RESULTS)),
            )
        )
    for path in sorted(RESULTS.glob("*/fuzz.json")):
        found_rows = json.loads(path.read_text())["rows"]
        minutes = sum(row["seconds"] for row in found_rows) / 60
        rows.append(
            (
                "Fuzzing",
                f"{sum(row['examples'] for row in found_rows):,} hostile bodies, headers, places in shared memory "
                f"and packets in {minutes:.0f} minutes of its processes together: "
                f"{_outcome(found_rows, 'no crash, no 500')}",
                str(path.relative_to(RESULTS)),
            )
        )
    for path in sorted(RESULTS.glob("*/drills.json")):
        by_name = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
        bad = [f"{name}: {row['detail']}" for name, row in by_name.items() if row["outcome"] != "passed"]
        killed = f"; kill -9: {by_name['kill-9']['detail']}" if "kill-9" in by_name else ""
        rows.append(
            (
                "Drills (`make drills`)",
                f"{len(by_name) - len(bad)} of {len(by_name)} passed{killed}{''.join(f'; failed: {b}' for b in bad)}",
                str(path.relative_to(RESULTS)),
            )
        )
    return rows


def _outcome(rows: list[dict[str, Any]], good: str) -> str:
    bad = [f"{row['outcome']}: {row['detail']}" for row in rows if row["outcome"] != "ok"]
    return "; ".join(bad) or good


def headline() -> str:
    """What the README says first, markers included."""
    kernels, served = read("h200/suite.json"), read("cpu/serving.json")
    assert kernels is not None
    assert served is not None
    even = [r for r in _timed(kernels, "sustained") if not _ragged(r)]
    rates = {r["server"]: r for r in served["rows"] if r["part"] == "rates"}
    own, inline = rates["gemm-service"], rates["fastapi-inline"]
    text = (
        f"On one {kernels['machine']['device']} its kernels run at {_mean(even):.2f} × the better of cuBLAS and cuBLASLt "
        f"(geometric mean of {len(even)} fp16 shapes, sustained; more on ragged ones). On {served['machine']['cores']} CPU "
        f"cores it answers {own['requests_per_second']['median']:.0f} products of 256³ a second, "
        f"{inline['ours_over_this']['median']:.1f} × FastAPI with the product in its handler."
    )
    return f"{HEADLINE_MARK}\n{text}\n{END}"


def block() -> str:
    """All figures, markers included."""
    lines = ["| measured | result | file |", "|---|---|---|"]
    for what, result, source in [*suite(), *on_gpu(), *several_gpus(), *serving(), *transport(), *checks()]:
        name = source.rpartition("/")[2]
        lines.append(f"| {what} | {result} | [{name}](benchmarks/results/{source}) |")
    text = "\n".join(lines)
    return f"{MARK}\n{text}\n{END}"


def written(text: str) -> str:
    """The README with both blocks as they are to be."""
    for mark, made in ((HEADLINE_MARK, headline()), (MARK, block())):
        pattern = re.compile(f"{re.escape(mark)}\n.*?{re.escape(END)}", re.DOTALL)
        if pattern.search(text) is None:
            raise SystemExit(f"README.md lacks {mark}")
        text = pattern.sub(lambda _, made=made: made, text)
    return text


def main() -> None:
    """Print the blocks, or put them into the README."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if not parser.parse_args().write:
        print(headline(), block(), sep="\n")
        return
    README.write_text(written(README.read_text()))


if __name__ == "__main__":
    main()
