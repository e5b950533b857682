"""Kernel modules that tests compile, and the folder in which all of them find what one has compiled."""

from __future__ import annotations

from pathlib import Path

from kernels.build import build
from kernels.libraries import default_root

MODULES = (f"{__name__}.grouped", f"{__name__}.step9", "kernels.hopper.pack")


def built() -> Path:
    """The folder of Hopper's sample, compiled unless it is there; whole, so that all choose from the same kernels."""
    root = default_root() / "samples"
    build("sm_90a", modules=MODULES, root=root)
    return root
