"""The index of a tier, in SQLite: names, tenants, sizes, last use; and which blobs are evicted when there is no room.

Room is given back in two steps, so that no lock is held while a blob is written: `reserve` takes the victims out and
counts the new blob, which is invisible until `commit`.

Which blob is evicted (`choose`): the least recently used of the tenant that is furthest above its quota, the new blob
counted; where nobody is above, of the one nearest to it. With the common quota that is the largest user. So a tenant
alone may fill the budget, and a tenant within its quota loses a blob to another only if that one stays within its quota
too (more tenants than quotas fit); else the new blob is refused.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import quote

from headrace.offload.tiers.index_tables import (
    MOST_BYTES,
    BlobEntry,
    StatementLimit,
    Sums,
    as_damage,
    check_rows,
    check_schema,
    entry_of,
    failure,
    only_files,
)

TOUCHES = 4096
"""Uses that are remembered in memory before they are written; they are also written with the next change."""
BATCH = 500
"""Names in one statement; old builds of SQLite allow 999 values."""


NO_QUOTAS: Mapping[bytes, float] = MappingProxyType({})


def put_quota(quotas: dict[bytes, float], tenant: bytes, share: float | None) -> None:
    """Notes a tenant's own quota; None: it has none."""
    if share is None:
        quotas.pop(tenant, None)
    else:
        quotas[tenant] = share


class Reservation(NamedTuple):
    """granted: the blob may be written, and must be committed or cancelled; `victims` are out of the index by now.
    present: it is there already. Neither: it cannot be had, or somebody is writing it."""

    granted: bool
    present: bool
    victims: Sequence[BlobEntry]


REFUSED = Reservation(False, False, ())


def choose(
    use: dict[bytes, int],
    tenant: bytes,
    size: int,
    budget: int,
    quota: int,
    own: Mapping[bytes, int],
    oldest: Callable[[bytes], Iterator[BlobEntry]],
) -> list[BlobEntry] | None:
    """Victims, in order, that make room for `size` bytes more of `tenant`; None if there can be none.

    use: bytes by tenant. quota: a tenant's, in bytes; own: of those that have another. oldest: a tenant's blobs that
    may go, least recently used first; asked once per tenant.
    """
    use = {**use, tenant: use.get(tenant, 0) + size}
    excess = sum(use.values()) - budget
    victims: list[BlobEntry] = []
    if excess <= 0:
        return victims
    queues: dict[bytes, Iterator[BlobEntry]] = {}
    beyond = {one: used - quota for one, used in use.items()}
    beyond.update((one, use[one] - own[one]) for one in own.keys() & use.keys())
    mine = beyond[tenant]
    while excess > 0:
        most = max(beyond.values(), default=0)
        if not beyond or (mine > 0 and most <= 0):
            return None
        giver = tenant if beyond.get(tenant) == most else max(one for one, far in beyond.items() if far == most)
        entry = next(queues.setdefault(giver, oldest(giver)), None)
        if entry is None:
            del beyond[giver]
            continue
        victims.append(entry)
        beyond[giver] -= entry.size
        mine -= entry.size * (giver == tenant)
        excess -= entry.size
    return victims


