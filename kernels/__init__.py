"""GEMM kernels, their selector and their proofs, usable without the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.api import gemm

__all__ = ["gemm"]


def __getattr__(name: str) -> Any:
    """`kernels.gemm`, imported when it is asked for: processes without torch import this package too."""
    if name == "gemm":
        from kernels.api import gemm

        return gemm
    raise AttributeError(f"module 'kernels' has no attribute {name!r}")
