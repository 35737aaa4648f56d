"""Chunks that were let go before they were stored: stored by an idle engine, at its end, and counted until then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.offload.tiers import upkeep
from headrace.offload.tiers.notes import read_notes
from headrace.offload.writeback import Writeback
from headrace.types import CHUNK
from tests.support.offloading import forced

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
FIRST, SECOND = ([(i * 37 + i // 61) % 1900 + start for i in range(660)] for start in (50, 51))
CHUNKS = 659 // CHUNK


@pytest.fixture
def kv(tmp_path: Path) -> dict[str, Any]:
    return {"kv_cache_tokens": 22 * CHUNK, "kv_offload_path": str(tmp_path / "kv")}


def let_go(kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, StoredPrefixes]:
    """An engine that has had to let a prompt's chunks go before the thread came to them."""
    llm = LLM("tiny", **kv)
    offload = llm.engine.offload
    assert offload is not None
    with monkeypatch.context() as patch:
        patch.setattr(Writeback, "_run", lambda self: None)
        offload.writeback._queue.put(None)
        offload.writeback._thread.join()
        llm.generate([FIRST], PARAMS)
        assert llm.engine.stats().restore.unstored == CHUNKS
        offload.make_room()
    assert llm.engine.stats().restore.unstored == CHUNKS and offload.tiers.stats()["disk"].writes == 0
    return llm, offload


def restored(kv: dict[str, Any]) -> int:
    """Chunks of the first prompt that a new engine on the directory has."""
    llm = LLM("tiny", **kv)
    assert llm.engine.offload is not None
    llm.engine.offload.choose = forced(0.0, 0.0)
    chunks = llm.generate([FIRST], PARAMS)[0].metrics.restored_tokens // CHUNK
    llm.close()
    return chunks


def test_stored_when_there_is_nothing_else_to_do(kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, offload = let_go(kv, monkeypatch)
    asked = 0
    while llm.engine.settle():
        asked += 1
        time.sleep(0.001)
        assert asked < 10_000, "the engine does not come to rest"
    assert llm.engine.stats().restore.unstored == 0 and offload.tiers.stats()["disk"].writes == CHUNKS
    assert restored(kv) == CHUNKS, "as after kill -9"
    llm.close()


def test_stored_at_the_end(kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = let_go(kv, monkeypatch)
    llm.close()
    llm.close()
    assert restored(kv) == CHUNKS


def test_nothing_is_stored_while_there_is_work(kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, offload = let_go(kv, monkeypatch)
    llm.engine.add(llm._request(SECOND, PARAMS, None, 0))
    llm.engine.settle()
    assert offload.tiers.stats()["disk"].writes == 0 and llm.engine.stats().restore.unstored == CHUNKS
    while llm.engine.has_work:
        llm.engine.step()
    llm.close()
    assert restored(kv) == CHUNKS


def test_only_while_nothing_is_computed(kv: dict[str, Any]) -> None:
    """With writes while idle the engine gives disk nothing beside a step, not even what is evicted; what is left is
    stored once there is time for it."""
    llm = LLM("tiny", **kv, kv_offloading_size=0.01, kv_offload_write="idle")
    offload = llm.engine.offload
    assert offload is not None
    for number in range(2):
        llm.generate([[FIRST, SECOND][number]], PARAMS)
        assert llm.engine.stats().restore.unstored == (number + 1) * CHUNKS
    third = [(i * 41) % 1900 + 50 for i in range(660)]
    llm.generate([third], PARAMS)
    stats = offload.tiers.stats()
    assert stats["disk"].writes == 0 and stats["host"].writes > 0, "what was evicted is kept in memory"
    unstored = llm.engine.stats().restore.unstored
    assert 2 * CHUNKS <= unstored < 3 * CHUNKS
    while llm.engine.settle():
        time.sleep(0.001)
    written = offload.tiers.stats()["disk"].writes
    assert llm.engine.stats().restore.unstored == 0 and written == sum(
        node.whole for node in llm.engine.cache.tree.idle.values()
    )
    llm.generate([FIRST], PARAMS)
    llm.close()
    assert restored({**kv, "kv_offload_write": "idle"}) == CHUNKS, "at the end all is stored"


@pytest.mark.parametrize(("prefill_s", "when"), [(1.0, "ended"), (1e-5, "idle")])
def test_sparing(prefill_s: float, when: str, kv: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that computes slowly stores as requests end; a quick one while idle."""
    monkeypatch.setattr("headrace.planner.profile.Profile.prefill", lambda self, start, count: prefill_s * count)
    llm = LLM("tiny", **kv, kv_offload_write="sparing")
    offload = llm.engine.offload
    assert offload is not None and offload.writeback.only_idle == (when == "idle")
    llm.close()


def test_a_model_is_named_beside_its_chunks(kv: dict[str, Any]) -> None:
    llm = LLM("tiny", **kv)
    ((note, _),) = read_notes(Path(kv["kv_offload_path"])).values()
    assert (note.model, note.dtype, note.format, note.budget_bytes) == ("tiny", "bfloat16", "raw", 32 << 30)
    llm.generate([FIRST], PARAMS)
    identity = llm.engine.cache.identity
    llm.close()
    found = list(upkeep.blobs(Path(kv["kv_offload_path"]), lambda done, total: None))
    assert len(found) == CHUNKS and {blob.identity for blob in found} == {identity}
    assert not list(upkeep.verify(Path(kv["kv_offload_path"]), lambda done, total: None))
