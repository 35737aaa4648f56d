"""A tier on disk whose index is lost, or whose disk is full, read-only or gone: reads go on, writes come back."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.files import BlobFiles
from headrace.offload.tiers.index import BlobEntry
from tests.support.tier_contract import SIZE, content, get, held, name, put
from tests.support.tier_directory import BUDGET, check, descriptors, files, make, pause_over


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[DiskTier]:
    tier = make(root)
    yield tier
    tier.close()


def lose(index: Path) -> None:
    for path in index.parent.glob("index.sqlite*"):
        path.unlink()


def garble(index: Path) -> None:
    index.write_bytes(b"garbage" * 2000)


def empty(index: Path) -> None:
    index.write_bytes(b"")


def other_tables(index: Path) -> None:
    index.unlink()
    with sqlite3.connect(index) as db:
        db.execute("CREATE TABLE blobs (recipe TEXT)")
    db.close()


DAMAGES = [lose, garble, empty, other_tables]


@pytest.mark.parametrize("damage", DAMAGES)
def test_index_damaged_between_runs(root: Path, damage: object) -> None:
    """Blobs, tenants and the order of writing are found again from the files."""
    first = make(root)
    put(first, 0, b"a"), put(first, 1, b"a")
    for number in range(2, 8):
        put(first, number, b"b")
    for age, number in enumerate([5, 1, 0, 7, 6, 4, 3, 2]):
        os.utime(files(root)[name(number)], ns=(age, age))
    first.close()
    damage(root / "index.sqlite")  # type: ignore[operator]
    second = make(root, 8 * SIZE)
    assert held(second, []) == [] and second.stats().blobs == 8
    put(second, 8, b"b"), put(second, 9, b"b")
    assert held(second, range(10)) == [0, 1, 2, 3, 4, 6, 8, 9], "the oldest of b went; a kept its quota"
    check(second, root)
    assert not second.stats().degraded


@pytest.mark.parametrize("damage", DAMAGES)
def test_index_damaged_while_it_runs(tier: DiskTier, root: Path, damage: object) -> None:
    for number in range(4):
        put(tier, number)
    assert get(tier, 0) == content(0)
    damage(root / "index.sqlite")  # type: ignore[operator]
    for number in range(4):
        assert get(tier, number) in (None, content(number))
    put(tier, 4)
    tier._health.resume()
    assert put(tier, 5) and get(tier, 5) == content(5)
    assert held(tier, range(4)) == [0, 1, 2, 3]
    assert not tier.stats().degraded
    tier.close()
    again = make(root)
    assert set(held(again, range(6))) >= {0, 1, 2, 3, 5}
    check(again, root)


def test_index_held_by_another(root: Path) -> None:
    """Writing stops after the time-out, for a while; reading does not."""
    tier = make(root, timeout_s=0.05)
    put(tier, 1)
    other = sqlite3.connect(root / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not put(tier, 2)
    assert tier.stats().degraded and "locked" in tier.stats().reason
    assert get(tier, 1) == content(1) and held(tier, [1, 2]) == [1]
    other.execute("ROLLBACK")
    assert not put(tier, 2), "it is left alone for a while"
    pause_over(tier)
    assert put(tier, 2) and get(tier, 2) == content(2)
    assert not tier.stats().degraded
    check(tier, root)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT])
def test_index_fails_once_the_file_is_there(
    tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Between the file and its entry: the blob is found when the directory is looked through again."""

    def commit(entry: BlobEntry) -> None:
        error = sqlite3.OperationalError("not now")
        error.sqlite_errorcode = code
        raise error

    put(tier, 1)
    monkeypatch.setattr(tier._index, "commit", commit)
    assert not put(tier, 2)
    assert held(tier, [1, 2]) in ([1], [1, 2])
    tier._health.resume()
    assert put(tier, 3) and held(tier, [1, 2, 3]) == [1, 2, 3]
    assert get(tier, 2) == content(2)
    check(tier, root)


def test_damaged_index_of_a_directory_held_by_another(root: Path) -> None:
    """Who does not hold the directory does not replace its index: the other may be about to."""
    first = make(root)
    put(first, 1)
    first.close()
    garble(root / "index.sqlite")
    with BlobFiles(root).locked(0.0):
        tier = make(root, timeout_s=0.02)
        assert (root / "index.sqlite").read_bytes().startswith(b"garbage")
        assert get(tier, 1) == content(1) and not put(tier, 2)
    pause_over(tier)
    assert put(tier, 2) and held(tier, [1, 2]) == [1, 2]
    check(tier, root)


