"""The index of the tensor store: receives a connection and rows, hands on which name means which content.

`contents` are tensor files; `names` point to them, one owner's apart from another's; `keeps` are the jobs
that need them besides. A content that nothing points to has no row, and start-up deletes its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from service.session import Session

SCHEMA = """
CREATE TABLE IF NOT EXISTS contents (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, etag TEXT NOT NULL, dtype TEXT NOT NULL,
    shape TEXT NOT NULL, nbytes INTEGER NOT NULL, whole INTEGER NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS names (
    owner TEXT NOT NULL, name TEXT NOT NULL, content TEXT NOT NULL REFERENCES contents (id),
    created REAL NOT NULL, expires REAL, PRIMARY KEY (owner, name)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS names_content ON names (content);
CREATE TABLE IF NOT EXISTS keeps (
    keeper TEXT NOT NULL, content TEXT NOT NULL REFERENCES contents (id), PRIMARY KEY (keeper, content)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS keeps_content ON keeps (content);
"""


@dataclass(frozen=True, slots=True)
class ContentRow:
    """A content, made under `name`. `whole`: its file was written; else it is in memory alone."""

    id: str
    owner: str
    name: str
    etag: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class NameRow:
    """What a name means. Times are seconds of the epoch."""

    owner: str
    name: str
    content: str
    created: float
    expires: float | None


#: The columns of a content, as `content_of` takes them.
CONTENT = "id, owner, name, etag, dtype, shape, nbytes, whole"


def content_of(row: Sequence[Any]) -> ContentRow:
    """A row of `contents`."""
    id_, owner, name, etag, dtype, shape, nbytes, whole = row
    return ContentRow(id_, owner, name, etag, dtype, tuple(json.loads(shape)), nbytes, bool(whole))


def prepare(db: Session) -> None:
    """Make the tables."""
    for statement in SCHEMA.split(";"):
        db.execute(statement)


def load(db: Session) -> tuple[list[ContentRow], list[NameRow], list[tuple[str, str]]]:
    """Everything: contents, names, and (keeper, content) pairs."""
    contents = [content_of(row) for row in db.execute(f"SELECT {CONTENT} FROM contents")]
    names = [NameRow(*row) for row in db.execute("SELECT owner, name, content, created, expires FROM names")]
    keeps = list(db.execute("SELECT keeper, content FROM keeps"))
    return contents, names, keeps


def add(db: Session, row: ContentRow) -> None:
    """Make the content known; again is no harm."""
    db.execute(
        f"INSERT INTO contents ({CONTENT}) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
        "whole = CASE WHEN excluded.whole = 1 THEN 1 ELSE contents.whole END",
        (row.id, row.owner, row.name, row.etag, row.dtype, json.dumps(row.shape), row.nbytes, int(row.whole)),
    )


def bind(db: Session, row: NameRow) -> None:
    """Let the name mean this content from now on; what it meant before goes if nothing else needs it."""
    before = db.execute(
        "SELECT content FROM names WHERE owner = ? AND name = ?", (row.owner, row.name)
    ).fetchone()
    db.execute(
        "INSERT INTO names VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner, name) DO UPDATE SET "
        "content = excluded.content, created = excluded.created, expires = excluded.expires",
        (row.owner, row.name, row.content, row.created, row.expires),
    )
    if before is not None:
        drop_unneeded(db, before)


def unbind(db: Session, owner: str, name: str, content: str) -> None:
    """Forget the name, if it still means this content."""
    db.execute("DELETE FROM names WHERE owner = ? AND name = ? AND content = ?", (owner, name, content))
    drop_unneeded(db, [content])


def keep(db: Session, keeper: str, rows: Iterable[ContentRow]) -> None:
    """Let `keeper` need these contents, known or not."""
    for row in rows:
        add(db, row)
        db.execute("INSERT INTO keeps VALUES (?, ?) ON CONFLICT DO NOTHING", (keeper, row.id))


def unkeep(db: Session, keeper: str, contents: Iterable[str]) -> None:
    """Let `keeper` no longer need these contents."""
    contents = list(contents)
    db.executemany("DELETE FROM keeps WHERE keeper = ? AND content = ?", [(keeper, id_) for id_ in contents])
    drop_unneeded(db, contents)


def written(db: Session, content: str) -> None:
    """The content's file is there now."""
    db.execute("UPDATE contents SET whole = 1 WHERE id = ?", (content,))


def settle(db: Session, whole: Iterable[str]) -> None:
    """Exactly these contents have a file: names of others answer that they were lost."""
    db.execute("CREATE TEMP TABLE found (id TEXT PRIMARY KEY)")
    db.executemany("INSERT INTO found VALUES (?)", [(id_,) for id_ in whole])
    found = "id IN (SELECT id FROM found)"
    db.execute(f"UPDATE contents SET whole = {found} WHERE whole <> {found}")
    db.execute("DROP TABLE found")


def drop_unneeded(db: Session, contents: Iterable[str]) -> None:
    """Delete the rows of those contents that no name and no keeper points to."""
    db.executemany(
        "DELETE FROM contents WHERE id = ? AND NOT EXISTS (SELECT 1 FROM names WHERE content = contents.id) "
        "AND NOT EXISTS (SELECT 1 FROM keeps WHERE content = contents.id)",
        [(id_,) for id_ in contents],
    )
