"""Tiers of several ranks on a fake device, the Triton kernels in their interpreter: what each rank stored comes back
while all compute, by every strategy, with the bits of one rank that had it all the while."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace import LLM, SamplingParams
from headrace.arrival import Arrival
from headrace.bench.shapes import write_checkpoint
from headrace.config import EngineConfig
from headrace.engine import preflight, tiers
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.kernels.triton import backend
from headrace.kv.storage import KVStorage
from headrace.models.decoder import load_decoder
from headrace.offload.ranked import words
from headrace.offload.ranked.agent import Opened, TierAgent
from headrace.offload.restore import timing
from headrace.offload.tiers.base import BlobKind
from headrace.parallel.coming import Coming
from headrace.parallel.rank import Rank
from headrace.parallel.transport import RankLost
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import SHAPE, computed, interpreted_on, ranks_of
from tests.support.loopback_ranks import Conversation, LoopbackRanks
from tests.support.offloading import MIXES, counters, flush, forced, watched
from tests.support.small_gpu_engines import tokens
from tests.support.thread_group import ranks_as_threads
from tests.support.traces import same

NEW = 2


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    with interpreted_on(made, monkeypatch):
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Any:
    return lru_cache(None)(lambda: load_decoder(folder, "float32", device=torch.device("cpu")))


def projecting(pool: KVStorage) -> Any:
    """In a Projector's place, which takes seconds in the interpreter: keys and values that follow from activations."""

    def project(chunks: Sequence[int], slots: Sequence[int], prompt_len: int) -> Callable[[int], None]:
        where = torch.tensor(slots)

        def layer(number: int) -> None:
            assert pool.x is not None
            rows = pool.x[number][where]
            for x, way in zip(pool.pools[number].tensors, (1.0, -2.0), strict=True):
                x[where] = (way * rows[:, None].view(len(slots), *x.shape[1:])).sin()

        return layer

    return project


