"""The journal that fronts share: receives what the jobs' journal does, hands each job to one front at a time.

A lease says which front runs a job; the front's signs of life keep it. The lease of a front that shows none goes
to whoever asks first, and what a front records of a job whose lease it has lost is refused: so a step may be
computed twice, but its result is recorded once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from service import journal
from service.fronts import ALIVE, Fronts
from service.journal import JobRow, Journal, Key, LeaseLost, Progress, jobs_of
from service.session import Session, Transactions
from service.store.index import ContentRow

#: Jobs of a dead front that one claim takes, so that others have their share.
CLAIM_JOBS = 16

_FREE = f"front NOT IN ({ALIVE})"


def prepare(db: Session) -> None:
    """Make the tables. A lease is there as long as its job goes on; `front` is "" where a front let it go."""
    journal.prepare(db)
    db.execute(
        "CREATE TABLE IF NOT EXISTS leases (job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE, "
        "front TEXT NOT NULL, cancel INTEGER NOT NULL DEFAULT 0)"
    )
    db.execute("CREATE INDEX IF NOT EXISTS leases_front ON leases (front)")


@dataclass(frozen=True, slots=True)
class Survey:
    """What concerns a front: the jobs it has, those of them to be cancelled, and whether any job is nobody's."""

    held: frozenset[str]
    cancel: frozenset[str]
    free: bool


class LeasedJournal(Journal):
    """See the module."""

    def __init__(self, database: Transactions, fronts: Fronts) -> None:
        super().__init__(database)
        self.fronts = fronts

    async def start(self) -> list[JobRow]:
        """Make the tables. What isn't ended is claimed in time."""
        await self.database.prepare(prepare)
        return []

    async def survey(self) -> Survey:
        """How things stand."""
        return await self.database.read(self._survey)

    async def claim(self) -> list[JobRow]:
        """Take jobs that are nobody's, oldest first; hands on those to be run, `survey` tells which to cancel."""
        return await self.database.write(self._claim)

    async def jobs(self, ids: Collection[str], *, held: bool = False) -> list[JobRow]:
        """These jobs; `held`: those among them that this front has."""
        return await self.database.read(lambda db: jobs_of(db, self._held(db, ids) if held else ids))

    async def release(self, job: str) -> None:
        """Let another front run it."""
        await self.database.write(
            lambda db: db.execute(
                "UPDATE leases SET front = '' WHERE job = ? AND front = ?", (job, self.fronts.id)
            )
        )

    async def ask_cancel(self, job: str) -> bool:
        """Let whoever runs it cancel it; False where it has ended."""
        return await self.database.write(
            lambda db: db.execute("UPDATE leases SET cancel = 1 WHERE job = ?", (job,)).rowcount > 0
        )

    def _accept(self, db: Session, job: JobRow, inputs: list[ContentRow], key: Key | None) -> None:
        super()._accept(db, job, inputs, key)
        db.execute("INSERT INTO leases (job, front) VALUES (?, ?)", (job.id, self.fronts.id))

    def _record(self, db: Session, progress: Progress) -> None:
        if not self._held(db, [progress.job]):
            raise LeaseLost
        super()._record(db, progress)
        if progress.state:
            db.execute("DELETE FROM leases WHERE job = ?", (progress.job,))

    def _held(self, db: Session, ids: Collection[str]) -> list[str]:
        query = "SELECT 1 FROM leases WHERE job = ? AND front = ?"
        return [id_ for id_ in ids if db.execute(query, (id_, self.fronts.id)).fetchone() is not None]

    def _survey(self, db: Session) -> Survey:
        rows = db.execute("SELECT job, cancel FROM leases WHERE front = ?", (self.fronts.id,)).fetchall()
        free = db.execute(f"SELECT 1 FROM leases WHERE {_FREE} LIMIT 1", (self.fronts.lease,)).fetchone()
        held = frozenset(job for job, _ in rows)
        return Survey(held, frozenset(job for job, cancel in rows if cancel), free is not None)

    def _claim(self, db: Session) -> list[JobRow]:
        rows = db.execute(
            "UPDATE leases SET front = ? WHERE job IN "
            f"(SELECT job FROM leases WHERE {_FREE} ORDER BY job LIMIT ? FOR UPDATE SKIP LOCKED) "
            "RETURNING job, cancel",
            (self.fronts.id, self.fronts.lease, CLAIM_JOBS),
        )
        return jobs_of(db, sorted(job for job, cancel in rows.fetchall() if not cancel))
