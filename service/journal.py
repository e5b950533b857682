"""The jobs journal: receives accepted jobs and how their steps ended, hands them on after a restart.

It shares the tensor store's database, so that a step's result, its tensor and the job's end are one
transaction: after a crash a step either has its result or runs again, and no job is there twice. The time is
an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from service.errors import ServiceError
from service.session import Session, Transactions
from service.store import index
from service.store.index import ContentRow, NameRow

#: Seconds that an Idempotency-Key is remembered.
IDEMPOTENCY_SECONDS = 24 * 3600.0

#: Jobs that one sweep expires: bounds the time that the database is held.
SWEEP_JOBS = 256

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, accepted REAL NOT NULL, state TEXT NOT NULL, finished REAL,
    expired INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS jobs_owner ON jobs (owner, id);
CREATE INDEX IF NOT EXISTS jobs_finished ON jobs (expired, finished);
CREATE TABLE IF NOT EXISTS steps (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, position INTEGER NOT NULL, spec BLOB NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued', code TEXT NOT NULL DEFAULT '', detail TEXT NOT NULL DEFAULT '',
    finished REAL, variant TEXT NOT NULL DEFAULT '', reason TEXT NOT NULL DEFAULT '',
    why TEXT NOT NULL DEFAULT '', queue_seconds REAL NOT NULL DEFAULT 0,
    compute_seconds REAL NOT NULL DEFAULT 0, result TEXT, PRIMARY KEY (job, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS idempotency (
    owner TEXT NOT NULL, key TEXT NOT NULL, sha256 TEXT NOT NULL,
    job TEXT NOT NULL REFERENCES jobs (id), created REAL NOT NULL, PRIMARY KEY (owner, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS idempotency_job ON idempotency (job);
"""

