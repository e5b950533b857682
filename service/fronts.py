"""Which fronts live: receives a shared database, hands on signs of this front's life and who else shows any.

Times are the database's, so that clocks of nodes needn't agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from service.errors import ServiceError
from service.session import Session, Transactions

logger = logging.getLogger(__name__)

#: Signs of life in the time after which a front that gives none counts as dead.
BEATS = 5

#: Ids of fronts that live; takes the seconds of `Fronts.lease`.
ALIVE = "SELECT id FROM fronts WHERE beat > clock_timestamp() - make_interval(secs => ?)"


def prepare(db: Session) -> None:
    """Make the table."""
    db.execute("CREATE TABLE IF NOT EXISTS fronts (id TEXT PRIMARY KEY, beat TIMESTAMPTZ NOT NULL)")


class Fronts:
    """This front among the others. `lease`: seconds without a sign of life after which a front counts as dead."""

    def __init__(self, database: Transactions, lease: float) -> None:
        self.database = database
        self.lease = lease
        self.id = secrets.token_hex(8)
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Show life from now on."""
        await self.database.prepare(prepare)
        await self.database.write(self._beat)
        self._beating = asyncio.create_task(self._beat_often())

    async def close(self) -> None:
        """Say that this front leaves, so that nobody waits for its lease to lapse."""
        if self._beating is None:
            return
        self._beating.cancel()
        with contextlib.suppress(ServiceError):
            await self.database.write(lambda db: db.execute("DELETE FROM fronts WHERE id = ?", (self.id,)))

    async def _beat_often(self) -> None:
        while True:
            await asyncio.sleep(self.lease / BEATS)
            try:
                await self.database.write(self._beat, soft=True)
            except ServiceError as error:
                logger.warning("no sign of life could be given: %s", error.detail)

    def _beat(self, db: Session) -> None:
        db.execute(
            "INSERT INTO fronts VALUES (?, clock_timestamp()) ON CONFLICT (id) DO UPDATE SET beat = excluded.beat",
            (self.id,),
        )
        db.execute(
            "DELETE FROM fronts WHERE beat < clock_timestamp() - make_interval(secs => ?)",
            (100 * self.lease,),
        )
