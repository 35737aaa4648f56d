"""A directory of blobs and what happens to its files: the answer is right or it is a miss."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.offload.tiers.base import Read
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.files import OpenFiles
from headrace.offload.tiers.notes import ModelNote, read_notes
from tests.support.tier_contract import SIZE, content, get, held, name, put
from tests.support.tier_directory import BUDGET, check, descriptors, drafts, files, make


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "kv"


@pytest.fixture
def tier(root: Path) -> Iterator[DiskTier]:
    tier = make(root)
    yield tier
    tier.close()


# Start and end


def test_found_again(root: Path) -> None:
    first = make(root)
    for number in range(4):
        put(first, number, b"a")
    first.close()
    second = make(root)
    assert all(get(second, number) == content(number) for number in range(4))
    check(second, root)


def test_for_the_owner_alone(tier: DiskTier, root: Path) -> None:
    put(tier, 1)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert {path.name for path in root.iterdir()} >= {"blobs", "tmp", "index.sqlite", "index.sqlite-journal", "lock"}


@pytest.mark.parametrize("below", ["", "kv"])
def test_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"file is not a directory; .*kv_offload_path"):
        DiskTier(tmp_path / "file" / below, BUDGET)


def test_smaller_budget(root: Path) -> None:
    first = make(root)
    for number in range(8):
        put(first, number)
    first.close()
    second = make(root, 3 * SIZE)
    assert held(second, range(8)) == [5, 6, 7]
    check(second, root)


def test_drafts_of_the_dead_are_removed(tier: DiskTier, root: Path) -> None:
    """Those of the living are not, nor is their reservation."""
    (root / "tmp" / name(1).hex()).write_bytes(b"half")
    (root / "tmp" / "note.txt").write_bytes(b"not ours")
    tier._index.reserve(name(1), b"a", SIZE)
    tier._index.reserve(name(2), b"a", SIZE)
    draft = tier._files.draft(name(2))
    assert draft is not None
    other = make(root)
    assert sorted(drafts(root)) == sorted([name(2).hex(), "note.txt"])
    assert other._index.reserved() == [name(2)]
    draft.close()


def test_a_draft_of_the_dead_is_no_hindrance(tier: DiskTier, root: Path) -> None:
    (root / "tmp" / name(1).hex()).write_bytes(b"x" * 2 * SIZE)
    tier._index.reserve(name(1), b"a", SIZE)
    assert put(tier, 1) and get(tier, 1) == content(1)
    check(tier, root)


# Damage of files


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1])
@pytest.mark.parametrize("opened", [False, True])
def test_of_another_size(tier: DiskTier, root: Path, size: int, opened: bool) -> None:
    put(tier, 1), put(tier, 2)
    if opened:
        assert get(tier, 1, 5, offset=SIZE - 5) is not None
    os.truncate(files(root)[name(1)], size)
    if opened and size > SIZE:
        assert get(tier, 1) == content(1), "what was asked for is all there"
        return
    assert get(tier, 1) is None
    stats = tier.stats()
    assert (stats.bad, stats.misses, stats.errors, stats.degraded) == (1, 1, 0, False)
    assert held(tier, [1, 2]) == [2] and name(1) not in files(root)
    assert put(tier, 1) and get(tier, 1) == content(1)
    check(tier, root)


def test_parts_before_the_end_of_a_short_file(tier: DiskTier, root: Path) -> None:
    put(tier, 1)
    assert get(tier, 1, 8) is not None
    os.truncate(files(root)[name(1)], 100)
    into = memoryview(bytearray(SIZE))
    done = tier.read([Read(name(1), at, into[at : at + 64]) for at in range(0, SIZE, 64)])
    assert done == [True] + [False] * 63
    assert into[:64] == content(1)[:64]


def test_deleted(tier: DiskTier, root: Path) -> None:
    put(tier, 1), put(tier, 2)
    os.unlink(files(root)[name(1)])
    assert get(tier, 1) is None and get(tier, 2) == content(2)
    assert held(tier, [1, 2]) == [2]
    assert (tier.stats().misses, tier.stats().bad) == (1, 0)
    check(tier, root)


def test_a_note_comes_back_with_the_index(tier: DiskTier, root: Path) -> None:
    """The directory is emptied while an engine serves: what it stores from there on is named again."""
    note = ModelNote("tiny", "/models/tiny", "bfloat16", "auto", "none", "raw", 1 << 30, "0.1.0")
    tier.keep_note(bytes(32), note)
    put(tier, 1)
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert read_notes(root) == {}
    put(tier, 2)
    assert held(tier, [1, 2]) == [2]
    assert [found for found, _ in read_notes(root).values()] == [note]


def test_deleted_between_runs(root: Path) -> None:
    first = make(root)
    put(first, 1), put(first, 2)
    first.close()
    os.unlink(files(root)[name(1)])
    second = make(root)
    assert held(second, [1, 2]) == [2] and second.stats().used_bytes == SIZE
    check(second, root)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "fan-out"])
def test_something_else_in_its_place(tier: DiskTier, root: Path, kind: str, tmp_path: Path) -> None:
    """A pipe must not stop the reader, a link not lead it out of the directory."""
    put(tier, 1)
    path = files(root)[name(1)]
    path.unlink()
    (tmp_path / "secret").write_bytes(content(1))
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "secret")
    else:
        path.parent.rmdir()
        path.parent.write_bytes(b"")
    assert get(tier, 1) is None and held(tier, [1]) == []
    assert tier.stats().misses == 1
    assert (tmp_path / "secret").read_bytes() == content(1)
    put(tier, 1)
    assert get(tier, 1) in (None, content(1))
    put(tier, 2)
    assert get(tier, 2) == content(2), "others are written meanwhile"


def test_foreign_files_are_left_alone(root: Path) -> None:
    first = make(root)
    put(first, 1)
    first.close()
    mine = files(root)[name(1)]
    foreign = [root / "blobs" / "readme", mine.parent / "readme", mine.parent / f"{mine.name}.bak",
               root / "blobs" / "zz" / mine.name, root / "blobs" / "00" / mine.name]  # fmt: skip
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"foreign")
    (mine.parent / f"{name(2).hex()}-{'0' * 16}").mkdir()
    second = make(root)
    assert second.stats().blobs == 1 and get(second, 1) == content(1)
    assert all(path.read_bytes() == b"foreign" for path in foreign)


def test_files_without_an_entry_are_taken_in(root: Path) -> None:
    """But those that lost their bytes are removed, and of two of one name one."""
    first = make(root)
    put(first, 1, b"a"), put(first, 2, b"a")
    paths = files(root)
    paths[name(1)].with_name(f"{name(1).hex()}-{'0' * 16}").write_bytes(content(1))
    paths[name(3)] = root / "blobs" / name(3).hex()[:2] / f"{name(3).hex()}-{'0' * 16}"
    paths[name(3)].parent.mkdir(exist_ok=True)
    paths[name(3)].write_bytes(b"")
    first._index.remove([name(2)])
    first.close()
    second = make(root)
    assert held(second, [1, 2, 3]) == [1, 2]
    assert get(second, 2) == content(2)
    check(second, root)


@pytest.mark.parametrize("when", [1 << 63, 6 * 10**18, -(10**9)], ids=["2262", "2160", "1969"])
def test_files_of_another_clock_are_taken_in(root: Path, when: int) -> None:
    """As if they were used now, or first of all; the index that is made of them is taken as sound by the next one."""
    first = make(root)
    put(first, 1), put(first, 2)
    os.utime(files(root)[name(1)], ns=(when, when))
    first.close()
    (root / "index.sqlite").unlink()
    for _ in range(2):
        tier = make(root)
        assert held(tier, [1, 2]) == [1, 2] and not tier.stats().degraded
        check(tier, root)
        tier.close()
    assert not (root / "index.damaged").exists()


# Reading


def test_parts_that_follow_each_other_cost_one_call(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 1), put(tier, 2)
    calls = []
    read = os.preadv

    def preadv(fd: int, parts: Sequence[memoryview], offset: int) -> int:
        calls.append((len(parts), offset))
        return read(fd, parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    at = [(1, 0), (1, 64), (1, 128), (1, 256), (2, 320), (2, 384), (1, 448)]
    assert all(tier.read([Read(name(number), offset, memoryview(bytearray(64))) for number, offset in at]))
    assert calls == [(3, 0), (1, 256), (2, 320), (1, 448)]


def test_open_files_are_few(root: Path) -> None:
    tier = make(root)
    tier._open_files = OpenFiles(3)
    for number in range(10):
        put(tier, number)
    for _ in range(2):
        into = [memoryview(bytearray(SIZE)) for _ in range(10)]
        halves = [(number, part) for part in (0, SIZE // 2) for number in range(10)]
        reads = [Read(name(number), part, into[number][part : part + SIZE // 2]) for number, part in halves]
        assert all(tier.read(reads))
        assert [bytes(view) for view in into] == [content(number) for number in range(10)]
    assert len(descriptors(root / "blobs")) == 3
    tier.close()
    assert descriptors(root) == []


def test_nobody_waits_for_a_write(tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread is in the middle of a blob, others ask, read and put; the blob is not seen before its end."""
    put(tier, 1)
    begun, go_on = threading.Event(), threading.Event()
    write = os.writev
    stopped = name(2).hex()

    def writev(fd: int, parts: Sequence[memoryview]) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(stopped):
            begun.set()
            assert go_on.wait(60)
        return write(fd, parts)

    monkeypatch.setattr(os, "writev", writev)
    writer = threading.Thread(target=put, args=(tier, 2))
    writer.start()
    assert begun.wait(60)
    assert put(tier, 3) and get(tier, 1) == content(1) and held(tier, [1, 2, 3]) == [1, 3]
    assert not put(tier, 2), "somebody writes it"
    assert not put(make(root), 2), "in another process too"
    go_on.set()
    writer.join()
    assert held(tier, [1, 2, 3]) == [1, 2, 3] and get(tier, 2) == content(2)
    check(tier, root)


def test_not_seen_before_its_file(tier: DiskTier, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry without a file would be taken for a deleted blob by whoever reads just then."""
    replace, seen = os.replace, []

    def spy(source: Path, target: Path) -> None:
        seen.append((held(tier, [1]), get(tier, 1)))
        replace(source, target)

    monkeypatch.setattr(os, "replace", spy)
    (root / "blobs" / name(1).hex()[:2]).mkdir()
    assert put(tier, 1) and seen == [([], None)]
    check(tier, root)
