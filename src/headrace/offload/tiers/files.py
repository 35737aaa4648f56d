"""A directory of blobs: one file each, which appears whole under its name or not at all.

    blobs/3f/3f..6b-TENANT   a blob: its name in hex, and 16 hex digits that stand for the tenant
    tmp/3f..6b               a blob being written; its writer holds a lock (flock) on it, which ends with the process
    index.sqlite             what there is, by last use; made again from the names above if lost (offload.tiers.disk)
    index.damaged            the last index that was found damaged, kept for inspection
    lock                     held while a process looks through the directory at its start

Nothing is flushed to the platter: kill -9 loses nothing that has its name; after a power loss a file may be short,
which its size in the index tells, or hold zeros, which the checksums of the blob tell.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from headrace.files import open_own
from headrace.offload.tiers.index import BlobEntry

VECTORS = 1024
"""Buffers that one call to the system takes (IOV_MAX on Linux)."""
LOOK_S = 1.0
"""Between two looks at whether open files are deleted, which takes a millisecond for a thousand."""
FORMAT_AT = 18
"""Where an SQLite file says how it is written and read, in two bytes: 2 is by a write-ahead log, which is mapped."""
BLOB = re.compile(r"((?:[0-9a-f]{2})+)-([0-9a-f]{16})")
DRAFT = re.compile(r"(?:[0-9a-f]{2})+")


def tenant_mark(tenant: bytes) -> bytes:
    """8 bytes that stand for a tenant in file names and in the index."""
    return blake2b(tenant, digest_size=8).digest()


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another that took its place."""
    with suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


class Draft:
    """A file that is invisible before `publish`; unless published, it is removed by `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self.published = False

    def write(self, parts: Sequence[memoryview]) -> None:
        """May raise OSError in the middle."""
        left = [part for part in parts if part]
        while left:
            left = rest(left, os.writev(self._fd, left[:VECTORS]))

    def publish(self, path: Path) -> None:
        try:
            os.replace(self._path, path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(self._path, path)
        self.published = True

    def close(self) -> None:
        if not self.published:
            with suppress(OSError):
                os.unlink(self._path)
        os.close(self._fd)


class BlobFiles:
    """The files below `root`. Methods raise OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / "index.sqlite"
        self.damaged = root / "index.damaged"
        self._blobs = root / "blobs"
        self._drafts = root / "tmp"

    def prepare(self) -> None:
        """Makes what is missing, for the owner alone; raises if nothing can be written here."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._blobs, self._drafts):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._only_files()
        index = open_own(self.index, os.O_RDWR | os.O_CREAT)
        mapped = 2 in os.pread(index, 2, FORMAT_AT)
        os.close(index)
        if mapped:
            self.set_index_aside()
            os.close(open_own(self.index, os.O_RDWR | os.O_CREAT))

    def _only_files(self) -> None:
        """SQLite would follow a link in place of its files, and wait for a pipe."""
        for path in self._index_files():
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    os.replace(path, self.damaged)

    def _index_files(self) -> list[str]:
        return [f"{self.index}{suffix}" for suffix in ("", "-wal", "-shm", "-journal")]

    def path(self, entry: BlobEntry) -> Path:
        name = entry.name.hex()
        return Path(f"{self._blobs}/{name[:2]}/{name}-{entry.tenant.hex()}")

    def free_bytes(self) -> int:
        """Of the disk, for who has no special rights."""
        disk = os.statvfs(self.root)
        return disk.f_bavail * disk.f_frsize

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """Holds the directory's lock; False if others have it for longer than that."""
        fd = open_own(self.root / "lock", os.O_RDWR | os.O_CREAT)
        try:
            end = time.monotonic() + timeout_s
            while not (held := try_lock(fd)) and time.monotonic() < end:
                time.sleep(0.005)
            yield held
        finally:
            os.close(fd)

    def draft(self, name: bytes) -> Draft | None:
        """None while another thread or process writes that blob."""
        path = self._drafts / name.hex()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            ours = try_lock(fd) and same_file(fd, path)
        except OSError:
            os.close(fd)
            raise
        if not ours:
            os.close(fd)
            return None
        draft = Draft(path, fd)
        try:
            os.ftruncate(fd, 0)  # of a process that ended
        except OSError:
            draft.close()
            raise
        return draft

    def clean_drafts(self) -> set[bytes]:
        """Removes those of processes that ended; names of the others."""
        alive = set()
        for file in os.scandir(self._drafts):
            if not (DRAFT.fullmatch(file.name) and file.is_file(follow_symlinks=False)):
                continue
            name = bytes.fromhex(file.name)
            draft = self.draft(name)
            if draft is None:
                alive.add(name)
            else:
                draft.close()
        return alive

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Name and tenant of every blob. Files of other names, and what is no file, are left alone."""
        for folder in os.scandir(self._blobs):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(folder.path):
                match = BLOB.fullmatch(file.name)
                if match and match[1].startswith(folder.name) and file.is_file(follow_symlinks=False):
                    yield bytes.fromhex(match[1]), bytes.fromhex(match[2])

    def sized(self, blobs: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[BlobEntry, int]]:
        """Those that are there yet, each with when it was written [ns]: by now, whatever clock its file has seen."""
        now = time.time_ns()
        for name, tenant in blobs:
            with suppress(FileNotFoundError):
                found = os.stat(self.path(BlobEntry(name, tenant, 0)), follow_symlinks=False)
                yield BlobEntry(name, tenant, found.st_size), min(max(0, found.st_mtime_ns), now)

    def open(self, entry: BlobEntry) -> OpenFile:
        return OpenFile(self.path(entry), entry.size)

    def set_index_aside(self) -> None:
        os.replace(self.index, self.damaged)
        for path in self._index_files()[1:]:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def remove(self, entry: BlobEntry) -> None:
        """Also where it is gone already."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(entry))


