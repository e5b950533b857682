"""GEMM kernels, their selector and their proofs, usable without the service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.api import gemm, gemm_grouped

__all__ = ["gemm", "gemm_grouped"]


def __getattr__(name: str) -> Any:
    """What is in `__all__`, imported when it is asked for: processes without torch import this package too."""
    if name in __all__:
        from kernels import api

        return getattr(api, name)
    raise AttributeError(f"module 'kernels' has no attribute {name!r}")
