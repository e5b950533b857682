"""torch alone, in a process that does nothing else: receives a matrix's size and numbers of rows, prints seconds.

python -m benchmarks.peers.bare 4096 16 1024    # A of 16 and of 1024 rows by one 4096×4096 matrix, fp32

Prints JSON: by rows, the median seconds of one product (`seconds`) and of all cores together (`core_seconds`).
Where the second is well below the first times the cores used, something else ran on this computer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

#: Products before the clock counts, seconds of products that it counts, and how many at least.
WARM, SECONDS, LEAST = 3, 0.4, 5


def measure(size: int, rows: int, weight: torch.Tensor) -> dict[str, float]:
    """Median seconds of [rows, size] · weight."""
    a = torch.ones(rows, size)
    for _ in range(WARM):
        torch.matmul(a, weight)
    wall: list[float] = []
    cores: list[float] = []
    while sum(wall) < SECONDS or len(wall) < LEAST:
        began, used = time.perf_counter(), time.process_time()
        torch.matmul(a, weight)
        wall.append(time.perf_counter() - began)
        cores.append(time.process_time() - used)
    return {"seconds": statistics.median(wall), "core_seconds": statistics.median(cores)}


def main(arguments: list[str]) -> None:
    """Measure each number of rows, in turn."""
    size, *rows = map(int, arguments)
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(7))
    print(json.dumps({str(n): measure(size, n, weight) for n in rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
