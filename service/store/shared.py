"""The tensor store that fronts share: receives tensors, keeps them as objects and their rows in PostgreSQL.

Any front serves any handle: what a name means is asked of the database each time, so what another front has
just put is seen, and a content, which never changes, is fetched once and then found in the arena.

A result that /gemm made is in the arena of one front alone until it is written; others wait for it, as long as
that front lives. What nothing needs any more stays for a while, for whoever holds it elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from service import audit
from service.arena import Slots
from service.errors import ServiceError
from service.fronts import ALIVE, Fronts
from service.session import Session
from service.store import index
from service.store.conditions import Conditions
from service.store.content import Content, Hold
from service.store.effects import Effects
from service.store.files import Files
from service.store.index import CONTENT, ContentRow, NameRow, content_of
from service.store.names import Named
from service.store.share import Stock
from service.store.shared_contents import SharedContents, note_orphans, written_state
from service.store.store import Binding, Entry, TensorStore, entry_of

if TYPE_CHECKING:
    from service.postgres import Postgres

logger = logging.getLogger(__name__)

#: Seconds that an object outlives the last name and job that needed it: longer than any reply takes.
GRACE_SECONDS = 3600.0
#: Seconds after which an object without a row is what a dead front left half done.
ORPHAN_SECONDS = 86400.0
#: Seconds between looks for such objects.
ORPHANS_EVERY = 6 * 3600.0
#: Rows of one sweep.
SWEEP_ROWS = 256
#: Transaction-wide lock of who sweeps: any fixed number.
_SWEEPING = 0x67656D6E

SCHEMA = (
    # The front that alone has a content which isn't written yet.
    "CREATE TABLE IF NOT EXISTS unwritten (content TEXT PRIMARY KEY REFERENCES contents (id) ON DELETE CASCADE, "
    "front TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS names_expires ON names (expires)",
    "CREATE INDEX IF NOT EXISTS contents_owner ON contents (owner)",
    'CREATE INDEX IF NOT EXISTS names_sorted ON names (owner, name COLLATE "C")',
    # Objects to delete after a while.
    "CREATE TABLE IF NOT EXISTS dropped (content TEXT PRIMARY KEY, "
    "at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp())",
)
_NOTE_DROPPED = """
CREATE FUNCTION note_dropped() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO dropped (content) VALUES (OLD.id) ON CONFLICT DO NOTHING; RETURN NULL; END $$
"""
_TRIGGER = (
    "CREATE TRIGGER contents_dropped AFTER DELETE ON contents FOR EACH ROW EXECUTE FUNCTION note_dropped()"
)


class SharedFiles(Files, Protocol):
    """Files that all fronts reach."""

    up: bool

    async def claim(self, database: str) -> None:
        """Make them this database's, or see that they are."""

    def older(self, seconds: float) -> AsyncIterator[list[str]]:
        """Ids of files made more than `seconds` ago, in pages."""


def prepare(db: Session) -> None:
    """Make the tables."""
    index.prepare(db)
    for statement in SCHEMA:
        db.execute(statement)
    if db.execute("SELECT 1 FROM pg_trigger WHERE tgname = 'contents_dropped'").fetchone() is None:
        db.execute(_NOTE_DROPPED)
        db.execute(_TRIGGER)