class DamagedFile(Exception):
    """A file is not what its entry says."""


class OpenFile:
    """A blob open for reading, until the last reference goes."""

    def __init__(self, path: Path, size: int) -> None:
        # Not blocking: something that is no file, a pipe say, must not stop us.
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedFile("a symbolic link") if error.errno == errno.ELOOP else error from None
        self.size = size
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedFile("not a file")
        if found.st_size != size:
            raise DamagedFile(f"{found.st_size} bytes, not {size}")

    @property
    def deleted(self) -> bool:
        """Whether its room on the disk is free once it is closed."""
        with suppress(OSError):
            return os.fstat(self._fd).st_nlink == 0
        return True

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fills the parts from `offset` on; bytes read, fewer than asked for only where the file ends."""
        left = [part for part in parts if part]
        done = 0
        while left:
            got = os.preadv(self._fd, left[:VECTORS], offset + done)
            if got == 0:
                break
            done += got
            left = rest(left, got)
        return done


class OpenFiles:
    """The files that were read last, at most `limit`, kept open. Who has one may use it after it left the cache."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._files: OrderedDict[bytes, OpenFile] = OrderedDict()
        self._look_s = 0.0

    def forget_deleted(self) -> None:
        """Closes those that others have deleted; looks every LOOK_S."""
        now = time.monotonic()
        with self._lock:
            if now >= self._look_s:
                self._look_s = now + LOOK_S
                for name in [name for name, file in self._files.items() if file.deleted]:
                    del self._files[name]

    def get(self, name: bytes) -> OpenFile | None:
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
            return self._files.get(name)

    def add(self, name: bytes, file: OpenFile) -> None:
        with self._lock:
            self._files[name] = file
            while len(self._files) > self._limit:
                self._files.popitem(last=False)

    def forget(self, name: bytes) -> None:
        with self._lock:
            self._files.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()


def rest(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after so many bytes."""
    for place, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[place + 1 :]]
        done -= len(part)
    return []


def try_lock(fd: int) -> bool:
    """Whether the file is ours alone now, until fd is closed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same_file(fd: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    return False
