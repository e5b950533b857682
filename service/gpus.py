"""Which GPUs there are, without CUDA: receives the environment and the driver's files, hands on a place a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker computes: the GPU's index in its process, and what it must change in its environment."""

    index: int
    environ: tuple[tuple[str, str], ...] = ()


def visible(environ: Mapping[str, str], proc: Path = _PROC) -> list[str]:
    """Names of the GPUs that CUDA would show, as CUDA_VISIBLE_DEVICES has them: indices, GPU-… or MIG-… names."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        try:
            return [str(n) for n, _ in enumerate(sorted(proc.iterdir()))]
        except OSError:
            return []
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        # CUDA stops at the first entry that names no device.
        if not name or name.startswith("-"):
            break
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