def chunks_of(loopback: LoopbackRanks, talks: list[Conversation]) -> dict[int, dict[int, int]]:
    """By rank: its slots, and the number of the chunk in each."""
    found: dict[int, dict[int, int]] = {rank: {} for rank in range(loopback.size)}
    for talk in talks:
        for chunk, slot in enumerate(talk.slots):
            found[slot // loopback.slots][slot % loopback.slots] = chunk
    return found


def filled(loopback: LoopbackRanks, talks: list[Conversation]) -> None:
    """All cached chunks have activations, from which their keys and values follow: the same wherever they lie."""
    every = list(dict.fromkeys(slot for talk in talks for slot in talk.slots))
    for rank, chunks in chunks_of(loopback, talks).items():
        pool = loopback.ranks[rank].pool
        assert pool.x is not None
        for slot in chunks:
            g = torch.Generator().manual_seed(every.index(rank * loopback.slots + slot))
            for layer, x in enumerate(pool.x):
                x[slot] = torch.randn(x.shape[1:], generator=g)
                projecting(pool)([0], [slot], 0)(layer)


@pytest.fixture(scope="module")
def truth(decoder: Any) -> Any:
    """Of one rank, where nothing leaves."""
    return lru_cache(None)(lambda: computed(with_x(ranks_of(decoder(), 1)), "single", NEW, filled))


def with_x(loopback: LoopbackRanks) -> LoopbackRanks:
    """Its pools keep activations, too."""
    config = loopback.decoder.config
    for rank in loopback.ranks:
        rank.storage = KVStorage(config.attention, loopback.slots, torch.float32, config.hidden_size, torch.float32)
    return loopback


class Gated(Coming):
    """What comes to a rank: nothing before its computation has asked for it."""

    def __init__(self, agent: TierAgent) -> None:
        self.agent, self.asked = agent, threading.Event()
        agent.opened.bringing.submit(lambda: self.asked.wait(20), 0, "kv")

    def __bool__(self) -> bool:
        return bool(self.agent)

    def pending(self, slots: Iterable[int], layer: int) -> list[Arrival]:
        found = self.agent.pending(slots, layer)
        self.asked.set()
        return found


class Restored:
    """Has all cached chunks stored, spoilt and brought back: the first `projected` of each rank from activations."""

    def __init__(self, projected: int, **settings: Any) -> None:
        given = {"kv_offloading_size": 0.01, "kv_offload_activations": "on", **settings}
        self.config = EngineConfig(attention_backend="triton", **given)
        self.projected, self.agents, self.told = projected, list[TierAgent](), list[Any]()

    def __call__(self, loopback: LoopbackRanks, talks: list[Conversation]) -> None:
        filled(loopback, talks)
        for rank, chunks in chunks_of(loopback, talks).items():
            self._restore(loopback.ranks[rank], sorted(chunks.items(), key=lambda each: each[1]))

    def _restore(self, rank: Rank, chunks: list[tuple[int, int]]) -> None:
        def opener(identity: bytes) -> Opened:
            opened = tiers.open_here(self.config, "triton", identity, rank.decoder, rank.pool)
            return opened._replace(project=projecting(rank.pool))

        agent = TierAgent(opener, fence=rank.fence.here)
        agent.open(bytes(32))
        for slot, chunk in chunks:
            assert agent.store(words.ChunkToStore(slot, digest(slot), b"", True, activations=True, chunk=chunk))
        for x in (*(x for pool in rank.pool.pools for x in pool.tensors), *(rank.pool.x or ())):
            x.fill_(7)
        kinds: list[BlobKind] = ["x" if i < self.projected else "k" for i in range(len(chunks))]
        wanted = [
            words.WantedHere(chunk, digest(slot), slot, (words.Place(0),), kind)
            for kind, (slot, chunk) in zip(kinds, chunks, strict=True)
        ]
        rank.coming = Gated(agent)
        agent.obey(words.BringChunks(1, wanted, words.Prompt(0)), self.told.append)
        self.agents.append(agent)

    def close(self) -> None:
        for agent in self.agents:
            agent.obey(words.EndBring(2, 1), self.told.append)
            agent.obey(words.CloseTiers(3, 1.0), self.told.append)
        brought = [each for each in self.told if isinstance(each, words.ChunksBrought)]
        assert len(brought) == len(self.agents) and not any(each.reason for each in brought)


def digest(slot: int) -> bytes:
    return bytes([slot + 1]) * 32


@pytest.mark.parametrize(
    ("strategy", "size", "projected", "link"),
    [
        ("ring-kv", 2, 2, None),
        pytest.param("ring-kv", 2, 2, 0.001, marks=pytest.mark.matrix),
        pytest.param("ring-q", 2, 2, None, marks=pytest.mark.matrix),
        pytest.param("chain", 3, 0, None, marks=pytest.mark.matrix),
        pytest.param("gather", 2, 9, None, marks=pytest.mark.matrix),
    ],
)
def test_what_comes_back_is_what_was_there(
    strategy: str, size: int, projected: int, link: float | None, decoder: Any, truth: Any
) -> None:
    """Two sequences on a shared prefix, over a link (GB/s) so slow that steps wait, or none."""
    restored = Restored(projected, kv_link_gbps=link)
    ours = computed(with_x(ranks_of(decoder(), size)), strategy, NEW, restored)
    assert len(ours) == len(truth()) and all(torch.equal(x, y) for x, y in zip(ours, truth(), strict=True))
    restored.close()


TWO = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
CONTEXT: dict[str, Any] = {"context_parallel_size": 2, "kv_cache_tokens": 64, "prefill_strategy": "ring-kv"}
KEEPER = {**CONTEXT, "kv_cache_tokens": 128, "prefill_strategy": "single"}
PROMPT = tokens(65, 3)
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "kv_cache_tokens": 128}


