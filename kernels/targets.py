"""What a kernel module wants compiled: receives its choices, hands on frozen `Function`s.

A kernel module has `functions() -> Sequence[Function]`; the build lists them in a subprocess, so a module may
import the compiler at its top. Nothing here imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one shared library.

    `name` is its symbol in the library, unique an architecture. `compile` takes nothing and returns what
    `cute.compile(…, options="--enable-tvm-ffi")` returns; it is called in a subprocess that has
    CUTE_DSL_ARCH set. Functions with the same `library` share one file; by default each has its own.
    `config` is kept in the manifest as it is, for whoever chooses and launches: JSON values only.
    """

    name: str
    arch: str
    compile: Callable[[], Any]
    library: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in (self.name, self.file):
            if not _NAME.match(value):
                raise ValueError(f"{value!r} must be lower-case letters, digits and underscores")

    @property
    def file(self) -> str:
        """Stem of the shared library."""
        return self.library or self.name
