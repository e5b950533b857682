"""Turns at large JSON: receives who is to parse a text, hands on its event loop's only turn.

A large text's objects are many times its size, so that one at a time is parsed, in a thread.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

#: JSON above this waits in the arena and is parsed in a thread, so that other requests go on meanwhile.
LARGE_JSON = 1 << 20

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def parsing() -> AsyncIterator[None]:
    """This loop's turn to parse a large text.

    No garbage is looked for meanwhile: each look would go through all lists of the text, and hold all up.
    """
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Semaphore(1)
    async with _turns[loop]:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