@pytest.mark.parametrize(
    ("ranks", "mix", "tier"),
    [
        (CONTEXT, "load", "host"),
        pytest.param(KEEPER, "project", "disk", marks=pytest.mark.matrix),
        pytest.param(TENSOR, "project", "host", marks=pytest.mark.matrix),
    ],
    ids=["context-load-host", "context-project-disk", "tensor-project-host"],
)
def test_whole_engines(
    ranks: dict[str, Any], mix: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a chunk and a token; then again, with the chunk back from its rank's tier. In the first case no rank
    has room for both chunks: two ranks decode."""
    with engine(ranks, tier, tmp_path, monkeypatch) as llm:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES[mix])
        timed: list[int] = []
        monkeypatch.setattr(StoredPrefixes, "observe", lambda self, slices, seconds: timed.append(slices[0].length))
        truth = watched(llm, [PROMPT], TWO)
        assert timed == [65], "a step of decoding is not over when it was launched"
        flush(llm)
        spoilt(llm)
        same(watched(llm, [PROMPT], TWO), truth)
        told = counters(llm)
        assert told.failures == 0 and told.loaded_tokens + told.projected_tokens == 64
        assert bool(told.projected_tokens) == (mix == "project")
        llm.close()


@pytest.mark.matrix
def test_a_damaged_chunk_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(CONTEXT, "disk", tmp_path, monkeypatch) as llm:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES["load"])
        truth = watched(llm, [PROMPT], TWO)
        flush(llm)
        for path in (tmp_path / "kv" / "blobs").rglob("*"):
            if path.is_file():
                content = bytearray(path.read_bytes())
                content[-100] ^= 4
                path.write_bytes(content)
        spoilt(llm)
        same(watched(llm, [PROMPT], TWO), truth)
        assert counters(llm).failures == 1 and not counters(llm).loaded_tokens
        llm.close()


@pytest.mark.matrix
def test_a_rank_that_is_lost_while_chunks_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked hears of it, and rank 0 gives up its pinned memory: another engine may be made."""
    with engine(CONTEXT, "host", tmp_path, monkeypatch) as llm:
        assert llm.engine.offload is not None
        llm.engine.offload.choose = forced(*MIXES["load"])
        watched(llm, [PROMPT], TWO)
        flush(llm)
        group: Any = llm.engine.loaded.ranks
        [rank] = group.group.workers.made
        monkeypatch.setattr(rank, "run", lambda step: 1 / 0)
        with pytest.raises(RankLost, match="rank 1 failed: ZeroDivisionError"):
            llm.generate([PROMPT], TWO)
        peers, told = llm.engine.offload.tiers.peers, counters(llm)
        llm.close()
        assert not peers.agents[0].opened.tiers.find([bytes(33)])[0] and told.restores == 1
        with pytest.raises(ValueError, match="closed"):
            peers.agents[0].opened.bringing.submit(lambda: None, 0, "kv")


@contextmanager
def engine(ranks: dict[str, Any], tier: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(preflight, "GPU_DEVICES", ("null",))
    for measured in ("call_seconds", "brief_seconds"):  # not how fast an interpreter restores
        monkeypatch.setattr(timing, measured, lambda work, most_s=0.05: 1e-3)
    monkeypatch.setattr(backend, "verify", lambda *given: None)
    width = 64 if ranks is TENSOR else 16
    shape = replace(SHAPE, layers=1, hidden=width, heads=2, kv_heads=2, mlp=width, context=256)
    model = str(write_checkpoint(shape, folder / "model"))
    places = {"host": {"kv_offloading_size": 0.01}, "disk": {"kv_offload_path": str(folder / "kv")}}
    with ranks_as_threads():
        yield LLM(model, attention_backend="triton", dtype="float32", max_sequences=1, kv_offload_activations="on",
                  **places[tier], **ranks)  # fmt: skip


def spoilt(llm: LLM) -> None:
    """What lies in the pools of all ranks is wrong from now on."""
    group: Any = llm.engine.loaded.ranks
    for rank in (group.rank, *group.group.workers.made):
        for x in (*(x for pool in rank.pool.pools for x in pool.tensors), *(rank.pool.x or ())):
            x.fill_(7)
