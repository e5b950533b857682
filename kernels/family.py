"""Which variants there are: receives an architecture, hands on the candidates of the selector, in order.

Imports neither torch nor the compiler: what a variant is and how long it may take is known without either.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from kernels import reference
from kernels.cublas import Cublas
from kernels.group import GroupVariant
from kernels.selector import Variant

FOLDERS = {"sm_90a": "hopper", "sm_100a": "blackwell", "sm_103a": "blackwell"}


def own(arch: str) -> tuple[Variant, ...]:
    """The Step 9 family of an architecture; none where there is none."""
    name = f"kernels.{FOLDERS.get(arch, 'nothing')}.variants"
    if arch not in FOLDERS or find_spec(name) is None:
        return ()
    return tuple(import_module(name).variants())


def grouped(arch: str) -> tuple[GroupVariant, ...]:
    """Kernels of an architecture that compute a list of unlike products in one launch."""
    if arch != "sm_90a":
        return ()
    return tuple(import_module("kernels.hopper.variants").grouped())


def variants(arch: str) -> tuple[Variant, ...]:
    """Own variants, then the reference."""
    if arch == "cpu":
        return reference.variants()
    return (*own(arch), Cublas())
