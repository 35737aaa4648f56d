"""What the index of a tier must look like: tables, types and ranges. A file that does not is damaged or not ours.

SQLite's types are not binding: any column of a file that somebody has changed may hold anything, and a file may bring
triggers and views of its own. So an index is checked as a whole when it is opened, and each row where it enters Python.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from headrace.logs import shown

VERSION = 1
LATEST_NS = 1 << 62
"""No use is later (in the year 2116): there must be room for later ones."""
MOST_BYTES = 1 << 62
"""Of all blobs together."""
BULK_S = 30.0
"""So long may each step of opening take that goes through all rows; a million sound ones take some seconds."""
ANSWER_S = 5.0
"""So long may a question take while serving: a trigger that somebody adds meanwhile may have no end."""

TABLES = f"""
CREATE TABLE IF NOT EXISTS blobs (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL UNIQUE, tenant BLOB NOT NULL, bytes INTEGER NOT NULL,
    used INTEGER NOT NULL, ready INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS blobs_by_use ON blobs (tenant, ready, used);
CREATE TABLE IF NOT EXISTS tenants (tenant BLOB PRIMARY KEY, bytes INTEGER NOT NULL, blobs INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON blobs BEGIN
    INSERT OR IGNORE INTO tenants VALUES (new.tenant, 0, 0);
    UPDATE tenants SET bytes = bytes + new.bytes, blobs = blobs + 1 WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON blobs BEGIN
    UPDATE tenants SET bytes = bytes - old.bytes, blobs = blobs - 1 WHERE tenant = old.tenant;
    DELETE FROM tenants WHERE tenant = old.tenant AND blobs = 0;
END;
PRAGMA user_version = {VERSION};
"""
"""used: nanoseconds, no two alike in one process. ready: 0 while the blob is being written. tenants: sums of blobs."""

WRONG = {
    "a blob's row has values of a wrong type or out of range": f"""
        SELECT 1 FROM blobs WHERE typeof(id) <> 'integer' OR typeof(name) <> 'blob' OR length(name) = 0
        OR typeof(tenant) <> 'blob' OR typeof(bytes) <> 'integer' OR bytes NOT BETWEEN 0 AND {MOST_BYTES}
        OR typeof(used) <> 'integer' OR used NOT BETWEEN 0 AND {LATEST_NS}
        OR typeof(ready) <> 'integer' OR ready NOT IN (0, 1) LIMIT 1""",
    "the tenants' sums are not those of their blobs": """
        SELECT * FROM (SELECT tenant, sum(bytes), count(*) FROM blobs GROUP BY tenant EXCEPT SELECT * FROM tenants)
        UNION ALL
        SELECT * FROM (SELECT * FROM tenants EXCEPT SELECT tenant, sum(bytes), count(*) FROM blobs GROUP BY tenant)""",
    "its blobs are larger than any disk": f"SELECT 1 WHERE (SELECT total(bytes) FROM blobs) > {MOST_BYTES}",
}
"""What is wrong with an index -> a query that has a row then."""


class BlobEntry(NamedTuple):
    """A blob: its size in bytes and whose it is."""

    name: bytes
    tenant: bytes
    size: int


def check_schema(db: sqlite3.Connection) -> None:
    """Makes the tables of a new file. Raises sqlite3.DatabaseError for any but ours, before a trigger could run."""
    db.execute("BEGIN")  # version and tables at the same moment: another process may be making them
    version, found = db.execute("PRAGMA user_version").fetchone()[0], schema(db)
    db.execute("COMMIT")
    if version not in (0, VERSION):
        raise sqlite3.DatabaseError(f"the index has version {version}, not {VERSION}")
    if (version == VERSION and found != SCHEMA) or (version == 0 and found):
        raise sqlite3.DatabaseError("the index has other tables than ours")
    if version == 0:
        db.executescript(f"BEGIN IMMEDIATE; {TABLES} COMMIT;")


def check_rows(db: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError for what is damaged."""
    found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(f"the index is damaged: {shown(found)}")
    for what, query in WRONG.items():
        if db.execute(query).fetchone() is not None:
            raise sqlite3.DatabaseError(f"the index is damaged: {what}")


class StatementLimit:
    """Ends statements of a connection that take too long: `with limit(bulk): ...` raises sqlite3.DatabaseError."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._end = float("inf")
        db.set_progress_handler(lambda: time.monotonic() > self._end, 100_000)

    @contextmanager
    def __call__(self, bulk: bool) -> Iterator[None]:
        seconds = BULK_S if bulk else ANSWER_S
        self._end = time.monotonic() + seconds
        try:
            yield
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise sqlite3.DatabaseError(f"the index did not answer within {seconds:g} s") from error
            raise
        finally:
            self._end = float("inf")


@contextmanager
def as_damage() -> Iterator[None]:
    """Rows of a damaged file have values that Python stumbles over in its own ways."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise sqlite3.DatabaseError(f"the index is damaged: {shown(error)}") from error


def only_files(paths: Sequence[str]) -> None:
    """Raises sqlite3.DatabaseError for a pipe in place of a journal, say, which SQLite would wait for at each query,
    and as SQLite does where the directory cannot be looked into any more."""
    for path in paths:
        try:
            regular = stat.S_ISREG(os.lstat(path).st_mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise failure(str(error), sqlite3.SQLITE_CANTOPEN) from error
        if not regular:
            raise sqlite3.DatabaseError(f"{path} is not a regular file")


def failure(told: str, code: int) -> sqlite3.OperationalError:
    """As SQLite's own with that code."""
    error = sqlite3.OperationalError(told)
    error.sqlite_errorcode = code
    return error


def entry_of(row: tuple[Any, ...]) -> BlobEntry:
    """Raises sqlite3.DatabaseError for a row that no entry of ours can have."""
    name, tenant, size = row
    if not (isinstance(name, bytes) and name and isinstance(tenant, bytes) and is_size(size)):
        raise sqlite3.DatabaseError("the index is damaged: a blob's row has values of a wrong type or out of range")
    return BlobEntry(name, tenant, size)


def use_of(db: sqlite3.Connection) -> dict[bytes, tuple[int, int]]:
    """Bytes and blobs by tenant. Raises sqlite3.DatabaseError for sums that none can have."""
    use = {tenant: (size, blobs) for tenant, size, blobs in db.execute("SELECT * FROM tenants")}
    if not all(isinstance(tenant, bytes) and is_size(size) and is_size(blobs) for tenant, (size, blobs) in use.items()):
        raise sqlite3.DatabaseError("the index is damaged: a tenant's row has values of a wrong type or out of range")
    return use


class Sums:
    """Bytes and blobs by tenant (`use`) and of all, as the table of tenants has them. There may be as many tenants as
    blobs, so the table is read only after somebody else has changed it: `add` follows the changes of this connection,
    `forget` those that it does not follow."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.use: dict[bytes, tuple[int, int]] = {}
        self.bytes = self.blobs = 0
        self._db = db
        self._version: int | None = None

    def look(self) -> None:
        """Raises sqlite3.DatabaseError as use_of does."""
        version: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version != self._version:
            self.use, self._version = use_of(self._db), version
            self.bytes, self.blobs = (sum(each[of] for each in self.use.values()) for of in (0, 1))

    def add(self, entry: BlobEntry, blobs: int) -> None:
        """The entry has come (1) or gone (-1)."""
        size, count = self.use.pop(entry.tenant, (0, 0))
        if count + blobs:
            self.use[entry.tenant] = size + blobs * entry.size, count + blobs
        self.bytes += blobs * entry.size
        self.blobs += blobs

    def forget(self) -> None:
        self._version = None


def is_size(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= MOST_BYTES


def schema(db: sqlite3.Connection) -> tuple[tuple[str, ...], ...]:
    """Tables, indices and triggers, as they were declared."""
    rows = db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master ORDER BY type, name")
    return tuple(rows.fetchall())


def _own_schema() -> tuple[tuple[str, ...], ...]:
    db = sqlite3.connect(":memory:")
    db.executescript(TABLES)
    found = schema(db)
    db.close()
    return found


SCHEMA = _own_schema()
