"""A large JSON text of no usual kind, read in a process of its own: receives it, hands on its document or the refusal.

The parser keeps the interpreter to itself for seconds where a text is large, and so does freeing what it made. No
request that is taken has so many values and yet isn't read in pieces, so that only a document of few comes back.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from service.errors import ServiceError

#: Values of a document that comes back; it is made at once, and holds others up for as long.
MOST_VALUES = 200_000
#: Seconds that a text is read for; 64 MiB take a few.
MOST_SECONDS = 60.0

_PROGRAM = """import sys
from service.formats import elsewhere, numbers
elsewhere.tell(numbers.whole, sys.stdin.buffer, sys.stdout.buffer)
"""
#: Without references to what came before, which take time to find.
_PLAIN = 2


def document(text: memoryview) -> Any:
    """The document of a text. ServiceError as for a small one, or where it has too many values."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=MOST_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except (OSError, subprocess.SubprocessError):
        detail = f"there is no room to read JSON of {len(text)} bytes whose form isn't that of matrices"
        raise ServiceError("no_room", detail, retry_after=1.0) from None
    value, refused = marshal.loads(done.stdout)
    if refused is not None:
        code, detail, field, limit = refused
        raise ServiceError(code, detail, field=field, limit=limit)
    return value


def tell(read: Callable[[bytes], Any], text: BinaryIO, out: BinaryIO) -> None:
    """The other side: write what `read` makes of a text, and what it refuses."""
    gc.disable()  # there is none, and each look would go through all lists
    with contextlib.suppress(OSError):  # where memory is short, this process goes rather than the service
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        value = read(text.read())
        _check_values(value)
        told = marshal.dumps((value, None), _PLAIN)
    except ServiceError as error:
        told = marshal.dumps((None, (error.code, error.detail, error.field, error.limit)), _PLAIN)
    out.write(told)
    out.flush()
    os._exit(0)  # to free each object takes as long as to make it


def _check_values(document: Any) -> None:
    count = 0
    rest: list[Any] = [[document]]
    while rest:
        value = rest.pop()
        inner = value.values() if type(value) is dict else value
        count += len(inner)
        if count > MOST_VALUES:
            raise ServiceError(
                "invalid",
                f"the JSON has more than {MOST_VALUES} values, and not in the form of matrices: lists of numbers",
                field="body",
                limit=MOST_VALUES,
            )
        rest += [one for one in inner if type(one) in (dict, list)]
