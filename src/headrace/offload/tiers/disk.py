"""A directory as a tier: it survives restarts, kill -9, and what happens to its files (tiers.files, tiers.index).

The files are the truth; the index holds the order of eviction. At the start, and after damage of the index, the
directory is looked through: files that the index lacks are taken in, entries without a file forgotten. Several
processes may use one directory; they share the index and so the budget, and what one evicts is a miss for the others.
"""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.offload import OffloadSettings
from headrace.config.tiers import DiskTierSettings
from headrace.offload.tiers import disk_check
from headrace.offload.tiers.base import BlobFormat, BlobParts, Read, TierStats, flat
from headrace.offload.tiers.files import BlobFiles, DamagedFile, Draft, OpenFile, OpenFiles, identity, tenant_mark
from headrace.offload.tiers.health import Health
from headrace.offload.tiers.index import BlobEntry, Index, put_quota
from headrace.offload.tiers.notes import ModelNote, write_note
from headrace.planner.machine import PieceRate

T = TypeVar("T")

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
SPARE = 1 << 18
"""Bytes of the disk that blobs leave free: the index needs some to say that they make room."""
IN_THE_WAY = {errno.EISDIR, errno.ENOTDIR}
"""Something else has the place of a blob, or of those that begin alike: others can be written."""
PASSING = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT,
}  # fmt: skip
"""Failures of SQLite after which the index is worth being asked again; after others it is made anew."""


