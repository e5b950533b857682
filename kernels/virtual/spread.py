"""Spreads work over processes: receives tasks by key, hands on their results as they come; keeps what is done.

Results are plain data. With a file, each is appended as a line of JSON, and a run that was cut off goes on where it
stopped. Keys are taken together with the virtual GPU's own sources: after a change there, everything runs again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Result = dict[str, Any]
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spread(
    work: Callable[[T], Result], tasks: Mapping[str, T], *, jobs: int = 1, kept: Path | None = None
) -> Iterator[tuple[str, Result]]:
    """Yield each task's key and result, in no particular order; first those that the file already holds.

    With more than one job, `work` and the tasks must be picklable: processes are spawned, one BLAS thread each.
    """
    done = _read(kept)
    left = {}
    for key, task in tasks.items():
        found = done.get(_full(key))
        if found is None:
            left[key] = task
        else:
            yield key, found
    for key, result in _run(work, left, jobs):
        if kept is not None:
            _append(kept, _full(key), result)
        yield key, result


def _run(work: Callable[[T], Result], tasks: Mapping[str, T], jobs: int) -> Iterator[tuple[str, Result]]:
    if jobs <= 1:
        for key, task in tasks.items():
            yield key, work(task)
        return
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, task): key for key, task in tasks.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _append(kept: Path, key: str, result: Result) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    cut_off = kept.is_file() and not kept.read_bytes().endswith(b"\n")
    with kept.open("a") as file:
        file.write(("\n" if cut_off else "") + json.dumps([key, result]) + "\n")


def _read(kept: Path | None) -> dict[str, Result]:
    """What a file holds; lines that were cut off are left out."""
    if kept is None or not kept.is_file():
        return {}
    return dict(json.loads(line) for line in kept.read_text().splitlines() if line.endswith("]"))


def _full(key: str) -> str:
    return hashlib.sha256(f"{_sources()} {key}".encode()).hexdigest()[:24]


@cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
