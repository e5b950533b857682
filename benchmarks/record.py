"""Results files: receives rows, hands on benchmarks/results/<machine>/<what>.json with how they came about."""

from __future__ import annotations

import json
import os
import platform
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernels import results
from kernels.device import Device

RESULTS = Path(__file__).parent / "results"
END = "<!-- end -->"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def cpu_machine() -> dict[str, Any]:
    """This computer: processor, cores, memory."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": platform.release(),
    }


def gpu_machine(device: Device) -> dict[str, Any]:
    """This GPU: name, driver, SMs, architecture."""
    return {"device": device.name, "driver": device.driver, "sms": device.sms, "arch": device.arch}


def short_name(device: str) -> str:
    """A GPU's name as folders of results have it: h200 for NVIDIA H200."""
    return device.removeprefix("NVIDIA ").split()[0].lower()


def add_places(parser: ArgumentParser, machine: str | None = "cpu") -> None:
    """Flags that say where the results file goes."""
    default = machine or "from the device's name"
    parser.add_argument(
        "--machine", default=machine, help=f"folder of benchmarks/results (default: {default})"
    )
    parser.add_argument("--out", type=Path, help="write the results file into this folder instead")


def write(
    machine: str,
    what: str,
    rows: Sequence[dict[str, Any]],
    *,
    details: dict[str, Any],
    packages: Sequence[str],
    folder: Path | None = None,
    key: str = "",
) -> Path:
    """Write benchmarks/results/<machine>/<what>.json (or into `folder`) and return its path.

    With `key`, rows of the file that is there stay where no new row has the same `key`; they say at which commit
    they were measured, where it is another.
    """
    recorded = RESULTS / machine / f"{what}.json"
    path = recorded if folder is None else folder / recorded.name
    if key:
        rows = [*results.kept(path if path.exists() else recorded, rows, key), *rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = results.document(
        what, rows, machine={"name": machine, **details}, versions=results.versions(*packages)
    )
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def write_here(
    options: Namespace, what: str, rows: Sequence[dict[str, Any]], packages: Sequence[str], *, key: str = ""
) -> Path:
    """`write` what this computer's processor was measured at, where `options` (add_places) say."""
    return write(
        options.machine,
        what,
        rows,
        details=cpu_machine(),
        packages=packages,
        folder=options.out,
        key=key,
    )


def section(text: str, begin: str, body: str) -> str:
    """`text` with `body` between its lines `begin` and END, in place of what stood there. ValueError without both."""
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the text has no {begin.strip()} … {END}")
    return f"{before}{begin}{body}{end}{after}"
