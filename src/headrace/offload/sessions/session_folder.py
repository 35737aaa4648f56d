"""Where the files of sessions lie: a folder for each tenant, mode 0700, files 0600, with bounds for all and for each.

    DIR / digest of the tenant / NAME.safetensors
                               / .NAME.NUMBER.part      being written; locked by whoever writes it

A file is written under another name and renamed once all of it is on the disk. What a process that was killed has left
is removed by the next one that writes a session, be it of another tenant.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.files import open_own
from headrace.offload.sessions.names import FULL, NAME, check_name, missing
from headrace.offload.sessions.session_file import SessionReader
from headrace.types import InvalidRequest

SUFFIX, PART = ".safetensors", ".part"
BUFFER = 1 << 20


class StoredSession(NamedTuple):
    """A file. size: bytes; saved_s: seconds since 1970."""

    name: str
    size: int
    saved_s: float


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """most_bytes: of all tenants together; most_tenant_bytes, most_sessions: of each one.

    Methods raise InvalidRequest, naming the parameter, for what cannot be, and OSError for what the disk refuses.
    """

    root: Path
    most_bytes: int
    most_tenant_bytes: int
    most_sessions: int

    def of(self, tenant: str) -> Path:
        """The tenant's folder, be it there or not."""
        return self.root / hashlib.sha256(f"headrace tenant {tenant}".encode()).hexdigest()[:32]

    def path(self, tenant: str, name: str) -> Path:
        check_name(name)
        return self.of(tenant) / (name + SUFFIX)

    def listed(self, tenant: str) -> list[StoredSession]:
        """By name."""
        return sorted(_sessions(self.of(tenant)))

    def open(self, tenant: str, name: str) -> SessionReader:
        """Raises BadSession for a file that is none of a session."""
        path = self.path(tenant, name)
        try:
            return SessionReader(os.fdopen(open_own(_plain(path.parent) / path.name), "rb", buffering=0))
        except FileNotFoundError:
            raise missing(name) from None

    def delete(self, tenant: str, name: str) -> None:
        path = self.path(tenant, name)
        try:
            (_plain(path.parent) / path.name).unlink()
        except FileNotFoundError:
            raise missing(name) from None

    @contextmanager
    def writing(self, tenant: str, name: str, size: int) -> Iterator[BinaryIO]:
        """A file of `size` bytes that takes its name, in place of one that has it, when all of it is written; if
        anything is raised meanwhile nothing is left of it."""
        path = self.path(tenant, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _plain(path.parent)
        for folder in self._folders():
            _remove_left(folder)
        self._check_room(tenant, name, size)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PART}")
        try:
            with os.fdopen(_locked(part), "wb", buffering=BUFFER) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
        _sync(path.parent)

    def _folders(self) -> list[Path]:
        """Of all tenants that have saved something."""
        return [entry for entry in self.root.iterdir() if entry.is_dir() and not entry.is_symlink()]

    def _check_room(self, tenant: str, name: str, size: int) -> None:
        """Raises InvalidRequest where a session more, of so many bytes, is more than there may be."""
        own = [each for each in _sessions(self.of(tenant)) if each.name != name]
        if len(own) >= self.most_sessions:
            told = f"{len(own):,} sessions are saved, and no more may be (sessions_per_tenant); delete one"
            raise InvalidRequest(told, "name", FULL)
        used = sum(each.size for each in own)
        if used + size > self.most_tenant_bytes:
            told = f"sessions_tenant_share allows {self.most_tenant_bytes:,} bytes"
            raise InvalidRequest(
                f"this one has {size:,} bytes, the others {used:,}, and {told}; delete one", None, FULL
            )
        others = sum(each.size for folder in self._folders() if folder != self.of(tenant) for each in _sessions(folder))
        if others + used + size > self.most_bytes:
            told = f"no room for {size:,} bytes among the sessions of all (sessions_size); delete one"
            raise InvalidRequest(told, None, FULL)


def make_folder(root: Path | None) -> None:
    """Makes the directory of all sessions, if one is asked for. Raises ValueError where it cannot be written to."""
    if root is None:
        return
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(13, "nothing may be written there")
    except OSError as error:
        raise ValueError(f"sessions_dir {str(root)!r}: {error.strerror}; name another directory") from None


def _sessions(folder: Path) -> list[StoredSession]:
    with suppress(FileNotFoundError):
        entries = list(os.scandir(_plain(folder)))
        named = [(entry.name.removesuffix(SUFFIX), entry) for entry in entries if entry.name.endswith(SUFFIX)]
        found = [(name, entry.stat(follow_symlinks=False)) for name, entry in named if NAME.fullmatch(name)]
        return [StoredSession(name, it.st_size, it.st_mtime) for name, it in found if stat.S_ISREG(it.st_mode)]
    return []


def _plain(folder: Path) -> Path:
    """Raises NotADirectoryError for a link in the folder's place."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(20, "is no directory, or a link to one, which is not followed here", str(folder))
    return folder


def _locked(part: Path) -> int:
    """A new file. One that another engine took for left, before it was locked, is made again."""
    while True:
        descriptor = open_own(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _remove_left(folder: Path) -> None:
    """Files that nobody writes any more."""
    for part in folder.glob(f".*{PART}"):
        with suppress(OSError):
            descriptor = open_own(part)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
