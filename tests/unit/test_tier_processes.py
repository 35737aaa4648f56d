"""A directory of blobs and whole processes: killed, several at once, without rights, out of room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.offload.tiers.disk import DiskTier
from tests.support.tier_contract import SIZE, content, get, held, name, put
from tests.support.tier_directory import check, descriptors

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534

BEGIN = """
import os, resource, sys
from headrace.offload.tiers.disk import DiskTier
from tests.support.tier_contract import SIZE, content, get, held, name, put
"""


def start(code: str, *values: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that runs the code, whose arguments are the values and whose first directory is the repository."""
    command = [*before, sys.executable, "-c", BEGIN + code, *map(str, values)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


PUTS = """
tier = DiskTier(sys.argv[1], 40 * SIZE)
for number in range(1_000_000):
    assert put(tier, number, b"%d" % (number % 3))
    print(number, flush=True)
"""


@pytest.mark.parametrize("last", [0, 30, 75])
def test_killed(tmp_path: Path, last: int) -> None:
    """kill -9 in the middle of puts: what was put and not evicted since is found again, and nothing else lies about."""
    process = start(PUTS, tmp_path)
    assert process.stdout is not None
    while int(process.stdout.readline()) < last:
        pass
    process.send_signal(signal.SIGKILL)
    told = [last, *map(int, process.stdout)][-1]
    process.communicate()
    tier = DiskTier(tmp_path, 40 * SIZE)
    there = held(tier, list(range(told + 3)))
    # The one that was being put may be there, or may have cost another its place.
    assert set(there) >= set(range(max(0, told - 36), told + 1))
    assert all(get(tier, number) == content(number) for number in there)
    check(tier, tmp_path)
    assert put(tier, "another")


HAMMER = """
tier, seed = DiskTier(sys.argv[1], 12 * SIZE, timeout_s=60.0), int(sys.argv[2])
read = 0
print("ready", flush=True)
sys.stdin.readline()
for turn in range(150):
    number = (seed * 11 + turn * 7) % 30
    put(tier, number, b"%d" % (number % 2))
    if turn % 25 == 24:
        tier.drop([name(number)])
    for other in (number, (number + 9) % 30):
        found = get(tier, other)
        assert found in (None, content(other)), other
        read += found is not None
stats = tier.stats()
assert stats.errors == 0 and not stats.degraded, stats
assert stats.used_bytes <= 12 * SIZE, stats
print(read, stats.writes)
tier.close()
"""


def test_two_on_one_directory(tmp_path: Path) -> None:
    """They see each other's blobs, share the budget, and never read anything wrong."""
    processes = [start(HAMMER, tmp_path, seed) for seed in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        read, written = map(int, finish(process).split())
        assert read > 0 and written > 0
    tier = DiskTier(tmp_path, 12 * SIZE)
    assert sum(path.stat().st_size for path in tmp_path.glob("blobs/??/*")) <= 12 * SIZE
    check(tier, tmp_path)


def test_seen_and_evicted_by_another(tmp_path: Path) -> None:
    """Two in one process are as two processes: each has its own connection and locks."""
    one, two = DiskTier(tmp_path, 4 * SIZE), DiskTier(tmp_path, 4 * SIZE)
    for number in range(4):
        put(one, number)
    assert held(two, range(4)) == [0, 1, 2, 3] and get(two, 0) == content(0)
    for number in range(4, 7):
        put(two, number)
    assert held(one, range(7)) == [0, 4, 5, 6]
    assert get(one, 1) is None and get(one, 5) == content(5)
    assert one.stats().used_bytes == two.stats().used_bytes == 4 * SIZE
    check(one, tmp_path)


def test_what_another_evicts_is_not_kept_open(tmp_path: Path) -> None:
    """Its room on the disk would not be free else, so that two engines would take up to twice the budget."""
    one, two = DiskTier(tmp_path, 4 * SIZE), DiskTier(tmp_path, 4 * SIZE)
    for number in range(4):
        assert put(one, number) and get(one, number) == content(number)
    for number in range(4, 7):
        put(two, number)
    blobs = [fd for fd in descriptors(tmp_path) if "/blobs/" in os.readlink(f"/proc/self/fd/{fd}")]
    assert len(blobs) == 4
    assert one.stats().used_bytes == 4 * SIZE
    blobs = [os.readlink(f"/proc/self/fd/{fd}") for fd in descriptors(tmp_path)]
    assert sum("/blobs/" in path for path in blobs) == 1 and not any(path.endswith(" (deleted)") for path in blobs)
    assert get(one, 3) == content(3) and get(one, 0) is None


def test_index_lost_under_two(tmp_path: Path) -> None:
    """A third makes it anew; those that hold the lost one follow when they write."""
    one, two = DiskTier(tmp_path, 4 * SIZE), DiskTier(tmp_path, 4 * SIZE)
    put(one, 1)
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    three = DiskTier(tmp_path, 4 * SIZE)
    assert put(one, 2) and put(two, 3)
    assert held(one, [1, 2, 3]) == held(two, [1, 2, 3]) == held(three, [1, 2, 3]) == [1, 2, 3]
    check(three, tmp_path)


UNPRIVILEGED = f"""
from pathlib import Path
os.chdir(sys.argv[1])
for path in [Path("."), *Path(".").rglob("*")]:
    os.chmod(path, 0o500 if path.is_dir() else 0o400)
    if os.getuid() == 0:
        os.chown(path, {NOBODY}, {NOBODY})
if os.getuid() == 0:
    os.setgroups([])
    os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
    os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
Path.absolute = lambda self: self  # what is above the directory may not be read
"""

READ_ONLY = (
    UNPRIVILEGED
    + """
tier = DiskTier(".", 8 * SIZE)
assert tier.stats().degraded and "denied" in tier.stats().reason, tier.stats()
assert held(tier, range(4)) == [0, 1, 2] and get(tier, 1) == content(1)
assert put(tier, 1) and not put(tier, 3)
tier._health.resume()
assert not put(tier, 3)
tier.drop([name(0)])
assert held(tier, range(4)) == [1, 2] and get(tier, 2) == content(2)
stats = tier.stats()
assert (stats.dropped, stats.bad, stats.degraded) == (2, 1, True), stats
tier.close()
"""
)


def writable(root: Path) -> None:
    """So that pytest can remove it."""
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)


def test_read_only(tmp_path: Path) -> None:
    """What is there is read, also where not even the index can be opened."""
    tier = DiskTier(tmp_path, 8 * SIZE)
    for number in range(3):
        put(tier, number)
    tier.close()
    finish(start(READ_ONLY, tmp_path))
    writable(tmp_path)
    assert held(DiskTier(tmp_path, 8 * SIZE), range(4)) == [0, 1, 2]


NOTHING = (
    UNPRIVILEGED
    + """
tier = DiskTier("below/kv", 8 * SIZE)
assert tier.stats().degraded and "denied" in tier.stats().reason, tier.stats()
assert not put(tier, 1) and held(tier, [1]) == [] and get(tier, 1) is None
tier.close()
"""
)


def test_nothing_can_be_made(tmp_path: Path) -> None:
    finish(start(NOTHING, tmp_path))
    writable(tmp_path)


LIMITED = """
tier = DiskTier(sys.argv[1], 100 * SIZE, retry_s=3600.0)
assert put(tier, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
assert not put(tier, 2, size=(1 << 20) + 1)
stats = tier.stats()
assert stats.degraded and "write: " in stats.reason and stats.dropped == 1, stats
assert get(tier, 1) == content(1) and held(tier, [1, 2]) == [1]
tier._health.resume()
assert put(tier, 3) and not tier.stats().degraded
"""


def test_no_room_in_mid_write(tmp_path: Path) -> None:
    """The system itself stops the write half-way: a limit on the size of files, which needs no rights."""
    finish(start(LIMITED.replace("100 * SIZE", "1 << 22"), tmp_path))
    check(DiskTier(tmp_path, 1 << 22), tmp_path)


FULL = """
assert not os.system(f"mount -t tmpfs -o size=2m tmpfs {sys.argv[1]}")
tier = DiskTier(sys.argv[1], 1 << 30, retry_s=3600.0)
assert all(put(tier, number, size=50_000) for number in range(60)), tier.stats()
stats, kept = tier.stats(), held(tier, range(60))
assert len(kept) > 5 and kept == list(range(60 - len(kept), 60)), kept  # those that were used last
assert (stats.evictions, stats.dropped, stats.degraded) == (60 - len(kept), 0, False), stats
assert all(get(tier, one, 50_000) == content(one, 50_000) for one in kept)
assert os.listdir(sys.argv[1] + "/tmp") == []
others = open(sys.argv[1] + "/others", "wb", buffering=0)
try:
    while others.write(bytes(4096)):
        pass
except OSError:
    pass
assert not put(tier, 60, size=4_000_000) and not put(tier, 61, size=50_000)
stats = tier.stats()
assert stats.degraded and stats.dropped == 2 and held(tier, range(62)) == kept, stats
assert "space" in stats.reason or "full" in stats.reason, stats
assert all(get(tier, one, 50_000) == content(one, 50_000) for one in kept)
assert os.listdir(sys.argv[1] + "/tmp") == []
os.truncate(sys.argv[1] + "/others", 8192)
tier._health.resume()
assert put(tier, 62, size=50_000) and get(tier, 62, 50_000) == content(62, 50_000)
tier.close()
again = DiskTier(sys.argv[1], 1 << 30)
assert held(again, range(63))[-1] == 62 and again.stats().blobs > 5
"""

OWN_MOUNTS = ("unshare", "-rm")


def can_mount() -> bool:
    try:
        done = subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    except OSError:
        return False
    return done.returncode == 0


def test_full(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no tmpfs can be mounted in a user namespace here")
    finish(start(FULL, tmp_path, before=OWN_MOUNTS))


def test_descriptors_are_not_inherited(tmp_path: Path) -> None:
    """A child must not hold a lock of a draft, nor an evicted file, longer than we do."""
    tier = DiskTier(tmp_path, 8 * SIZE)
    put(tier, 1)
    get(tier, 1)
    draft = tier._files.draft(name(2))
    assert draft is not None
    mine = descriptors(tmp_path)
    assert len(mine) >= 3 and not any(map(os.get_inheritable, mine))
    draft.close()
