"""What is wrong with a large JSON text, found out in a process of its own: receives it, hands on the refusal if any.

The parser that words refusals keeps the interpreter to itself for seconds where a text is large.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from service.errors import ServiceError

_PROGRAM = "import sys; from service.formats import numbers; numbers.tell(sys.stdin.buffer.read())"


def refusal(text: memoryview) -> ServiceError | None:
    """The refusal of a text; None where it is JSON, or where no process can be had."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except OSError:
        return None
    if done.returncode or not done.stdout:
        return None
    code, detail, field = json.loads(done.stdout)
    return ServiceError(code, detail, field=field)
