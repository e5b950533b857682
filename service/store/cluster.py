"""Settings become the store that fronts share: PostgreSQL, and S3 or a folder that all of them mount."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from service.arena import Slots
from service.postgres import Postgres
from service.session import SharedUnusable
from service.store import files
from service.store.effects import Effects
from service.store.files import FolderFiles
from service.store.objects import MARK, ObjectFiles, compare, mark_of
from service.store.shared import SharedFiles, SharedStore


class Settings(Protocol):
    """The settings that a shared store reads."""

    @property
    def store(self) -> str | None: ...
    @property
    def journal(self) -> str | None: ...
    @property
    def shared_seconds(self) -> float: ...
    @property
    def lease_seconds(self) -> float: ...
    @property
    def store_memory_bytes(self) -> int: ...
    @property
    def store_disk_bytes(self) -> int: ...


class SharedFolder(FolderFiles):
    """A folder that all fronts mount, over a file system on which fsync and rename mean what they say."""

    def __init__(self, url: str, effects: Effects) -> None:
        self.url = url
        self.root = Path(unquote(urlsplit(url).path))
        super().__init__(self.root / "tensors", effects)
        self.up = True

    async def claim(self, database: str) -> None:
        """Make the folder this database's, or see that it is."""
        await self.effects.in_pool(self._claim, database)

    def _claim(self, database: str) -> None:
        mark = self.root / MARK
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not mark.exists():
                part = self.root / f"{MARK}.{secrets.token_hex(8)}"
                part.write_bytes(mark_of(database))
                with contextlib.suppress(FileExistsError):
                    os.link(part, mark)  # whole at once, and only where none is
                part.unlink()
            text = mark.read_bytes()
        except OSError as error:
            raise SharedUnusable(f"store: can't write to {self.url}: {error.strerror}") from None
        compare(text, database, self.url)

    async def older(self, seconds: float) -> AsyncIterator[list[str]]:
        """Ids of files made more than `seconds` ago."""
        yield await self.effects.in_pool(self._older, time.time() - seconds)

    def _older(self, limit: float) -> list[str]:
        with os.scandir(self.folder) as entries:
            old = [Path(entry.name) for entry in entries if entry.stat().st_mtime < limit]
        return [path.stem for path in old if path.suffix == files.SUFFIX]


def open_store(
    settings: Settings,
    slots: Slots,
    forget: Callable[..., None],
    *,
    clock: Callable[[], float] = time.time,
) -> SharedStore:
    """The store, built and not yet started."""
    assert settings.store is not None
    assert settings.journal is not None
    effects = Effects()
    kept: SharedFiles
    if settings.store.startswith("s3://"):
        kept = ObjectFiles(settings.store, seconds=settings.shared_seconds)
    else:
        kept = SharedFolder(settings.store, effects)
    return SharedStore(
        Postgres(settings.journal, seconds=settings.shared_seconds),
        kept,
        effects,
        slots,
        forget,
        memory_budget=settings.store_memory_bytes,
        disk_budget=settings.store_disk_bytes,
        lease=settings.lease_seconds,
        clock=clock,
    )
