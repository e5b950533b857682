"""What was found out about one device, kept on disk: receives facts by name, hands on those of all processes.

A file is of one device, driver and build. Several processes may add to it at once, each under a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kernels.libraries import check_private

Facts = Mapping[str, Any]


def default_folder() -> Path:
    """Where outcomes and measured times are kept: $GEMM_CACHE, else gemm-kernels in the user's cache folder."""
    own = os.environ.get("GEMM_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemm-kernels"


class DeviceFile:
    """A JSON file in `folder`, named after `what` and a hash of the device and the build that it is about."""

    def __init__(self, folder: Path, what: str, device: str, build: str) -> None:
        self._what, self._about = what, {"device": device, "build": build}
        digest = hashlib.sha256(f"{device}\n{build}".encode()).hexdigest()[:20]
        self.path = folder / f"{what}-{digest}.json"

    def read(self) -> dict[str, Any]:
        """Facts by name; nothing where the file is missing, foreign or another user's to write."""
        try:
            check_private(self.path)
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if {key: data.get(key) for key in self._about} != self._about:
            return {}
        found: dict[str, Any] = data.get(self._what, {})
        return found

    def update(self, change: Callable[[dict[str, Any]], Facts]) -> None:
        """Replace the facts by what `change` makes of those that are there now. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            facts = dict(change(self.read()))
            fd, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(fd, "w") as file:
                json.dump(self._about | {self._what: facts}, file, indent=1)
            os.replace(name, self.path)
