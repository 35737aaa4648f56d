"""Whatever happens to what is stored: the answer of a cold engine, and a count or a line in the log that tells."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.offload import frame
from headrace.offload.tiers.base import TierStats
from headrace.offload.tiers.disk import SPARE
from headrace.types import CHUNK
from tests.support.offloading import flush, forced
from tests.support.redis_servers import Proxy, fake_server

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, SECTION = 3, 2 * 4 * 32 * CHUNK * 2
"""Of the shipped model: bytes of K and V of a chunk in one layer."""
HEADER = frame.header_bytes(LAYERS)
PROMPT = [(i * 37 + i // 61) % 1900 + 50 for i in range(1000)]
CHUNKS = 999 // CHUNK
HIT = 4
"""The chunk that is damaged."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TIMEOUT_S = 2.0

FULL = re.compile("No space left|disk is full")  # in the words of the system and of SQLite

PLACES = {
    "magic": 0, "version": 8, "kind": 10, "format": 11, "layers": 12, "section bytes": 16, "identity": 24, "digest": 87,
    "sum of layer 0": 88, "sum of layer 2": 88 + 16, "padding": HEADER - 9, "checksum": HEADER - 1,
    "K of layer 0": HEADER, "V of layer 0": HEADER + SECTION // 2, "K of layer 1": HEADER + SECTION + 77,
    "V of layer 2": HEADER + 3 * SECTION - 1,
}  # fmt: skip


def engine(**settings: Any) -> LLM:
    """An engine that loads whatever is stored."""
    llm = LLM("tiny", **{"kv_cache_tokens": 4096, "kv_offload_timeout_s": TIMEOUT_S, **settings})
    if llm.engine.offload is not None:
        llm.engine.offload.choose = forced(0.0, 0.0)
    return llm


@pytest.fixture(scope="module")
def right() -> list[int]:
    return LLM("tiny", kv_cache_tokens=4096).generate([PROMPT], PARAMS)[0].token_ids


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, right: list[int]) -> Path:
    """A directory with the prompt's chunks."""
    kv = tmp_path_factory.mktemp("whole") / "kv"
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, 0)
    llm.close()
    return kv


@pytest.fixture
def kv(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "kv")


def ask(llm: LLM) -> tuple[list[int], int]:
    """The answer, and how many chunks came back."""
    output = llm.generate([PROMPT], PARAMS)[0]
    llm.engine.scheduler.check()
    return output.token_ids, output.metrics.restored_tokens // CHUNK


def counts(llm: LLM, tier: str = "disk") -> TierStats:
    assert llm.engine.offload is not None
    return llm.engine.offload.tiers.stats()[tier]


def failures(llm: LLM) -> int:
    assert llm.engine.offload is not None
    return llm.engine.offload.counters.failures


@pytest.fixture(scope="module")
def name_of_hit(whole: Path) -> Path:
    """Of the file of chunk HIT, within the directory."""
    llm = engine(kv_offload_path=str(whole))
    digest = llm.engine.cache.open(PROMPT).digest(HIT)
    llm.close()
    (found,) = whole.glob(f"blobs/*/{digest.hex()}*")
    return found.relative_to(whole)


def test_undamaged(kv: Path, right: list[int]) -> None:
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, CHUNKS)
    assert counts(llm).bad == counts(llm).misses == counts(llm).dropped == failures(llm) == 0
    llm.close()


def test_an_engine_that_rounds_shares_nothing_with_one_that_does_not(kv: Path, right: list[int]) -> None:
    rounding = engine(kv_offload_path=str(kv), kv_disk_format="int8")
    assert ask(rounding) == (right, 0)
    flush(rounding)
    assert ask(rounding)[1] == CHUNKS
    rounding.close()
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, CHUNKS) and counts(llm).bad == 0
    llm.close()


