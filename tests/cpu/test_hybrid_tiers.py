"""Recurrent states in the tiers: what is restored has the bits of what is computed; what is damaged is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from headrace import LLM, SamplingParams
from headrace.config import RecurrentSpec
from headrace.kv.storage import StateStorage
from headrace.offload.frame import DamagedBlob
from headrace.offload.state_codec import StateCodec
from headrace.offload.tiers.base import name_of
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.kind_sizes import VOCAB
from tests.support.offloading import forced, stored, watched
from tests.support.redis_servers import Proxy, fake_server
from tests.support.traces import Trace, run, same

pytestmark = pytest.mark.cpu
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        "3_5",
        "lfm2",
        "granite",
        *(pytest.param(each, marks=pytest.mark.matrix) for each in ("lfm3", "kimi", "falcon_h1", "glm5")),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"))


def words(count: int, seed: int = 0) -> list[int]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=g).tolist()


def prompts() -> list[list[int]]:
    base = words(330)
    return [base, base[:130] + words(90, 1), base[:130] + words(99, 2), words(64, 3), [*base, *words(70, 4)]]


def engine(folder: Path, **settings: Any) -> LLM:
    llm = LLM(str(folder), **{"dtype": "bfloat16", "kv_cache_tokens": 4096, "recurrent_states": 16, **settings})
    if llm.engine.offload is not None:
        llm.engine.offload.choose = forced(0.0, 0.0)
    return llm


@pytest.fixture(scope="module")
def truth(folder: Path) -> list[Trace]:
    private = engine(folder, enable_prefix_caching=False)
    return [run(private, [prompt], SHORT)[0] for prompt in prompts()]


def restored(llm: LLM) -> int:
    return llm.engine.stats().restore.loaded_tokens


def test_restarted_is_the_same_as_cold(folder: Path, truth: list[Trace], tmp_path: Path) -> None:
    first = engine(folder, kv_offload_path=str(tmp_path))
    for prompt, trace in zip(prompts(), truth, strict=True):
        same(watched(first, [prompt], SHORT), [trace])
    first.close()
    again = engine(folder, kv_offload_path=str(tmp_path))
    same(watched(again, prompts(), SHORT), truth)
    assert restored(again) >= 320 + 64 and again.engine.stats().restore.failures == 0
    same(watched(again, prompts(), SHORT), truth)
    again.close()


def test_evicted_to_memory_and_restored(folder: Path, truth: list[Trace]) -> None:
    """A pool and states for little more than one prompt: what leaves goes to host memory, and comes back."""
    llm = engine(folder, kv_offloading_size=0.05, kv_cache_tokens=512, recurrent_states=2, max_batch_tokens=96)
    for _ in range(3):
        for prompt, trace in zip(prompts(), truth, strict=True):
            same(watched(llm, [prompt], SHORT), [trace])
            same(watched(llm, [words(300, 9)], SHORT), watched(llm, [words(300, 9)], SHORT))
    same(watched(llm, prompts(), SHORT), truth)
    assert restored(llm) > 0 and llm.engine.stats().restore.failures == 0
    llm.close()


def test_an_idle_engine_looks_for_states_once(folder: Path) -> None:
    """However many it stores; and once more to see that there are no others."""
    llm = engine(folder, kv_offloading_size=0.05)
    llm.generate(prompts(), SHORT)
    assert llm.engine.offload is not None and llm.engine.offload.states is not None
    states, looks = llm.engine.offload.states, []
    cache, nodes = states.cache, states.cache.nodes
    cache.nodes = lambda: looks.append(None) or nodes()  # type: ignore[method-assign, func-returns-value]
    assert len({node.digest for node in nodes()} - states._stored) > 2
    states.store_all(20)
    assert {node.digest for node in nodes()} <= states._stored and len(looks) == 2
    llm.close()


def test_a_damaged_state_is_computed_again(folder: Path, truth: list[Trace], tmp_path: Path) -> None:
    llm = engine(folder, kv_offloading_size=0.05)
    same(watched(llm, prompts()[:1], SHORT), truth[:1])
    offload = llm.engine.offload
    assert offload is not None and offload.states is not None
    stored(llm)
    offload.states.store_all(20)
    table = llm.engine.cache.open(prompts()[0])
    name = name_of(table.digest(4), "s")
    llm.engine.cache.close(table)
    llm.engine.cache.tree.clear()
    tier = offload.states.tiers.tiers[0]
    assert tier.has([name]) == [True]
    tier.drop([name])
    assert tier.put(name, b"", (b"x" * offload.states.codec.blob_bytes,))
    same(watched(llm, prompts()[:1], SHORT), truth[:1])
    stats = llm.engine.stats().restore
    assert stats.failures == 1 and stats.loaded_tokens == 0
    llm.close()


def test_a_state_that_is_gone_is_computed_again(folder: Path, truth: list[Trace]) -> None:
    """Keys and values of 320 tokens are stored, but no state: nothing is restored."""
    llm = engine(folder, kv_offloading_size=0.05)
    same(watched(llm, prompts()[:1], SHORT), truth[:1])
    offload = llm.engine.offload
    assert offload is not None and offload.states is not None
    stored(llm)
    table = llm.engine.cache.open(prompts()[0])
    llm.engine.cache.tree.clear()
    offload.states.tiers.drop([name_of(table.digest(chunk), "s") for chunk in range(5)])
    llm.engine.cache.close(table)
    same(watched(llm, prompts()[:1], SHORT), truth[:1])
    assert restored(llm) == 0 and llm.engine.stats().restore.failures == 0
    llm.close()


def test_a_remote_tier_is_shared_and_may_vanish(folder: Path, truth: list[Trace]) -> None:
    """What one engine stored another restores; a server that ends in mid-restore, or is gone, is a miss."""
    with fake_server() as address:
        proxy = Proxy(address)
        url = f"redis://127.0.0.1:{proxy.port}/0"
        first, second = (engine(folder, kv_remote_url=url, kv_offload_timeout_s=20.0) for _ in range(2))
        same(watched(first, prompts(), SHORT), truth)
        assert first.engine.offload is not None and first.engine.offload.states is not None
        stored(first)
        first.engine.offload.states.store_all(20)
        same(watched(second, prompts(), SHORT), truth)
        assert restored(second) >= 320 and second.engine.stats().restore.failures == 0
        second.engine.cache.tree.clear()
        proxy.misbehave("cut", 10_000)
        same(watched(second, prompts(), SHORT), truth)
        assert proxy.misbehaved.is_set(), "nothing was asked for"
        second.engine.cache.tree.clear()
        proxy.stop()
        same(watched(second, prompts(), SHORT), truth)
        first.close()
        second.close()
        proxy.close()


def test_a_damaged_state_on_a_remote_server(folder: Path, truth: list[Trace]) -> None:
    with fake_server() as (host, port):
        llm = engine(folder, kv_remote_url=f"redis://{host}:{port}/0", kv_offload_timeout_s=20.0)
        same(watched(llm, prompts()[:1], SHORT), truth[:1])
        offload = llm.engine.offload
        assert offload is not None and offload.states is not None
        stored(llm)
        offload.states.store_all(20)
        llm.engine.cache.tree.clear()
        server = redis.Redis(host, port, protocol=2)
        keys = [key for key in server.scan_iter() if server.strlen(key) == offload.states.codec.blob_bytes]
        assert keys
        for key in keys:
            server.setrange(key, offload.states.codec.blob_bytes - 3, b"xxx")
        same(watched(llm, prompts()[:1], SHORT), truth[:1])
        assert llm.engine.stats().restore.failures == 1 and restored(llm) == 0
        llm.close()


def test_states_as_blobs() -> None:
    storage = StateStorage(RecurrentSpec(2, 1, 2, 8, 16, 4), 3, torch.bfloat16)
    codec = StateCodec(storage, bytes(32))
    for layer in storage.layers:
        layer.last[1], layer.matrices[1] = torch.randn_like(layer.last[1]), torch.randn_like(layer.matrices[1])
    blob = torch.frombuffer(bytearray(b"".join(codec.encode(1, b"d" * 32))), dtype=torch.uint8)
    assert len(blob) == codec.blob_bytes
    codec.decode(blob, b"d" * 32, 2)
    for layer in storage.layers:
        assert torch.equal(layer.last[1], layer.last[2]) and torch.equal(layer.matrices[1], layer.matrices[2])
        layer.matrices[2].zero_()
    for broken, why in (
        (blob.flip(0), "starts with"),
        (_changed(blob, -3), "checksum"),
        (blob[:64], "are no header|cut off"),
    ):
        with pytest.raises(DamagedBlob, match=why):
            codec.decode(broken.contiguous(), b"d" * 32, 2)
    with pytest.raises(DamagedBlob, match="digest"):
        codec.decode(blob, b"e" * 32, 2)
    assert not storage.layers[1].matrices[2].any(), "a damaged state was put into its slot"


def _changed(blob: torch.Tensor, at: int) -> torch.Tensor:
    other = blob.clone()
    other[at] ^= 1
    return other
