"""Where the front's samples count."""

from __future__ import annotations

from collections import Counter

from benchmarks.front import ROOT, own

MAIN = f"<module> ({ROOT}/service/__main__.py:8)"


def test_samples_count_for_the_innermost_frame() -> None:
    stacks = Counter(
        {
            (MAIN, "run (asyncio/runners.py:118)"): 5,
            (MAIN, "run (asyncio/runners.py:118)", f"Gate.__call__ ({ROOT}/service/gate.py:80)"): 3,
            (MAIN, "run (asyncio/runners.py:118)", "observe (prometheus_client/metrics.py:5)"): 2,
        }
    )
    files, functions = own(stacks)
    assert files == {"uvloop": 0.5, "service/gate.py": 0.3, "prometheus_client/metrics.py": 0.2}
    assert functions["service/gate.py Gate.__call__"] == 0.3