@pytest.mark.parametrize("place", PLACES)
def test_flipped_bytes(place: str, kv: Path, name_of_hit: Path, right: list[int]) -> None:
    file = kv / name_of_hit
    data = bytearray(file.read_bytes())
    data[PLACES[place]] ^= 0x10
    file.write_bytes(data)
    llm = engine(kv_offload_path=str(kv))
    answer, chunks = ask(llm)
    assert answer == right and chunks == HIT, "what stands before the damaged chunk is good"
    assert counts(llm).bad == failures(llm) == 1
    flush(llm)
    assert ask(llm) == (right, CHUNKS), "the chunk is not stored again"
    assert counts(llm).bad == failures(llm) == 1
    llm.close()


def cut(kv: Path, file: Path) -> None:
    os.truncate(file, HEADER + 1000)


def emptied(kv: Path, file: Path) -> None:
    os.truncate(file, 0)


def removed(kv: Path, file: Path) -> None:
    file.unlink()


def grown(kv: Path, file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def zeroed(kv: Path, file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def another(kv: Path, file: Path) -> None:
    """A sound blob of another chunk under this one's name."""
    others = sorted(path for path in (kv / "blobs").glob("*/*") if path != file and path.stat().st_size > HEADER)
    shutil.copyfile(others[0], file)


@pytest.mark.parametrize("harm", [cut, emptied, removed, grown, zeroed, another])
def test_harmed_files(harm: Callable[[Path, Path], None], kv: Path, name_of_hit: Path, right: list[int]) -> None:
    harm(kv, kv / name_of_hit)
    llm = engine(kv_offload_path=str(kv))
    answer, chunks = ask(llm)
    assert answer == right and chunks in (HIT, CHUNKS if harm is grown else HIT)
    flush(llm)
    assert ask(llm) == (right, CHUNKS), "the chunk is not stored again"
    llm.close()


@pytest.mark.parametrize("harm", [cut, removed, zeroed])
def test_harmed_under_a_running_engine(
    harm: Callable[[Path, Path], None], kv: Path, name_of_hit: Path, right: list[int]
) -> None:
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, CHUNKS)
    flush(llm)
    harm(kv, kv / name_of_hit)
    assert ask(llm)[0] == right
    flush(llm)
    assert ask(llm)[0] == right
    llm.close()


@pytest.mark.parametrize("harm", ["removed", "garbage", "half"])
def test_index(harm: str, kv: Path, right: list[int]) -> None:
    index = kv / "index.sqlite"
    if harm == "removed":
        for path in kv.glob("index.sqlite*"):
            path.unlink()
    elif harm == "garbage":
        index.write_bytes(b"garbage" * 1000)
    else:
        os.truncate(index, index.stat().st_size // 2)
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, CHUNKS)
    llm.close()


def test_all_of_it_removed_under_a_running_engine(kv: Path, right: list[int]) -> None:
    llm = engine(kv_offload_path=str(kv))
    assert ask(llm) == (right, CHUNKS)
    flush(llm)
    shutil.rmtree(kv)
    assert ask(llm)[0] == right
    flush(llm)
    assert ask(llm)[0] == right
    llm.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 10 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk(small_disk: Path, right: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Blobs make room for others; where all else is full, nothing is written."""
    llm = engine(kv_offload_path=str(small_disk / "kv"))
    room = SPARE + CHUNKS // 2 * (HEADER + LAYERS * SECTION)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - room))
    assert ask(llm) == (right, 0)
    flush(llm)
    told = counts(llm)
    assert told.evictions > 0 and not (told.dropped or told.errors or told.degraded)
    assert 0 < told.blobs < CHUNKS and ask(llm)[0] == right
    (small_disk / "more").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    llm.generate([[token + 1 for token in PROMPT]], PARAMS)
    flush(llm)
    told = counts(llm)
    assert told.dropped > 0 and told.errors > 0 and told.degraded
    assert FULL.search(told.reason) and FULL.search(caplog.text)
    assert ask(llm)[0] == right
    llm.close()


def test_read_only(kv: Path, right: list[int], caplog: pytest.LogCaptureFixture) -> None:
    bound = subprocess.run(["mount", "--bind", "-o", "ro", str(kv), str(kv)], capture_output=True)
    if bound.returncode:
        pytest.skip(f"no read-only mount can be had here: {bound.stderr.decode().strip()}")
    try:
        llm = engine(kv_offload_path=str(kv))
        assert ask(llm) == (right, CHUNKS), "reading needs no writing"
        other = [token + 1 for token in PROMPT]
        llm.generate([other], PARAMS)
        flush(llm)
        assert counts(llm).dropped > 0 and counts(llm).degraded and "Read-only" in caplog.text
        llm.close()
    finally:
        subprocess.run(["umount", "-l", str(kv)], check=True)


# ---- a remote server -------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with fake_server() as address:
        proxy = Proxy(address)
        yield proxy
        proxy.close()


def remote(proxy: Proxy) -> LLM:
    return engine(kv_remote_url=f"redis://127.0.0.1:{proxy.port}/0")


def test_remote_restart(proxy: Proxy, right: list[int]) -> None:
    llm = remote(proxy)
    assert ask(llm) == (right, 0)
    llm.close()
    again = remote(proxy)
    assert ask(again) == (right, CHUNKS) and counts(again, "remote").errors == 0
    again.close()


@pytest.mark.parametrize("mode", ["cut", "stall", "trickle", "say"])
@pytest.mark.parametrize("part", [0.0, 0.5], ids=["at once", "in mid-restore"])
def test_remote_that_misbehaves(
    mode: str, part: float, proxy: Proxy, right: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    llm = remote(proxy)
    ask(llm)
    flush(llm)
    before = counts(llm, "remote")
    size = CHUNKS * LAYERS * SECTION
    caplog.set_level(logging.WARNING)
    proxy.misbehave(mode, after=int(part * size) + (1000 if part else 0), saying=b"-ERR go away\r\n")
    answer, chunks = ask(llm)
    assert answer == right and chunks < CHUNKS
    after = counts(llm, "remote")
    assert (after.errors, after.misses) > (before.errors, before.misses)
    assert "remote" in caplog.text
    proxy.misbehave("pass")
    llm.close()


def test_remote_stopped_and_replaced(proxy: Proxy, right: list[int]) -> None:
    """Stopped, then another server at its address that has nothing; nobody is told."""
    llm = remote(proxy)
    ask(llm)
    flush(llm)
    proxy.stop()
    assert ask(llm)[0] == right
    assert counts(llm, "remote").degraded
    with fake_server() as empty:
        proxy.target = empty
        proxy.start()
        llm.engine.cache.tree.clear()
        assert ask(llm)[0] == right
        llm.close()


def test_remote_replaced_in_mid_restore(proxy: Proxy, right: list[int]) -> None:
    """The connection ends half-way, and who connects again meets a server that has nothing."""
    llm = remote(proxy)
    ask(llm)
    flush(llm)
    with fake_server() as empty:
        proxy.target = empty
        proxy.misbehave("cut", after=CHUNKS * LAYERS * SECTION // 2)
        heals = threading.Thread(target=lambda: proxy.misbehaved.wait(20) and setattr(proxy, "mode", "pass"))
        heals.start()
        answer, chunks = ask(llm)
        heals.join()
        assert answer == right and chunks < CHUNKS and proxy.misbehaved.is_set() and failures(llm) == 1
        flush(llm)
        assert ask(llm)[0] == right
        llm.close()


def test_remote_that_was_never_there(right: list[int], caplog: pytest.LogCaptureFixture) -> None:
    llm = engine(kv_remote_url="redis://user:secret@127.0.0.1:1/0")
    assert ask(llm) == (right, 0)
    flush(llm)
    assert ask(llm) == (right, 0) and counts(llm, "remote").degraded
    llm.close()
    assert "remote" in caplog.text and "secret" not in caplog.text