_STEP = (
    "position, spec, state, code, detail, finished, variant, reason, why, queue_seconds, "
    "compute_seconds, result"
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step: its encoded specification, and how it ended. `result` is a content's id."""

    position: int
    spec: bytes
    state: str = "queued"
    code: str = ""
    detail: str = ""
    finished: float | None = None
    variant: str = ""
    reason: str = ""
    why: str = ""
    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    result: str | None = None


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job. Unfinished ones are "queued" here: what runs is known to the runner alone."""

    id: str
    owner: str
    accepted: float
    state: str = "queued"
    finished: float | None = None
    expired: bool = False
    steps: tuple[StepRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """An Idempotency-Key with the SHA-256 of the body that it came with."""

    owner: str
    key: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What a transaction records of a job: steps that ended, results, names for them, and the job's own end.

    `state` is "" while the job goes on; with its end the contents `unneeded` are let go.
    """

    job: str
    steps: Sequence[StepRow] = ()
    results: Sequence[ContentRow] = ()
    names: Sequence[NameRow] = ()
    state: str = ""
    finished: float | None = None
    unneeded: Collection[str] = field(default=())


def prepare(db: Session) -> None:
    """Make the tables."""
    for statement in SCHEMA.split(";"):
        db.execute(statement)


class KeySeen(Exception):
    """The key came before, maybe at another front: the job that it made stands."""


class LeaseLost(Exception):
    """Another front runs the job now: what this one made of it doesn't count."""


class Journal:
    """The journal in the store's database."""

    def __init__(self, database: Transactions) -> None:
        self.database = database

    async def start(self) -> list[JobRow]:
        """Make the tables; the jobs that haven't ended, oldest first."""
        await self.database.prepare(prepare)
        return await self.database.read(_unfinished)

    async def accept(self, job: JobRow, inputs: Iterable[ContentRow], key: Key | None) -> None:
        """Record a job, the contents that it needs, and its key. Durable on return. KeySeen."""
        needed = list(inputs)
        await self.database.write(lambda db: self._accept(db, job, needed, key))

    async def record(self, progress: Progress) -> None:
        """Record what ended, in one transaction. LeaseLost where fronts share the journal."""
        await self.database.write(lambda db: self._record(db, progress))

    def _accept(self, db: Session, job: JobRow, inputs: list[ContentRow], key: Key | None) -> None:
        _accept(db, job, inputs, key)

    def _record(self, db: Session, progress: Progress) -> None:
        _record(db, progress)

    async def replay(self, key: Key, now: float) -> str | None:
        """The job that this key made before; ServiceError idempotency_mismatch if with another body."""
        row = await self.database.read(lambda db: _seen(db, key, now))
        if row is None:
            return None
        sha256, job = row
        if sha256 != key.sha256:
            raise ServiceError(
                "idempotency_mismatch",
                "this Idempotency-Key came with another body before; use a new key for a new job",
                field="Idempotency-Key",
            )
        return job

    async def find(self, owner: str, job: str, now: float, ttl: float) -> JobRow | None:
        """The owner's job, as the sweep would leave it now."""
        return await self.database.read(lambda db: _find(db, owner, job, now, ttl))

    async def page(self, owner: str, before: str, limit: int, now: float, ttl: float) -> list[JobRow]:
        """Up to `limit` of the owner's jobs, newest first, older than `before` ("" for the newest), likewise."""
        return await self.database.read(lambda db: _page(db, owner, before, limit, now, ttl))

    async def expire(self, now: float, ttl: float) -> list[str]:
        """Let go of results older than `ttl` and forget old keys; the contents that were let go."""
        due = await self.database.read(lambda db: _due(db, now, ttl))
        if not due:
            return []
        return await self.database.write(lambda db: _expire(db, now, ttl))


def _accept(db: Session, job: JobRow, inputs: list[ContentRow], key: Key | None) -> None:
    if key is not None and _seen(db, key, job.accepted) is not None:
        raise KeySeen
    db.execute(
        "INSERT INTO jobs (id, owner, accepted, state) VALUES (?, ?, ?, ?)",
        (job.id, job.owner, job.accepted, job.state),
    )
    db.executemany(
        "INSERT INTO steps (job, position, spec) VALUES (?, ?, ?)",
        [(job.id, step.position, step.spec) for step in job.steps],
    )
    index.keep(db, job.id, inputs)
    if key is not None:
        db.execute(
            "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner, key) DO UPDATE SET "
            "sha256 = excluded.sha256, job = excluded.job, created = excluded.created",
            (key.owner, key.key, key.sha256, job.id, job.accepted),
        )


def _record(db: Session, progress: Progress) -> None:
    index.keep(db, progress.job, progress.results)
    for name in progress.names:
        index.bind(db, name)
    db.executemany(
        "UPDATE steps SET state = ?, code = ?, detail = ?, finished = ?, variant = ?, reason = ?, why = ?, "
        "queue_seconds = ?, compute_seconds = ?, result = ? WHERE job = ? AND position = ?",
        [
            (
                *(step.state, step.code, step.detail, step.finished, step.variant, step.reason, step.why),
                *(step.queue_seconds, step.compute_seconds, step.result, progress.job, step.position),
            )
            for step in progress.steps
        ],
    )
    if progress.state:
        db.execute(
            "UPDATE jobs SET state = ?, finished = ? WHERE id = ?",
            (progress.state, progress.finished, progress.job),
        )
        index.unkeep(db, progress.job, progress.unneeded)


def _seen(db: Session, key: Key, now: float) -> tuple[str, str] | None:
    row: tuple[str, str] | None = db.execute(
        "SELECT sha256, job FROM idempotency WHERE owner = ? AND key = ? AND created > ?",
        (key.owner, key.key, now - IDEMPOTENCY_SECONDS),
    ).fetchone()
    return row


def _job(db: Session, row: tuple[str, str, float, str, float | None, int], since: float = 0.0) -> JobRow:
    """A job with its steps; results of one that finished by `since` are gone, swept or not."""
    steps = tuple(
        StepRow(*step)
        for step in db.execute(f"SELECT {_STEP} FROM steps WHERE job = ? ORDER BY position", (row[0],))
    )
    finished = row[4]
    expired = bool(row[5]) or (finished is not None and finished <= since)
    if expired:
        steps = tuple(replace(step, result=None) for step in steps)
    return JobRow(*row[:5], expired=expired, steps=steps)


_JOB = "SELECT id, owner, accepted, state, finished, expired FROM jobs"


def _unfinished(db: Session) -> list[JobRow]:
    rows = db.execute(f"{_JOB} WHERE finished IS NULL ORDER BY id").fetchall()
    return [_job(db, row) for row in rows]


#: A job that the sweep would leave: not expired, or a key can still ask for it.
_LEFT = (
    "(finished IS NULL OR finished > ? OR EXISTS "
    "(SELECT 1 FROM idempotency WHERE job = jobs.id AND created > ?))"
)


def jobs_of(db: Session, ids: Iterable[str]) -> list[JobRow]:
    """These jobs, as far as they are there."""
    rows = [db.execute(f"{_JOB} WHERE id = ?", (id_,)).fetchone() for id_ in ids]
    return [_job(db, row) for row in rows if row is not None]


def _find(db: Session, owner: str, job: str, now: float, ttl: float) -> JobRow | None:
    left = (now - ttl, now - IDEMPOTENCY_SECONDS)
    row = db.execute(f"{_JOB} WHERE id = ? AND owner = ? AND {_LEFT}", (job, owner, *left)).fetchone()
    return None if row is None else _job(db, row, now - ttl)


def _page(db: Session, owner: str, before: str, limit: int, now: float, ttl: float) -> list[JobRow]:
    older = "AND id < ?" if before else "AND ? = ''"
    rows = db.execute(
        f"{_JOB} WHERE owner = ? {older} AND {_LEFT} ORDER BY id DESC LIMIT ?",
        (owner, before, now - ttl, now - IDEMPOTENCY_SECONDS, limit),
    )
    return [_job(db, row, now - ttl) for row in rows.fetchall()]


def _due(db: Session, now: float, ttl: float) -> bool:
    """Whether a sweep has anything to do, so that a quiet service doesn't write."""
    checks = (
        ("SELECT 1 FROM jobs WHERE expired = 0 AND finished <= ?", now - ttl),
        ("SELECT 1 FROM idempotency WHERE created <= ?", now - IDEMPOTENCY_SECONDS),
    )
    return any(db.execute(f"{query} LIMIT 1", (time,)).fetchone() for query, time in checks)


def _expire(db: Session, now: float, ttl: float) -> list[str]:
    """An expired job's row stays as long as a key can ask for it: its work must not be done again."""
    unneeded: list[str] = []
    due = db.execute(
        "SELECT id FROM jobs WHERE expired = 0 AND finished <= ? LIMIT ?", (now - ttl, SWEEP_JOBS)
    ).fetchall()
    for (job,) in due:
        contents = [row[0] for row in db.execute("SELECT content FROM keeps WHERE keeper = ?", (job,))]
        index.unkeep(db, job, contents)
        unneeded += contents
        db.execute("UPDATE steps SET result = NULL WHERE job = ?", (job,))
        db.execute("UPDATE jobs SET expired = 1 WHERE id = ?", (job,))
    db.execute("DELETE FROM idempotency WHERE created <= ?", (now - IDEMPOTENCY_SECONDS,))
    db.execute(
        "DELETE FROM jobs WHERE expired = 1 AND NOT EXISTS (SELECT 1 FROM idempotency WHERE job = jobs.id)"
    )
    return unneeded
