"""Whether `service` and `kernels` are this project's: receives nothing, hands on a complaint or None.

Both are common names; another distribution of the same name, or a folder of that name where the service is
started, would be imported in their place and fail in odd ways much later.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

#: Import name → a module that only this project's package of that name has.
_OURS = {"service": "arena.py", "kernels": "problem.py"}


def complaint() -> str | None:
    """What shadows one of the project's packages, and what to do about it."""
    home = Path(__file__).resolve().parents[2]
    for name, marker in _OURS.items():
        found = importlib.util.find_spec(name)
        place = Path(found.origin).resolve().parent if found is not None and found.origin else None
        if place is None:
            return f"the package {name!r} is missing beside {home / 'service'}; install gemm-service again"
        if place != home / name or not (place / marker).exists():
            return (
                f"the package {name!r} at {place} isn't this project's and shadows it; uninstall the other"
                f" {name!r}, or give gemm-service a virtual environment of its own"
            )
    return None
