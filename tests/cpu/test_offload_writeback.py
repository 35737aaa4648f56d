"""Chunks that were let go before they were stored: stored by an idle engine, at its end, and counted until then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.stored_prefixes import StoredPrefixes
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