class SharedStore(TensorStore):
    """See the module. `forget(*tensors)` is told what a device cache may drop."""

    contents: SharedContents

    def __init__(
        self,
        database: Postgres,
        kept: SharedFiles,
        effects: Effects,
        slots: Slots,
        forget: Callable[..., None],
        *,
        memory_budget: int,
        disk_budget: int,
        lease: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        contents = SharedContents(
            kept,
            database,
            effects,
            slots,
            memory_budget=memory_budget,
            disk_budget=disk_budget,
            forget=forget,
            lease=lease,
        )
        super().__init__(database, effects, contents, clock)
        self.kept_files = kept
        self.fronts = Fronts(database, lease)
        self.database = database
        self._orphans_at = 0.0
        #: Results of this front that a name means and that aren't written yet.
        self._soft: dict[tuple[str, str], Content] = {}

    # Life

    async def start(self) -> None:
        """Make the tables, claim the objects, show life.

        SharedUnusable where something can't be reached or is another's.
        """
        await self.effects.in_pool(self.database.open)
        await self.transactions.prepare(prepare)
        (database,) = await self.transactions.read(lambda db: db.execute("SELECT id FROM service").fetchone())
        await self.kept_files.claim(database)
        await self.fronts.start()
        await self._count()
        self.sweep_often()

    async def end(self) -> None:
        """Say that this front leaves."""
        await self.fronts.close()
        await asyncio.to_thread(self.database.close)

    async def sweep(self, now: float) -> None:
        """Forget what expired; delete objects whose time is over; write what was refused; count bytes."""
        await self.contents.retry()
        await self.contents.tell_lost()
        self.contents.tidy()
        self._soft = {k: soft for k, soft in self._soft.items() if not (soft.row.whole or soft.lost)}
        for name, row in await self.transactions.write(lambda db: _expire(db, now)):
            audit.changed("expire", row, name)
        if time.monotonic() >= self._orphans_at:
            self._orphans_at = time.monotonic() + ORPHANS_EVERY
            await self._drop_orphans()
        await self._delete_dropped()
        await self._count()

    def parts_up(self) -> dict[str, float]:
        """Whether store and journal served the last request."""
        return {"store": float(self.kept_files.up), "journal": float(self.database.up)}

    async def _count(self) -> None:
        self.contents.charge_as(await self.transactions.read(_bytes_by_owner))

    async def _delete_dropped(self) -> None:
        due = await self.transactions.read(_due)
        for id_ in due:
            await self.kept_files.remove(id_)
        if due:
            await self.transactions.write(
                lambda db: db.executemany("DELETE FROM dropped WHERE content = ?", [(id_,) for id_ in due])
            )

    async def _drop_orphans(self) -> None:
        """Note objects that no row names, to be deleted as others are."""
        async for ids in self.kept_files.older(ORPHAN_SECONDS):
            orphans = await self.transactions.write(lambda db, ids=ids: note_orphans(db, ids))  # type: ignore[misc]
            if orphans:
                logger.info("%d objects of unfinished tensors will be deleted", orphans)

    # Lookups

    async def find(self, owner: str, name: str) -> Named[Content] | None:
        """What the name means now."""
        now = self.clock()
        row = await self.transactions.read(lambda db: _named(db, owner, name, now, self.fronts.lease))
        return None if row is None else self._named(row)

    async def entries(self, owner: str, after: str, limit: int) -> tuple[list[Entry], str | None]:
        """A page of the owner's tensors by name; and what to pass as `after` for the next."""
        now = self.clock()
        rows = await self.transactions.read(
            lambda db: _names(db, owner, after, limit + 1, now, self.fronts.lease)
        )
        page = [self._named(row) for row in rows[:limit]]
        following = page[-1].name if len(rows) > limit else None
        self.contents.tidy()
        return [entry_of(named) for named in page if not named.content.lost], following

    async def hold_content(self, content: str) -> Hold:
        """Keep a content readable by its id, which its keeper knows. ServiceError lost."""
        row = await self.transactions.read(
            lambda db: db.execute(f"SELECT {CONTENT} FROM contents WHERE id = ?", (content,)).fetchone()
        )
        if row is None:
            raise ServiceError("lost", "the tensor is gone")
        return self.contents.hold(self.contents.of(content_of(row)))

    def _named(self, row: tuple[NameRow, ContentRow, bool]) -> Named[Content]:
        name, content, lost = row
        return Named(name.owner, name.name, self.contents.of(content, lost=lost), name.created, name.expires)

    # Shares

    async def stock(self, owner: str, name: str = "") -> Stock:
        """What the owner keeps, as the database knows, and what this front is about to tell it.

        What other fronts are about to tell isn't counted.
        """
        names = [name, *self.contents.arrivals.get(owner, ())]
        with self.contents.noting(owner) as fresh:
            before = list(fresh)
            used, meant = await self.transactions.read(lambda db: _stock(db, owner, names, before))
        versions: dict[str, dict[str, int]] = {name: {}}
        for one, id_, nbytes in meant:
            versions.setdefault(one, {})[id_] = nbytes
        for one, contents in self.contents.arrivals.get(owner, {}).items():
            versions.setdefault(one, {}).update({content.row.id: content.row.nbytes for content in contents})
        return Stock(used + sum(fresh.values()), versions)

    def size(self, nbytes: int, dtype: str, shape: tuple[int, ...]) -> int:
        """Its bytes: the database knows no more."""
        return nbytes

    # Changes

    async def bind(self, binding: Binding, conditions: Conditions, *, soft: bool = False) -> Entry:
        """Let the name mean the held content, if the conditions hold in the same transaction."""
        content = binding.hold.content
        row = content.row
        key = (row.owner, binding.name)
        earlier = self._soft.get(key)
        now = self.clock()
        async with self.binding(row.owner, [binding]) as (name,):

            def commit(db: Session) -> bool:
                found = _named(db, row.owner, name.name, now, self.fronts.lease)
                conditions.check(None if found is None or found[2] else found[1].etag)
                index.add(db, row)
                if soft:
                    db.execute("INSERT INTO unwritten VALUES (?, ?)", (row.id, self.fronts.id))
                index.bind(db, name)
                if binding.bound is not None and found is not None and _kept(db, found[1].id):
                    Stock(_stock(db, row.owner, [], [])[0]).check(binding.bound)
                return earlier is None or written_state(db, earlier.row.id, self.fronts.lease) == "lost"

            replaced = await self.transactions.write(commit, soft=soft)
        self.contents.known(content)
        if self._soft.get(key) is earlier and earlier is not None:
            del self._soft[key]
            if replaced and not earlier.needs:  # nothing can name it any more, so it needn't be written
                self.contents.forget(earlier)
        if soft:
            self._soft[key] = content
        return entry_of(Named(name.owner, name.name, content, name.created, name.expires))

    async def unbind(self, named: Named[Content]) -> None:
        """Forget the name, if it still means this."""
        id_ = named.content.row.id
        await self.transactions.write(lambda db: index.unbind(db, named.owner, named.name, id_))

    @contextlib.asynccontextmanager
    async def binding(self, owner: str, bindings: Sequence[Binding]) -> AsyncIterator[list[NameRow]]:
        """Yield the names' rows, to be committed in the block: transactions keep them apart."""
        now = self.clock()
        yield [
            NameRow(owner, b.name, b.hold.content.row.id, now, None if b.ttl is None else now + b.ttl)
            for b in bindings
        ]

    # For jobs

    def kept(self, holds: Iterable[Hold]) -> None:
        """The database knows them."""
        for hold in holds:
            self.contents.known(hold.content)

    def unkept(self, contents: Iterable[str]) -> None:
        """The database knows, and lets them go."""


_OF_C = ", ".join(f"c.{column}" for column in CONTENT.split(", "))
_NAMED = (
    f"SELECT n.owner, n.name, n.content, n.created, n.expires, {_OF_C}, "
    f"c.whole = 0 AND NOT EXISTS (SELECT 1 FROM unwritten u WHERE u.content = c.id AND u.front IN ({ALIVE})) "
    "FROM names n JOIN contents c ON c.id = n.content "
    "WHERE n.owner = ? AND (n.expires IS NULL OR n.expires > ?)"
)


def _row(row: Sequence[object]) -> tuple[NameRow, ContentRow, bool]:
    return NameRow(*row[:5]), content_of(row[5:13]), bool(row[13])  # type: ignore[arg-type]


def _named(
    db: Session, owner: str, name: str, now: float, lease: float
) -> tuple[NameRow, ContentRow, bool] | None:
    row = db.execute(f"{_NAMED} AND n.name = ?", (lease, owner, now, name)).fetchone()
    return None if row is None else _row(row)


def _names(
    db: Session, owner: str, after: str, limit: int, now: float, lease: float
) -> list[tuple[NameRow, ContentRow, bool]]:
    query = f'{_NAMED} AND n.name COLLATE "C" > ? ORDER BY n.name COLLATE "C" LIMIT ?'
    return [_row(row) for row in db.execute(query, (lease, owner, now, after, limit))]


def _stock(
    db: Session, owner: str, names: list[str], without: list[str]
) -> tuple[int, list[tuple[str, str, int]]]:
    """An owner's bytes without some contents; and name, content, bytes of what names mean that no job keeps.

    One statement, and so of one moment.
    """
    rows = db.execute(
        "SELECT kept.nbytes, n.name, n.content, c.nbytes FROM "
        "(SELECT coalesce(sum(nbytes), 0) AS nbytes FROM contents WHERE owner = ? AND NOT id = ANY(?)) AS kept "
        "LEFT JOIN (names n JOIN contents c ON c.id = n.content) ON n.owner = ? AND n.name = ANY(?) "
        "AND NOT EXISTS (SELECT 1 FROM keeps WHERE content = n.content)",
        (owner, without, owner, names),
    ).fetchall()
    return int(rows[0][0]), [(row[1], row[2], int(row[3])) for row in rows if row[1] is not None]


def _kept(db: Session, content: str) -> bool:
    """Whether a job keeps it."""
    return db.execute("SELECT 1 FROM keeps WHERE content = ?", (content,)).fetchone() is not None


def _bytes_by_owner(db: Session) -> dict[str, int]:
    return {
        owner: int(n) for owner, n in db.execute("SELECT owner, sum(nbytes) FROM contents GROUP BY owner")
    }


def _expire(db: Session, now: float) -> list[tuple[str, ContentRow]]:
    """Forget names whose time has come, and who wrote what; one front at a time, since all sweep."""
    if not db.execute("SELECT pg_try_advisory_xact_lock(?)", (_SWEEPING,)).fetchone()[0]:
        return []
    db.execute("DELETE FROM unwritten USING contents WHERE id = content AND whole = 1")
    rows = db.execute(
        f"SELECT n.name, {_OF_C} FROM names n JOIN contents c ON c.id = n.content WHERE n.expires <= ? LIMIT ?",
        (now, SWEEP_ROWS),
    )
    expired = [(row[0], content_of(row[1:])) for row in rows.fetchall()]
    for name, row in expired:
        index.unbind(db, row.owner, name, row.id)
    return expired


def _due(db: Session) -> list[str]:
    """Objects to delete now: long dropped, and not known again meanwhile."""
    rows = db.execute(
        "SELECT content FROM dropped WHERE at < clock_timestamp() - make_interval(secs => ?) "
        "AND NOT EXISTS (SELECT 1 FROM contents WHERE id = dropped.content) LIMIT ?",
        (GRACE_SECONDS, SWEEP_ROWS),
    )
    return [id_ for (id_,) in rows.fetchall()]
