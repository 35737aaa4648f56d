"""The index on a damaged, edited or foreign file: sqlite3.DatabaseError and nothing else, and never without an end."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.offload.tiers import index_tables
from headrace.offload.tiers.disk import passing
from headrace.offload.tiers.index import BlobEntry, Index


@pytest.mark.parametrize("damage", [b"garbage" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_damaged(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(damage)
    with pytest.raises(sqlite3.DatabaseError):
        Index(str(path), 10, 0.25)


def test_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    Index(str(path), 10, 0.25).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        Index(str(path), 10, 0.25)


def filled(path: Path) -> None:
    index = Index(str(path), 1000, 0.25)
    for number in range(20):
        index.reserve(b"name %d" % number, b"tenant %d" % (number % 3), 10 + number)
        index.commit(BlobEntry(b"name %d" % number, b"tenant %d" % (number % 3), 10 + number))
    index.close()


def use(path: Path) -> None:
    """Everything that a tier asks of an index. Raises sqlite3.Error if the index is damaged."""
    index = Index(str(path), 300, 0.25, timeout_s=0.2)
    try:
        names = [b"name %d" % number for number in range(30)]
        index.has(names)
        index.find(names)
        index.entries()
        index.cancel(index.reserved())
        if index.reserve(b"new", b"tenant 1", 100).granted:
            index.commit(BlobEntry(b"new", b"tenant 1", 100))
        index.remove(names[:5])
        index.trim()
        assert all(size >= 0 and blobs >= 0 for size, blobs in index.usage().values())
    finally:
        index.close()


def test_flipped_bytes_raise_nothing_but_what_sqlite_raises(tmp_path: Path) -> None:
    filled(tmp_path / "sound")
    sound = (tmp_path / "sound").read_bytes()
    drawn, noticed = random.Random(1), 0
    for _ in range(300):
        damaged = bytearray(sound)
        damaged[drawn.randrange(len(sound))] ^= 1 << drawn.randrange(8)
        for old in tmp_path.glob("x*"):
            old.unlink()
        (tmp_path / "x").write_bytes(damaged)
        try:
            use(tmp_path / "x")
        except sqlite3.Error:
            noticed += 1
    assert noticed > 30


ODD = ["'text'", "X'FF'", "CAST(X'FFFE' AS TEXT)", "-1", "9223372036854775807", "1.5", "1e308", "7", "X''"]


@pytest.mark.parametrize("column", ["name", "tenant", "bytes", "used", "ready"])
@pytest.mark.parametrize("value", ODD)
def test_an_edited_value_is_noticed_or_harmless(tmp_path: Path, column: str, value: str) -> None:
    path = tmp_path / "index.sqlite"
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE blobs SET {column} = {value} WHERE id = 3")
    db.close()
    if (column, value) in {("name", "X'FF'"), ("used", "7")}:
        return use(path)
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        use(path)


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("column", ["tenant", "bytes", "blobs"])
def test_sums_that_are_not_those_of_the_blobs(tmp_path: Path, column: str, value: str) -> None:
    path = tmp_path / "index.sqlite"
    filled(path)
    with sqlite3.connect(path) as db:
        if (column, value) == ("blobs", "7"):
            value = "8"  # 7 is right
        db.execute(f"UPDATE tenants SET {column} = {value} WHERE tenant = CAST('tenant 1' AS BLOB)")
    db.close()
    with pytest.raises(sqlite3.DatabaseError, match="damaged"):
        use(path)


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TRIGGER t AFTER UPDATE ON blobs BEGIN UPDATE tenants SET bytes = 0; END",
        "CREATE VIEW v AS SELECT 1",
        "DROP TRIGGER added",
        "DROP INDEX blobs_by_use",
        "ALTER TABLE blobs ADD COLUMN more",
        "ALTER TABLE tenants RENAME TO old; CREATE VIEW tenants AS SELECT * FROM old",
    ],
)
def test_of_another_schema(tmp_path: Path, change: str) -> None:
    path = tmp_path / "index.sqlite"
    filled(path)
    with sqlite3.connect(path) as db:
        db.executescript(change)
    db.close()
    with pytest.raises(sqlite3.DatabaseError, match="other tables"):
        Index(str(path), 1000, 0.25)


def test_a_value_edited_while_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    filled(path)
    index = Index(str(path), 1000, 0.25)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE blobs SET bytes = 'many' WHERE name = CAST('name 3' AS BLOB)")
        db.execute("UPDATE tenants SET bytes = 'many'")
    db.close()
    for asked in (lambda: index.find([b"name 3"]), index.entries, index.usage, lambda: index.reserve(b"n", b"t", 900)):
        with pytest.raises(sqlite3.DatabaseError, match="damaged"):
            asked()


def test_a_check_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.sqlite"
    index = Index(str(path), 10**9, 0.25)
    index.adopt([(BlobEntry(b"%d" % number, b"t", 1), number) for number in range(50_000)])
    index.close()
    monkeypatch.setattr(index_tables, "BULK_S", -1.0)
    with pytest.raises(sqlite3.DatabaseError, match="did not answer within"):
        Index(str(path), 10**9, 0.25)


def test_a_question_without_an_end_while_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.sqlite"
    filled(path)
    index = Index(str(path), 1000, 0.25)
    add_endless_trigger(path)
    monkeypatch.setattr(index_tables, "ANSWER_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(index.remove, [b"name 3"])
        try:
            error = asked.exception(timeout=60)
        except TimeoutError:
            index._db.interrupt()  # or the thread would never end
            raise
    assert isinstance(error, sqlite3.DatabaseError) and "did not answer within" in str(error)
    assert not passing(error), "the index must be set aside"
    assert index.has([b"name 3"]) == [True], "a change that was not finished is taken back"
    index.close()


def add_endless_trigger(path: Path) -> None:
    forever = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(f"CREATE TRIGGER forever AFTER DELETE ON blobs BEGIN SELECT 1 WHERE ({forever}) = 0; END")
