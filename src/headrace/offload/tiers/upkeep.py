"""What people do with a directory of blobs beside running servers: see what it holds, remove some, check all.

The index is asked and changed as servers do it (tiers.index); nothing is evicted for a budget here. A blob that a
server reads while it is removed is still read; one that is gone is a miss.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from headrace.offload import frame
from headrace.offload.tiers.base import tokens_of
from headrace.offload.tiers.files import BlobFiles, DamagedFile, OpenFile, tenant_mark
from headrace.offload.tiers.index import BATCH, Index
from headrace.offload.tiers.index_tables import MOST_BYTES, BlobEntry

log = logging.getLogger(__name__)

HEAD = 128
"""Bytes of a blob that say whose it is."""
SETTLED_S = 60.0
"""A file that is younger may be one that a server is just entering into the index."""
TIMEOUT_S = 10.0
UNSALTED = tenant_mark(b"")
"""The tenant of requests without cache_salt."""

Tell = Callable[[int, int], None]
"""Called with how many blobs of how many are done."""


class StoredBlob(NamedTuple):
    """identity: of its header; None if that cannot be read. used_ns: its last use, or when it was written."""

    entry: BlobEntry
    used_ns: int
    identity: bytes | None

    @property
    def tokens(self) -> int:
        """See tokens_of."""
        return tokens_of(self.entry.name)


class Flaw(NamedTuple):
    """Something that is not as it should be. entry: the blob, if it is one."""

    what: str
    entry: BlobEntry | None = None


def holds_kv(root: Path) -> bool:
    """Whether a server has kept KV in this directory."""
    return (root / "blobs").is_dir()


def blobs(root: Path, tell: Tell) -> Iterator[StoredBlob]:
    """All that a directory holds: by its index, or by its files where the index does not answer."""
    files = BlobFiles(root)
    known = _known(files)
    for done, (entry, used) in enumerate(known, 1):
        yield StoredBlob(entry, used, _identity(files, entry))
        tell(done, len(known))


def _known(files: BlobFiles) -> list[tuple[BlobEntry, int]]:
    if files.index.is_file():
        try:
            with closing(_open(files)) as index:
                return index.uses()
        except sqlite3.Error as error:
            log.warning("the index of %s is not used: %s; headrace cache verify --repair mends it", files.root, error)
    return list(files.sized(files.scan()))


def _open(files: BlobFiles) -> Index:
    return Index(str(files.index), MOST_BYTES, 1.0, TIMEOUT_S)


def _identity(files: BlobFiles, entry: BlobEntry) -> bytes | None:
    head = bytearray(HEAD)
    with suppress(OSError, DamagedFile, frame.DamagedBlob):
        files.open(entry).read(0, [memoryview(head)])
        return frame.identity_of(head)
    return None


def remove(root: Path, entries: Sequence[BlobEntry], tell: Tell) -> None:
    """Deletes blobs, and forgets them in the index. Raises OSError where the directory cannot be changed."""
    files = BlobFiles(root)
    for start in range(0, len(entries), BATCH):
        batch = entries[start : start + BATCH]
        for entry in batch:
            files.remove(entry)
        _forget(files, [entry.name for entry in batch])
        tell(start + len(batch), len(entries))


def _forget(files: BlobFiles, names: Sequence[bytes]) -> None:
    """What an index that does not answer still names is a miss for its servers, which forget it then."""
    if files.index.is_file():
        with suppress(sqlite3.Error), closing(_open(files)) as index:
            index.remove(names)


def verify(root: Path, tell: Tell) -> Iterator[Flaw]:
    """Reads every blob; yields what is wrong with each, then what only the index or only the directory has."""
    files = BlobFiles(root)
    if flaw := _index_flaw(files):
        yield flaw
    there = {entry.name: entry for entry, _ in files.sized(files.scan())}
    indexed = {} if flaw else {entry.name: entry for entry, _ in _known(files)}
    damaged = set()
    for done, entry in enumerate(there.values(), 1):
        told = _damage(files, indexed.get(entry.name, entry))
        if told:
            damaged.add(entry.name)
            yield Flaw(f"{files.path(entry).name}: {told}", entry)
        tell(done, len(there))
    if not flaw:
        yield from (flaw for flaw in _strays(files, indexed, there) if flaw.entry and flaw.entry.name not in damaged)


def _index_flaw(files: BlobFiles) -> Flaw | None:
    if not files.index.is_file():
        return Flaw("there is no index")
    try:
        with closing(_open(files)) as index:
            index.uses()
    except sqlite3.Error as error:
        return Flaw(f"the index: {error}")
    return None


def _damage(files: BlobFiles, entry: BlobEntry) -> str:
    """What is wrong with a blob; empty for a sound one, and for one that is gone meanwhile."""
    try:
        file = files.open(entry)
        data = bytearray(file.size)
        got = file.read(0, [memoryview(data)])
        frame.check_blob(memoryview(data)[:got], entry.name)
    except FileNotFoundError:
        return ""
    except (OSError, DamagedFile, frame.DamagedBlob) as error:
        return str(error)
    return ""


def _strays(files: BlobFiles, indexed: dict[bytes, BlobEntry], there: dict[bytes, BlobEntry]) -> Iterator[Flaw]:
    """Entries without a file and files without an entry, as a second look has them too: servers go on meanwhile."""
    with closing(_open(files)) as index:
        now = index.find([*indexed.keys() - there.keys(), *there.keys() - indexed.keys()])
    for name, entry in now.items():
        if name not in there and not _exists(files, entry):
            yield Flaw(f"{files.path(entry).name}: in the index, but there is no file", entry)
    old = time.time_ns() - int(SETTLED_S * 1e9)
    for entry, written in files.sized((name, entry.tenant) for name, entry in there.items() if name not in indexed):
        if entry.name not in now and written < old:
            yield Flaw(f"{files.path(entry).name}: a file that the index lacks", entry)


def _exists(files: BlobFiles, entry: BlobEntry) -> bool:
    with suppress(OSError, DamagedFile):
        OpenFile(files.path(entry), entry.size)
        return True
    return False


def repair(root: Path, flaws: Iterable[Flaw]) -> None:
    """Removes the blobs of these flaws; makes the index anew from the files if it is one of them. Raises OSError, and
    sqlite3.Error."""
    files, found = BlobFiles(root), list(flaws)
    remove(root, [flaw.entry for flaw in found if flaw.entry is not None], lambda done, total: None)
    if any(flaw.entry is None for flaw in found):
        with files.locked(TIMEOUT_S):
            if files.index.exists():
                files.set_index_aside()
            files.prepare()
            with closing(_open(files)) as index:
                index.adopt(files.sized(files.scan()))
