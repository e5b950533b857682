"""What the build of an image is sent of this folder: the names that .dockerignore lets through."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def let_through(names: Iterable[str]) -> list[str]:
    """The last pattern that matches a name, or a folder above it, decides."""
    rules = [
        (line.startswith("!"), _expression(line.removeprefix("!")))
        for line in (ROOT / ".dockerignore").read_text().split()
    ]
    sent = []
    for name in names:
        kept = True
        for keeps, expression in rules:
            if expression.fullmatch(name):
                kept = keeps
        if kept:
            sent.append(name)
    return sent


def _expression(pattern: str) -> re.Pattern[str]:
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts) + "(?:/.*)?")