class Index:
    """Safe to call from several threads, and a file by several processes, which then share the budget.

    path: a file, or ":memory:". quota: share of the budget, 0 to 1; own: of tenants that have another.

    Every method may raise sqlite3.Error and nothing else: for a file that is damaged (SQLite's types are not binding:
    any column may hold anything), of another schema, full, held by another process for longer than timeout_s, or
    without an end to its answer.

    A use seen by `has` is written with the next change, so that `has` only reads; until then other processes do not
    know of it, and kill -9 forgets it.
    """

    def __init__(
        self, path: str, budget_bytes: int, quota: float, timeout_s: float = 1.0, own: Mapping[bytes, float] = NO_QUOTAS
    ) -> None:
        if budget_bytes < 1:
            raise ValueError(f"a tier needs a budget of at least 1 byte, got {budget_bytes}; give it room or leave it")
        if not 0 <= quota <= 1:
            raise ValueError(f"the quota is a share of the budget, between 0 and 1, got {quota}")
        self.budget = budget_bytes
        self._common, self._own = quota, own
        self._timeout = timeout_s
        self._beside = [f"{path}{suffix}" for suffix in ("-journal", "-wal")] if path != ":memory:" else []
        self._lock = threading.Lock()
        self._touched: dict[int, int] = {}
        self._db = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        self._limit = StatementLimit(self._db)
        self._sums = Sums(self._db)
        try:
            with as_damage(), self._limit(bulk=True):
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        # All that a row says can be read from the directory again, so nothing waits for the platter. A write-ahead log
        # would be mapped into memory, and a process whose mapped file somebody cuts short is ended by SIGBUS.
        for setting in ("trusted_schema = OFF", "mmap_size = 0", "journal_mode = TRUNCATE", "synchronous = OFF",
                        "temp_store = MEMORY"):  # fmt: skip
            self._db.execute(f"PRAGMA {setting}").fetchall()
        check_schema(self._db)
        check_rows(self._db)
        self._clock = self._db.execute("SELECT coalesce(max(used), 0) FROM blobs").fetchone()[0]

    @contextmanager
    def _locked(self, bulk: bool = False) -> Iterator[sqlite3.Connection]:
        if not self._lock.acquire(timeout=self._timeout):
            raise failure("the index is in use by another thread", sqlite3.SQLITE_BUSY)
        try:
            with as_damage(), self._limit(bulk):
                only_files(self._beside)
                yield self._db
        finally:
            self._lock.release()

    @contextmanager
    def _changing(self, bulk: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction, which an exception takes back."""
        with self._locked(bulk) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                self._write_touches()
                yield db
                db.execute("COMMIT")
            except BaseException:
                self._sums.forget()
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            self._touched.clear()

    def _write_touches(self) -> None:
        rows = ((used, row) for row, used in self._touched.items())
        self._db.executemany("UPDATE blobs SET used = ? WHERE id = ?", rows)

    def _now(self, uses: int = 1) -> int:
        """First of `uses` times that are later than all before."""
        first = max(time.time_ns(), self._clock + 1)
        self._clock = first + uses - 1
        return first

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Whether each is there. Those are used now, the first of them last: a run loses its end first."""
        with self._locked() as db:
            rows: dict[bytes, int] = {}
            for start in range(0, len(names), BATCH):
                part = names[start : start + BATCH]
                sql = f"SELECT name, id FROM blobs WHERE name IN ({marks(part)}) AND ready"
                rows.update(db.execute(sql, part).fetchall())
            latest = self._now(len(names) + 1) + len(names)
            for place, name in enumerate(names):
                if name in rows:
                    self._touched[rows[name]] = latest - place
            full = len(self._touched) > TOUCHES
        if full:
            with self._changing():
                pass
        return [name in rows for name in names]

    def find(self, names: Sequence[bytes]) -> dict[bytes, BlobEntry]:
        """Entries of those that are there; marks nothing."""
        with self._locked() as db:
            return {entry.name: entry for entry in select(db, names)}

    def entries(self) -> list[BlobEntry]:
        """All that are there."""
        with self._locked(bulk=True) as db:
            return list(map(entry_of, db.execute("SELECT name, tenant, bytes FROM blobs WHERE ready")))

    def reserve(
        self, name: bytes, tenant: bytes, size: int, *, alone: bool = False, within: int | None = None
    ) -> Reservation:
        """Room for a blob. One of that name that is there already is used now. alone: nobody else writes the name, so
        that a reservation of it is what a process that ended left behind. within: bytes that may be used in all, if
        they are fewer than the budget."""
        budget = self.budget if within is None else min(within, self.budget)
        if size > budget:
            return REFUSED
        with self._changing() as db:
            if alone and db.execute("DELETE FROM blobs WHERE name = ? AND NOT ready", (name,)).rowcount:
                self._sums.forget()
            row = db.execute("SELECT id, ready FROM blobs WHERE name = ?", (name,)).fetchone()
            if row is not None:
                if row[1]:
                    db.execute("UPDATE blobs SET used = ? WHERE id = ?", (self._now(), row[0]))
                return Reservation(False, bool(row[1]), ())
            victims = self._victims(tenant, size, budget)
            if victims is None:
                return REFUSED
            self._take_out(victims)
            new = BlobEntry(name, tenant, size)
            self._insert(new, self._now(), ready=False)
            self._sums.add(new, 1)
            return Reservation(True, False, victims)

    def _victims(self, tenant: bytes, size: int, budget: int) -> list[BlobEntry] | None:
        self._sums.look()
        if self._sums.bytes + size <= budget:
            return []
        use = {tenant: size for tenant, (size, _) in self._sums.use.items()}
        own = {tenant: int(share * budget) for tenant, share in self._own.items()}
        return choose(use, tenant, size, budget, int(self._common * budget), own, self._oldest)

    def _take_out(self, entries: Sequence[BlobEntry]) -> None:
        remove(self._db, [entry.name for entry in entries])
        for entry in entries:
            self._sums.add(entry, -1)

    def _oldest(self, tenant: bytes) -> Iterator[BlobEntry]:
        sql = "SELECT name, tenant, bytes FROM blobs WHERE tenant = ? AND ready = 1 ORDER BY used"
        return map(entry_of, self._db.execute(sql, (tenant,)))

    def _insert(self, entry: BlobEntry, used: int, ready: bool) -> None:
        sql = "INSERT INTO blobs (name, tenant, bytes, used, ready) VALUES (?, ?, ?, ?, ?)"
        self._db.execute(sql, (*entry, used, int(ready)))

    def commit(self, entry: BlobEntry) -> None:
        """The blob is there, whatever became of the room that was reserved."""
        with self._changing() as db:
            reserved = db.execute("SELECT name, tenant, bytes FROM blobs WHERE name = ?", (entry.name,)).fetchone()
            if reserved != entry:
                self._sums.forget()
            db.execute("DELETE FROM blobs WHERE name = ?", (entry.name,))
            self._insert(entry, self._now(), ready=True)

    def cancel(self, names: Iterable[bytes]) -> None:
        """Gives back room that was reserved."""
        with self._changing() as db:
            db.executemany("DELETE FROM blobs WHERE name = ? AND NOT ready", [(name,) for name in names])
            self._sums.forget()

    def reserved(self) -> list[bytes]:
        """Names that are being written, or were when their process ended."""
        with self._locked() as db:
            rows = db.execute("SELECT name, tenant, bytes FROM blobs WHERE NOT ready")
            return [entry_of(row).name for row in rows]

    def adopt(self, found: Iterable[tuple[BlobEntry, int]]) -> None:
        """Takes in blobs that lie in the store, each with its last use [ns]; `trim` afterwards."""
        found = list(found)
        with self._changing(bulk=True):
            for entry, used in found:
                self._db.execute("DELETE FROM blobs WHERE name = ?", (entry.name,))
                self._insert(entry, used, ready=True)
            self._sums.forget()

    def trim(self) -> list[BlobEntry]:
        """Takes out and returns what is above the budget."""
        with self._changing(bulk=True):
            victims = self._victims(b"", 0, self.budget) or []
            self._take_out(victims)
            return victims

    def remove(self, names: Sequence[bytes]) -> list[BlobEntry]:
        """Forgets blobs; those that were there."""
        with self._changing() as db:
            gone = list(select(db, names))
            remove(db, [entry.name for entry in gone])
            self._sums.forget()
            return gone

    def usage(self) -> dict[bytes, tuple[int, int]]:
        """Bytes and blobs by tenant, those being written included."""
        with self._locked():
            self._sums.look()
            return dict(self._sums.use)

    def total(self) -> tuple[int, int]:
        """Bytes and blobs of all tenants, those being written included."""
        with self._locked():
            self._sums.look()
            return self._sums.bytes, self._sums.blobs

    def uses(self) -> list[tuple[BlobEntry, int]]:
        """All that are there, each with its last use [ns]."""
        with self._locked(bulk=True) as db:
            rows = db.execute("SELECT name, tenant, bytes, used FROM blobs WHERE ready").fetchall()
            return [(entry_of(row[:3]), int(row[3])) for row in rows]

    def check(self) -> None:
        """Raises AssertionError unless sums agree with blobs and the budget is kept."""
        with self._locked() as db:
            sums = db.execute(
                "SELECT tenant, sum(bytes), count(*) FROM blobs GROUP BY tenant ORDER BY tenant"
            ).fetchall()
            assert sums == db.execute("SELECT * FROM tenants ORDER BY tenant").fetchall(), sums
            self._sums.look()
            assert self._sums.use == {tenant: (size, count) for tenant, size, count in sums}
            assert (self._sums.bytes, self._sums.blobs) == tuple(sum(row[of] for row in sums) for of in (1, 2))
            assert sum(size for _, size, _ in sums) <= self.budget

    def close(self) -> None:
        """Writes the uses. May be called again."""
        try:
            with self._changing():
                pass
        except sqlite3.Error:  # uses may be forgotten
            pass
        finally:
            with self._lock:
                self._db.close()


def stored_bytes(path: Path) -> int:
    """Bytes of all blobs that an index file tells of; 0 if it does not answer at once."""
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0.2)) as db:
            found = db.execute("SELECT total(bytes) FROM tenants").fetchone()[0]
    except sqlite3.Error:
        return 0
    return int(found) if 0 <= found <= MOST_BYTES else 0


def marks(values: Sequence[bytes]) -> str:
    return ",".join("?" * len(values))


def select(db: sqlite3.Connection, names: Sequence[bytes]) -> Iterator[BlobEntry]:
    for start in range(0, len(names), BATCH):
        part = names[start : start + BATCH]
        sql = f"SELECT name, tenant, bytes FROM blobs WHERE name IN ({marks(part)}) AND ready"
        yield from map(entry_of, db.execute(sql, part).fetchall())


def remove(db: sqlite3.Connection, names: Sequence[bytes]) -> None:
    db.executemany("DELETE FROM blobs WHERE name = ? AND ready", [(name,) for name in names])
