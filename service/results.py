"""Results files for the page: receives where they lie, hands on what they hold, each with where it came from.

From a checkout they are benchmarks/results; an installed package carries copies beside this module.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The first that is there counts: what the package carries, then the checkout's.
FOLDERS = (Path(__file__).parent / "page" / "results", Path(__file__).parents[1] / "benchmarks" / "results")


def ladders(folders: tuple[Path, ...] = FOLDERS) -> list[dict[str, Any]]:
    """Every ladder.json: machine, date, command, versions, commit and rows; the newest state on disk."""
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        return []
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/ladder.json"))]