class DiskTier:
    """base.Tier in a directory, which is made if need be. Raises ValueError if the path is something else.

    budget_bytes: of the blobs; the index takes some 250 bytes per blob more, and file systems round sizes up.
    timeout_s: longest wait for other processes; a disk that hangs is beyond it.
    After a failure to write nothing is written for retry_s; reads go on.
    """

    kind = "disk"
    in_memory = False
    read_guess = PieceRate(1e-9, 200e-6)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        budget_bytes: int,
        format: BlobFormat = "raw",
        quota: float = 0.25,
        timeout_s: float = 1.0,
        retry_s: float = 10.0,
    ) -> None:
        root = Path(directory).absolute()
        for path in (root, *root.parents):
            if os.path.lexists(path) and not os.path.isdir(path):
                raise ValueError(f"{path} is not a directory; name one, or one to be made, in kv_offload_path")
        self.format: BlobFormat = format
        self._files = BlobFiles(root)
        self._quotas: dict[bytes, float] = {}
        self._settings = (budget_bytes, quota, timeout_s, self._quotas)
        self._timeout = timeout_s
        self._open_files = OpenFiles(descriptors())
        self._health = Health(f"KV on disk, {root}", budget_bytes, retry_s)
        self._opening = threading.Lock()
        self._reopen = False
        self._closed = False
        self._index = Index(":memory:", *self._settings)
        self._index_id: tuple[int, int] | None = None
        self._notes: dict[bytes, ModelNote] = {}
        self._open()

    def keep_note(self, chunks_of: bytes, note: ModelNote) -> None:
        """Says in the directory what an identity stands for; again whenever the index is opened again, since the note
        may be gone with it."""
        self._notes[chunks_of] = note
        write_note(self._files.root, chunks_of, note)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        none = [False] * len(names)
        return none if self._closed else self._ask(lambda index: index.has(names), none)

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        put_quota(self._quotas, tenant_mark(tenant), share)

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        if self._closed:
            return False
        if self.has([name])[0]:
            return True
        views = [flat(part) for part in parts]
        stored = self._may_write() and self._store(BlobEntry(name, tenant_mark(tenant), sum(map(len, views))), views)
        if not stored:
            self._health.count(dropped=1)
        return stored

    def _store(self, entry: BlobEntry, views: list[memoryview]) -> bool:
        index, draft = self._index, None
        try:
            draft = self._files.draft(entry.name)
            return self._write(index, draft, entry, views) if draft else entry.name in index.find([entry.name])
        except OSError as error:
            self._cancel(index, entry)
            self._reopen |= error.errno not in FULL | IN_THE_WAY
            self._health.fail("write", error, pause=error.errno not in IN_THE_WAY)
        except sqlite3.Error as error:
            self._index_failed(index, error)
        finally:
            if draft is not None:
                draft.close()
        return False

    def _within(self, index: Index, size: int) -> int:
        """Bytes that blobs may take together on this disk. Raises OSError if not so many as this one."""
        used, _ = index.total()
        within = used + self._files.free_bytes() - SPARE
        if within < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return within

    def _write(self, index: Index, draft: Draft, entry: BlobEntry, views: list[memoryview]) -> bool:
        room = index.reserve(*entry, alone=True, within=self._within(index, entry.size))
        if room.granted:
            self._delete(room.victims)
            self._health.count(evictions=len(room.victims))
            draft.write(views)
            draft.publish(self._files.path(entry))
            index.commit(entry)
            self._open_files.forget(entry.name)
            self._health.count(writes=1, written_bytes=entry.size)
            self._health.works("write")
        return room.granted or room.present

    def _cancel(self, index: Index, entry: BlobEntry) -> None:
        try:
            index.cancel([entry.name])
        except sqlite3.Error as error:
            self._index_failed(index, error)

    def _delete(self, entries: Iterable[BlobEntry]) -> None:
        for entry in entries:
            self._open_files.forget(entry.name)
            try:
                self._files.remove(entry)
            except OSError as error:
                self._health.fail("delete", error)

    def read(self, reads: Sequence[Read]) -> list[bool]:
        done = [False] * len(reads)
        if not self._closed:
            names = {read.name for read in reads}
            opened = {name: file for name in names if (file := self._open_files.get(name)) is not None}
            entries = self._find(list(names - opened.keys()))
            for start, end in runs(reads):
                name = reads[start].name
                file = opened.get(name) or self._file(name, entries)
                if file is not None:
                    done[start:end] = self._read(file, reads[start:end])
        good = sum(done)
        size = sum(len(read.into) for read, ok in zip(reads, done, strict=True) if ok)
        self._health.count(reads=good, read_bytes=size, misses=len(reads) - good)
        return done

    def _find(self, names: Sequence[bytes]) -> dict[bytes, BlobEntry]:
        nothing: dict[bytes, BlobEntry] = {}
        return self._ask(lambda index: index.find(names), nothing) if names else nothing

    def _file(self, name: bytes, entries: dict[bytes, BlobEntry]) -> OpenFile | None:
        """Opens the blob of an entry, unless it was opened since; takes entries out that are wrong."""
        file = self._open_files.get(name)
        if file is not None or name not in entries:
            return file
        try:
            file = self._files.open(entries[name])
            self._open_files.add(name, file)
            return file
        except (FileNotFoundError, NotADirectoryError):
            self._forget([name])  # deleted, or evicted by another process
        except DamagedFile as error:
            self._damaged(name, error)
        except OSError as error:
            self._health.fail("read", error)
        del entries[name]
        return None

    def _read(self, file: OpenFile, run: Sequence[Read]) -> list[bool]:
        """Parts of one blob that follow each other."""
        start = run[0].offset
        ends = [read.offset + len(read.into) for read in run]
        inside = [read.into for read, end in zip(run, ends, strict=True) if start >= 0 and end <= file.size]
        try:
            end = start + file.read(start, inside)
        except OSError as error:
            self._health.fail("read", error)
            return [False] * len(run)
        if end < start + sum(map(len, inside)):
            self._damaged(run[0].name, DamagedFile(f"ends at {end}, not {file.size}"))
        return [start >= 0 and mine <= end for mine in ends]

    def _damaged(self, name: bytes, error: DamagedFile) -> None:
        self._health.tell("damaged", f"blob {name.hex()}: {error}; taken out")
        self.drop([name])

    def drop(self, names: Sequence[bytes]) -> None:
        if self._closed:
            return
        gone = self._find(names)
        self._health.count(bad=len(gone))
        self._delete(gone.values())  # first: it makes room for the change of the index where there is none
        self._forget(list(gone))

    def _forget(self, names: Sequence[bytes]) -> None:
        nothing: list[BlobEntry] = []
        self._ask(lambda index: index.remove(names), nothing)

    def stats(self) -> TierStats:
        """A copy. Engines ask while they work: here files are closed that others have evicted, or removed."""
        self._open_files.forget_deleted()
        used, blobs = (0, 0) if self._closed else self._ask(Index.total, (0, 0))
        return self._health.stats(self._reopen, used_bytes=used, blobs=blobs)

    def close(self) -> None:
        with self._opening:
            if not self._closed:
                self._closed = True
                self._index.close()
                self._open_files.clear()

    # The index and its failures

    def _ask(self, question: Callable[[Index], T], otherwise: T) -> T:
        index = self._index
        try:
            return question(index)
        except sqlite3.Error as error:
            if self._closed or not self._index_failed(index, error):
                return otherwise
        with suppress(sqlite3.Error):
            return question(self._index)
        return otherwise

    def _index_failed(self, index: Index, error: sqlite3.Error) -> bool:
        """Whether there is another index now. The directory is looked through before anything is written again, which
        sets right what the failure left: room reserved for nothing, a file without an entry."""
        with self._opening:
            if self._closed or self._index is not index:
                return not self._closed
            again = self._health.paused
            replaced = self._index_id is not None and self._index_id != identity(self._files.index)
            self._health.fail("index", error, pause=not replaced)
            if replaced:  # deleted, or mended by others: it will never be itself again, and nothing need be waited for
                self._open()
                return True
            self._reopen = True
            if passing(error):
                return False
            if again:
                self._stand_in()
            else:
                self._open(damaged=error)
            return True

    def _may_write(self) -> bool:
        if self._health.paused:
            return False
        if self._reopen or self._index_id != identity(self._files.index):
            with self._opening:
                if not self._closed and (self._reopen or self._index_id != identity(self._files.index)):
                    if not self._reopen:
                        self._health.tell("replaced", "the index is gone, or another file; it is opened again")
                    self._open()
        return not self._closed and not self._reopen

    def _open(self, damaged: sqlite3.Error | None = None) -> None:
        """Replaces the index by that of the directory, or by one in memory where that cannot be had. damaged: how the
        index failed in use; one that passes the checks of opening and fails again would never be mended."""
        try:
            self._files.prepare()
            with self._files.locked(self._timeout) as alone:
                index = self._open_index(alone, damaged)
                try:
                    if alone:
                        self._reconcile(index)
                    self._check_room(index)
                except BaseException:
                    index.close()
                    raise
        except (OSError, sqlite3.Error) as error:
            self._health.fail("open", error, pause=True)
            self._stand_in()
        else:
            self._index_id = identity(self._files.index)
            self._reopen = False
            self._health.resume()
            self._use(index)
            self._health.works("open")
            for chunks_of, note in list(self._notes.items()):
                write_note(self._files.root, chunks_of, note)

    def _check_room(self, index: Index) -> None:
        used, _ = index.total()
        free = self._files.free_bytes()
        if free < index.budget - used:
            there, wanted = (f"{size / disk_check.GIB:.3g}" for size in (free, index.budget - used))
            remedy = "what was used longest ago makes room once the disk is full; lower kv_offload_disk_size"
            self._health.tell("room", f"{there} GiB are free where {wanted} GiB may be used: {remedy}")

    def _use(self, index: Index) -> None:
        old, self._index = self._index, index
        old.close()

    def _open_index(self, alone: bool, damaged: sqlite3.Error | None) -> Index:
        try:
            if damaged is not None and self._index_id == identity(self._files.index):  # nobody has replaced it
                raise damaged
            return Index(str(self._files.index), *self._settings)
        except sqlite3.DatabaseError as error:
            if not alone or passing(error):
                raise
            self._health.tell("index", f"the index is set aside and made anew from the files: {error}")
        self._files.set_index_aside()
        self._files.prepare()
        return Index(str(self._files.index), *self._settings)

    def _stand_in(self) -> None:
        """An index in memory, so that reads go on where nothing can be written."""
        self._reopen = True
        index = Index(":memory:", *self._settings)
        with suppress(OSError, sqlite3.Error):
            index.adopt(self._files.sized(self._files.scan()))
        self._use(index)

    def _reconcile(self, index: Index) -> None:
        """Makes the index say what the directory holds. Holds the directory's lock, but others may write."""
        index.cancel(set(index.reserved()) - self._files.clean_drafts())
        known = {(entry.name, entry.tenant) for entry in index.entries()}
        there = set(self._files.scan())
        gone = {name for name, _ in known - there}
        index.remove(sorted(gone))
        named = {name for name, _ in known & there}
        new = []
        for entry, used in self._files.sized(there - known):
            if entry.size == 0 or entry.name in named:  # lost its bytes with the power; put by two tenants at once
                self._delete([entry])
            else:
                named.add(entry.name)
                new.append((entry, used))
        index.adopt(new)
        self._delete(index.trim())


def open_tier(own: DiskTierSettings, shared: OffloadSettings) -> DiskTier:
    """Raises ValueError for a path that cannot be a directory."""
    budget = int(own.size * disk_check.GIB)
    return DiskTier(own.place, budget, own.format, shared.tenant_quota, shared.timeout_s)


def findings(own: DiskTierSettings, shared: OffloadSettings, free_memory: int) -> dict[str, Any]:
    return disk_check.check(Path(own.place), own.size)


def descriptors() -> int:
    """Files kept open: a quarter of what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if soft == resource.RLIM_INFINITY else max(16, min(1024, soft // 4))


def passing(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE) & 0xFF in PASSING


def runs(reads: Sequence[Read]) -> Iterator[tuple[int, int]]:
    """[first, end) of reads that follow each other in one blob."""
    first = 0
    for place in range(1, len(reads) + 1):
        before = reads[place - 1]
        follows = place < len(reads) and (reads[place].name, reads[place].offset) == (
            before.name, before.offset + len(before.into)
        )  # fmt: skip
        if not follows:
            yield first, place
            first = place
