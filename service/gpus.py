"""Which GPUs there are, without CUDA: receives the environment and the driver's files, hands on a place a worker."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("gemm.supervisor")

_PROC = Path("/proc/driver/nvidia/gpus")
#: Seconds that nvidia-smi may take: it loads the driver where nothing else has.
SMI_SECONDS = 30
_LISTED = re.compile(r"^ *(GPU|MIG) .*\(UUID: ((?:GPU|MIG)-[^)\s]+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker computes: the GPU's index in its process, and what it must change in its environment."""

    index: int
    environ: tuple[tuple[str, str], ...] = ()


def visible(environ: Mapping[str, str], proc: Path = _PROC) -> list[str]:
    """Names of the GPUs that may be used, as CUDA_VISIBLE_DEVICES has them: indices, GPU-… or MIG-… names.

    Where that isn't set CUDA would show the first MIG slice alone, so slices are looked for by name.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        try:
            count = len(list(proc.iterdir()))
        except OSError:
            return []
        found = _by_name(environ) if count else []
        return found if any(name.startswith("MIG-") for name in found) else [str(n) for n in range(count)]
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        # CUDA stops at the first entry that names no device.
        if not name or name.startswith("-"):
            break
        names.append(name)
    return names


def _by_name(environ: Mapping[str, str]) -> list[str]:
    """MIG slices, and GPUs that aren't cut into any, as the driver's nvidia-smi lists them; none where it can't."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        return []
    try:
        listing = subprocess.run(
            [tool, "-L"], env=dict(environ), capture_output=True, text=True, timeout=SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi doesn't list the GPUs, so MIG slices aren't seen: %s", error)
        return []
    names: list[str] = []
    for kind, name in _LISTED.findall(listing):
        if kind == "MIG" and names and names[-1].startswith("GPU-"):
            names.pop()  # its GPU, which is not to be used whole
        names.append(name)
    return names


def places(workers: int, environ: Mapping[str, str], proc: Path = _PROC) -> list[Place]:
    """A place for each of `workers` (0: one a visible GPU, at least one); several share a GPU where there are fewer.

    A process can use one MIG slice alone, so a worker on one sees nothing else.
    """
    names = visible(environ, proc)
    chosen = [n % max(len(names), 1) for n in range(workers or max(len(names), 1))]
    if any(name.startswith("MIG-") for name in names):
        return [Place(0, (("CUDA_VISIBLE_DEVICES", names[n]),)) for n in chosen]
    return [Place(n) for n in chosen]
