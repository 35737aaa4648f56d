"""The directory of stored chunks: every file of it damaged, replaced or edited, between runs and while it is in use."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from headrace.offload.tiers.disk import DiskTier
from tools.fuzz import mutate
from tools.fuzz.stored import blob, named, there

BLOBS, BUDGET = 12, 16


class Disk:
    memory_mib = 128
    case_s = 30.0

    def open(self, folder: Path) -> None:
        self.blobs = [blob(number) for number in range(BLOBS + 3)]
        self.sound, self.root = folder / "sound", folder / "kv"
        with contextlib.closing(self._tier(self.sound)) as tier:
            for number in range(BLOBS):
                assert self._put(tier, number)

    def case(self, rng: Random) -> str:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.sound, self.root)
        tier = None
        if rng.random() < 0.5:
            tier = self._tier(self.root)
            self._read(tier, rng.randrange(BLOBS))
        for _ in range(rng.choice((1, 1, 2))):
            with contextlib.suppress(OSError, sqlite3.Error):
                self._damage(rng)
        tier = tier or self._tier(self.root)
        outcome = self._use(tier, rng)
        tier.close()
        with contextlib.closing(self._tier(self.root)) as again:  # what was found damaged is mended by now
            self._use(again, rng)
            self._store_at_last(again, BLOBS + 2)
        return outcome

    def _store_at_last(self, tier: DiskTier, number: int) -> None:
        """A failure may be found only now, and is mended after the pause."""
        for _ in range(3):
            stored = tier.put(named(number), b"", [self.blobs[number]])
            if stored:
                assert self._read(tier, number), "what was stored a moment ago is not there"
                return
            time.sleep(0.005)
        held = [name for name in ("tmp", "lock", "blobs") if not self._sound(self.root / name)]
        assert held or tier.stats().degraded, "nothing can be stored any more"

    def _sound(self, path: Path) -> bool:
        return path.is_dir() if path.name != "lock" else path.is_file() and not path.is_symlink()

    def close(self) -> None:
        pass

    def _tier(self, root: Path) -> DiskTier:
        return DiskTier(root, BUDGET * len(self.blobs[0]), timeout_s=0.2, retry_s=0.001)

    def _put(self, tier: DiskTier, number: int) -> bool:
        return tier.put(named(number), b"tenant %d" % (number % 3), [self.blobs[number]])

    def _read(self, tier: DiskTier, number: int) -> bool:
        return there(tier, number, self.blobs[number])

    def _use(self, tier: DiskTier, rng: Random) -> str:
        """All that an engine asks of a tier. Raises if a promise is broken."""
        tier.has([named(number) for number in range(BLOBS + 2)])
        right = sum(self._read(tier, number) for number in range(BLOBS))
        for number in range(BLOBS, BLOBS + 2):
            self._put(tier, number)
            self._read(tier, number)
        stats = tier.stats()
        msgspec.msgpack.encode(stats)
        assert stats.used_bytes >= 0 and stats.blobs >= 0
        return "degraded" if stats.degraded else "all there" if right == BLOBS else "some lost"

    def _damage(self, rng: Random) -> None:
        everything = sorted(path for path in self.root.rglob("*") if path.is_file() or path.is_symlink())
        index = self.root / "index.sqlite"
        kind = rng.randrange(8)
        if kind <= 2:
            self._overwrite(index if kind else rng.choice(everything), rng)
        elif kind == 3:
            self._edit_row(index, rng)
        elif kind == 4:
            self._edit_schema(index, rng)
        elif kind == 5:
            self._replace(rng.choice((rng.choice(everything), index, self.root / "index.sqlite-wal")), rng)
        elif kind == 6:
            path = rng.choice(everything)
            path.rename(path.with_name(rng.choice((path.name + "x", "a", path.name[::-1]))))
        else:
            rng.choice(everything).unlink()

    def _overwrite(self, path: Path, rng: Random) -> None:
        if path.is_file() and not path.is_symlink():
            path.write_bytes(mutate.damaged(path.read_bytes(), rng))

    def _replace(self, path: Path, rng: Random) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        kind = rng.randrange(4)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", str(path), "nowhere")))
        elif kind == 2:
            path.mkdir()
        else:
            path.write_bytes(rng.randbytes(rng.choice((0, 1, 5000))))

    def _edit_row(self, index: Path, rng: Random) -> None:
        table, columns = rng.choice(
            (("blobs", ("name", "tenant", "bytes", "used", "ready", "id")), ("tenants", ("tenant", "bytes", "blobs")))
        )
        value = rng.choice((mutate.odd(rng, 3), rng.randbytes(5), b"", 2**62))
        with self._editing(index) as db:
            where = "" if rng.random() < 0.3 else f"WHERE rowid = {rng.randrange(1, 14)}"
            with contextlib.suppress(OverflowError, UnicodeEncodeError, sqlite3.Error):
                db.execute(f"UPDATE OR REPLACE {table} SET {rng.choice(columns)} = ? {where}", (value,))

    def _edit_schema(self, index: Path, rng: Random) -> None:
        change = rng.choice(
            (
                "DROP TRIGGER added", "DROP TABLE tenants", "DROP INDEX blobs_by_use", "PRAGMA user_version = 7",
                "PRAGMA user_version = 0", "PRAGMA journal_mode = DELETE", "DELETE FROM tenants",
                "CREATE TRIGGER t AFTER INSERT ON blobs BEGIN DELETE FROM blobs; END",
                "CREATE TRIGGER t AFTER INSERT ON blobs BEGIN "
                f"SELECT count(*) FROM {', '.join(f'blobs b{number}' for number in range(12))}; END",
                "ALTER TABLE blobs RENAME TO b; CREATE VIEW blobs AS SELECT * FROM b",
                "ALTER TABLE blobs ADD COLUMN x DEFAULT 7", "PRAGMA encoding = 'UTF-16'; VACUUM",
                "PRAGMA page_size = 65536; PRAGMA journal_mode = DELETE; VACUUM",
            )
        )  # fmt: skip
        with self._editing(index) as db:
            db.executescript(change)

    @contextlib.contextmanager
    def _editing(self, index: Path) -> Iterator[sqlite3.Connection]:
        """A connection of somebody else's; its own statements end too. SQLite would wait for ever at a pipe."""
        if not all(path.is_file() for path in index.parent.glob(index.name + "*")):
            raise sqlite3.OperationalError("something else than a file lies there")
        end = time.monotonic() + 0.5
        with contextlib.closing(sqlite3.connect(index, timeout=0.05, isolation_level=None)) as db:
            db.set_progress_handler(lambda: time.monotonic() > end, 10_000)
            yield db


def door() -> Disk:
    return Disk()
