"""Turns at large JSON: receives a text, hands on its document when it is the text's turn in this event loop.

A document is many times its text's size, so that there is one at a time, made and let go in a thread.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

from service.formats import numbers, pieces

#: JSON above this waits in the arena for its turn.
LARGE_JSON = numbers.LARGE

_NEVER = 1 << 30

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@asynccontextmanager
async def parsing(text: bytes | bytearray | memoryview) -> AsyncIterator[Any]:
    """The document of a text, for the length of a block; what is left of a large one that is refused is let go.

    Garbage is looked for among young objects alone meanwhile: a full look would go through all lists of the text, and
    hold all up.
    """
    if len(text) <= LARGE_JSON:
        yield numbers.loads(text)
        return
    loop = asyncio.get_running_loop()
    if loop not in _turns:
        _turns[loop] = asyncio.Semaphore(1)
    async with _turns[loop]:
        often = gc.get_threshold()
        gc.set_threshold(*often[:2], _NEVER)
        try:
            document = await asyncio.to_thread(numbers.loads, text)
            try:
                yield document
            except BaseException:
                await asyncio.to_thread(pieces.let_go, document)
                raise
        finally:
            gc.set_threshold(*often)
