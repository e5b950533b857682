"""How tests are spread over processes (`-n 2`): a file's together, for they share services; the longest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

KERNELS, BENCHMARKS = (Path(__file__).parent / name for name in ("kernels", "benchmarks"))
#: Tests that share nothing with their file's others and take long: each goes by itself.
ALONE = ("::test_every_step[", "::test_what_is_built_passes[", "blackwell/test_step9_virtual.py::")
#: By how long they take: who begins last ends last.
LONG = ("test_install.py", "test_page_browser.py", "::test_what_is_built_passes[")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whatever `--dist` says. (xdist's own groups have no effect: they rename tests where pytest 9.2 doesn't look.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Spread(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if any(name in nodeid for name in ALONE) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # as sorted below
    return Spread(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first; of kernels' tests none is tried again, for that could hide a race; nor are benchmarks' in
    `make test`.
    """
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            wide = item.get_closest_marker("ci") is not None
            if item.path.is_relative_to(KERNELS) or (item.path.is_relative_to(BENCHMARKS) and not wide):
                item.add_marker(pytest.mark.flaky(reruns=0))
    items.sort(key=lambda item: next((n for n, name in enumerate(LONG) if name in item.nodeid), len(LONG)))