def test_directory_held_by_another(root: Path) -> None:
    """Somebody looks through the directory for longer than we wait: we trust the index as it is."""
    make(root).close()
    with BlobFiles(root).locked(0.0) as held_here:
        assert held_here
        tier = make(root, timeout_s=0.02)
        assert put(tier, 1) and get(tier, 1) == content(1)


# Full, read-only, gone


class Disk:
    """os.writev that writes half and then fails, while `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self._write = os.writev
        monkeypatch.setattr(os, "writev", self.writev)

    def writev(self, fd: int, parts: Sequence[memoryview]) -> int:
        if self.error:
            self._write(fd, [parts[0][: len(parts[0]) // 2]])
            raise OSError(self.error, os.strerror(self.error))
        return self._write(fd, [parts[0][:1000]])  # and else writes a part, as it may


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_fails_in_mid_write(
    tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    disk = Disk(monkeypatch)
    put(tier, 1)
    disk.error = code
    caplog.set_level(logging.WARNING)
    assert not put(tier, 2)
    check(tier, root)
    assert not put(tier, 3) and put(tier, 1)
    stats = tier.stats()
    assert (stats.dropped, stats.errors, stats.degraded, stats.blobs) == (2, 1, True, 1)
    assert os.strerror(code) in stats.reason and os.strerror(code) in caplog.text
    assert get(tier, 1) == content(1) and held(tier, [1, 2, 3]) == [1]
    pause_over(tier)
    assert not put(tier, 2)
    assert len(caplog.records) == 1, "once per kind"
    disk.error = 0
    pause_over(tier)
    assert put(tier, 2) and get(tier, 2) == content(2)
    assert (tier.stats().degraded, tier.stats().reason) == (False, "")
    check(tier, root)


def test_what_made_room_in_vain_is_counted(tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    numbers = list(range(BUDGET // SIZE))
    assert all(put(tier, number) for number in numbers)
    disk.error = errno.ENOSPC
    assert not put(tier, "another")
    assert held(tier, numbers) == numbers[1:] and tier.stats().evictions == 1
    check(tier, root)


def test_an_index_that_is_made_anew_is_told(tier: DiskTier, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tier, 1)
    lose(root / "index.sqlite")
    assert put(tier, 2) and get(tier, 1) == content(1)
    assert "the index is gone, or another file" in caplog.text


def test_directory_removed_while_it_runs(tier: DiskTier, root: Path) -> None:
    put(tier, 1), put(tier, 2)
    assert get(tier, 1) == content(1)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    assert get(tier, 1) == content(1), "its file is open"
    assert get(tier, 2) is None
    put(tier, 3)
    tier._health.resume()
    assert put(tier, 4) and get(tier, 4) == content(4)
    check(tier, root)


def replace(index: Path) -> None:
    lose(index)
    garble(index)


@pytest.mark.parametrize("damage", [lose, replace])
def test_an_index_that_is_gone_is_made_anew_whoever_asks_for_blobs(
    tier: DiskTier, root: Path, damage: Callable[[Path], None]
) -> None:
    """Blobs that are gone too are asked for: taking them out of an index that is nobody's file any more fails for good,
    and is no reason to wait before the next write."""
    for number in range(3):
        put(tier, number)
    for path in files(root).values():
        path.unlink()
    damage(root / "index.sqlite")
    for _ in range(3):
        assert [get(tier, number) for number in range(3)] == [None] * 3
    assert put(tier, 7) and get(tier, 7) == content(7)
    assert not tier.stats().degraded and tier.stats().blobs == 1
    check(tier, root)


def test_a_file_in_place_of_the_directory_while_it_runs(tier: DiskTier, root: Path) -> None:
    """Every call has its answer: nothing is there, but for files that are open."""
    put(tier, 1), put(tier, 2)
    assert get(tier, 1) == content(1)
    root.rename(root.with_name("elsewhere"))
    root.write_text("another's")
    assert held(tier, [1, 2]) == [] and get(tier, 1) == content(1) and get(tier, 2) is None
    assert not put(tier, 3) and tier.stats().degraded
    tier.drop([name(1)])
    pause_over(tier)
    assert not put(tier, 3) and root.read_text() == "another's"
    root.unlink()
    pause_over(tier)
    assert put(tier, 4) and get(tier, 4) == content(4)
    check(tier, root)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EACCES, errno.EIO])
def test_the_directory_cannot_be_looked_into(
    tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """For a while, as with a file server that went away."""
    put(tier, 1)
    look = os.lstat

    def lstat(path: str) -> os.stat_result:
        if str(path).startswith(str(root)):
            raise OSError(code, os.strerror(code), path)
        return look(path)

    with monkeypatch.context() as gone:
        gone.setattr(os, "lstat", lstat)
        assert held(tier, [1]) == [] and not put(tier, 2) and get(tier, 1) is None
        stats = tier.stats()
        assert stats.degraded and os.strerror(code) in stats.reason
    pause_over(tier)
    assert put(tier, 2) and held(tier, [1, 2]) == [1, 2] and get(tier, 1) == content(1)
    check(tier, root)


def test_a_draft_that_cannot_be_locked_is_closed(tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 1)
    before = descriptors(root)

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as without:
        without.setattr("fcntl.flock", flock)
        assert not put(tier, 2)
        assert descriptors(root) == before
    pause_over(tier)
    assert put(tier, 2)
    check(tier, root)


def unlike(index: Path) -> None:
    """Values that no query of ours expects; sound for SQLite."""
    with sqlite3.connect(index) as db:
        db.execute(
            "UPDATE blobs SET name = CAST(X'FFFE' AS TEXT), bytes = -1, ready = 7, used = 9223372036854775807 "
            "WHERE id = 2"
        )
    db.close()


def flip(index: Path) -> None:
    """A page of text that is none: what raises UnicodeDecodeError."""
    index.write_bytes(index.read_bytes().replace(b"CREATE", b"\xff\xfeEATE"))


@pytest.mark.parametrize("damage", [unlike, flip])
def test_an_index_that_python_stumbles_over_is_made_anew(root: Path, damage: Callable[[Path], None]) -> None:
    first = make(root)
    for number in range(4):
        put(first, number)
    first.close()
    damage(root / "index.sqlite")
    tier = make(root)
    assert held(tier, range(5)) == [0, 1, 2, 3] and get(tier, 2) == content(2)
    assert put(tier, 4) and not tier.stats().degraded
    check(tier, root)
    assert (root / "index.damaged").is_file(), "kept for whoever wants to know why"
    tier.close()


def test_values_that_python_stumbles_over_while_it_runs(tier: DiskTier, root: Path) -> None:
    for number in range(4):
        put(tier, number)
    with sqlite3.connect(root / "index.sqlite") as db:
        db.execute("UPDATE blobs SET tenant = 'x', bytes = 'many'")
        db.execute("UPDATE tenants SET tenant = 7, bytes = 1e308")
    db.close()
    assert tier.stats().used_bytes >= 0
    assert held(tier, range(4)) == [0, 1, 2, 3] and get(tier, 1) == content(1)
    tier._health.resume()
    assert put(tier, 5) and get(tier, 5) == content(5)
    check(tier, root)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_something_else_in_place_of_the_index(root: Path, tmp_path: Path, suffix: str, kind: str) -> None:
    """A pipe would hold up the start for ever; a link would have another file written."""
    first = make(root)
    put(first, 1)
    first.close()
    path, other = root / f"index.sqlite{suffix}", tmp_path / "other"
    path.unlink(missing_ok=True)
    other.write_bytes(b"not ours")
    {"pipe": os.mkfifo, "link": lambda at: os.symlink(other, at), "folder": os.mkdir}[kind](path)
    tier = make(root)
    assert get(tier, 1) == content(1) and put(tier, 2) and not tier.stats().degraded
    check(tier, root)
    tier.close()
    assert other.read_bytes() == b"not ours"


def test_a_pipe_in_place_of_the_lock(root: Path) -> None:
    first = make(root)
    put(first, 1)
    first.close()
    (root / "lock").unlink()
    os.mkfifo(root / "lock")
    tier = make(root)
    assert get(tier, 1) == content(1) and "not a regular file" in tier.stats().reason
    tier.close()


def test_a_pipe_in_place_of_the_journal_while_it_runs(tier: DiskTier, root: Path) -> None:
    put(tier, 1)
    (root / "index.sqlite-journal").unlink()
    os.mkfifo(root / "index.sqlite-journal")
    assert held(tier, [1, 2]) == [1] and get(tier, 1) == content(1)
    tier._health.resume()
    assert put(tier, 2) and get(tier, 2) == content(2)
    check(tier, root)
