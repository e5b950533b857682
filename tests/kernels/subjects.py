"""What the tests of the probe have tested in its child process."""

from __future__ import annotations

import os
import time

from kernels.probe import Ended, Outcome, Tester, alive


def troubled(index: int) -> Tester:
    """Each name is what happens."""

    def test(name: str) -> Outcome:
        if name.startswith("slow"):  # each part within the limit, all together beyond it
            for _ in range(5):
                time.sleep(0.6)
                alive()
        if name.startswith("hangs"):
            time.sleep(60)
        if name.startswith("aborts"):
            os.abort()
        if name.startswith("raises"):
            raise RuntimeError("an illegal memory access was encountered")
        if name.startswith("wrong"):
            return Outcome(name, Ended.WRONG, "3 of 9 elements are wrong")
        return Outcome(name, Ended.RIGHT, f"gpu {index}")

    return test


def unstartable(index: int) -> Tester:
    """As where there is no such GPU."""
    raise OSError(f"there is no GPU {index}")
