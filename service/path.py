"""The path of a request: receives an ASGI scope, hands on the path as routes and scopes of keys see it.

An escaped slash belongs to a name and parts no segments; an escaped control character is never one of a path's
fixed words (a pattern's end would pass a line's end over). Both stay escaped; all other escapes are resolved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_CONTROL = r"\x00-\x1f\x7f"
_IN_A_SEGMENT = re.compile(rf"[/{_CONTROL}]")
_ANYWHERE = re.compile(rf"[{_CONTROL}]")


def routed(scope: Mapping[str, Any]) -> str:
    """What routes are looked up by."""
    path: str = scope["path"]
    raw: bytes = scope.get("raw_path") or b""
    if raw and b"%" not in raw:
        return path
    sent = raw.decode("latin-1")
    if unquote(sent) != path:  # a server that doesn't tell what was sent, or not all of it
        return _ANYWHERE.sub(_escape, path)
    return "/".join(_IN_A_SEGMENT.sub(_escape, unquote(segment)) for segment in sent.split("/"))


def _escape(found: re.Match[str]) -> str:
    return f"%{ord(found[0]):02X}"
