"""How tests are spread over processes (`-n 2 --dist loadgroup`): what shares a fixture together, what is long first."""

from __future__ import annotations

from pathlib import Path

import pytest

KERNELS = Path(__file__).parent / "kernels"
#: Of the wider set, by how long they take: who begins last ends last.
LONG = ("test_install.py", "test_page_browser.py", "test_every_step[9-", "test_what_is_built_passes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the kernels' wider tests each goes by itself unless its file shares something, and none is tried again."""
    for item in items:
        in_kernels = item.path.is_relative_to(KERNELS)
        if in_kernels:
            item.add_marker(pytest.mark.flaky(reruns=0))  # a second try could hide a race
        if not (in_kernels and item.get_closest_marker("ci")) or shares(item):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: next((n for n, name in enumerate(LONG) if name in item.nodeid), len(LONG)))


def shares(item: pytest.Item) -> bool:
    """Whether it has a fixture of its whole module, such as kernels that were compiled for it."""
    found = getattr(item, "_fixtureinfo", None)
    defined = found.name2fixturedefs.values() if found is not None else ()
    return any(definitions[-1].scope == "module" for definitions in defined)
